"""The Trainer of transformers with scheduled models, on one rank and on several, and sampled generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainingArguments

import penstock
from penstock.adapt.trainer import ScheduledTrainer
from tests.support.adapted import Batch, as_torchrun_starts_it, small, without_labels
from tests.support.ranks import Pools

STEPS, SAVED_AT, SAMPLES = 4, 2, 32


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """So many of them, one by one, with labels that are left out here and there."""

    def __init__(self) -> None:
        self._batch = Batch(samples=SAMPLES).inputs()
        self._batch["labels"][::3, 5:9] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: each[number] for name, each in self._batch.items()}


def trained(
    kind: Any, model: Any, folder: str, world: int, resume: str | None = None, **more: Any
) -> list[float]:
    """Losses by step, and that of evaluation; every step has four samples in two parts, of all ranks."""
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2 // world,
        per_device_eval_batch_size=4 // world,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=SAVED_AT,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
        **more,
    )
    trainer = kind(model=model, args=arguments, train_dataset=Samples())
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate(Samples())["eval_loss"]]


def train_on_ranks(rank: int, world: int, folder: str, resume: str | None) -> list[float]:
    model = penstock.parallelize(small("mixtral", initializer_range=0.1), ep_size=world, plan="flowmoe")
    with pytest.raises(ValueError, match="accelerate sees 1 of 2 processes"):
        trained(ScheduledTrainer, model, folder, world)
    with as_torchrun_starts_it(rank, world):
        with pytest.raises(ValueError, match="average_tokens_across_devices"):
            trained(ScheduledTrainer, model, folder, world, average_tokens_across_devices=False)
        with pytest.raises(ValueError, match="Adafactor"):
            trained(ScheduledTrainer, model, folder, world, optim="adafactor")
        return trained(ScheduledTrainer, model, folder, world, resume)


@pytest.mark.slow
def test_the_trainer_follows_that_of_transformers(ranks: Pools, tmp_path: Path) -> None:
    wanted = trained(Trainer, small("mixtral", initializer_range=0.1), str(tmp_path / "plain"), 1)
    model = penstock.parallelize(small("mixtral", initializer_range=0.1))
    alone = trained(Trainer, model, str(tmp_path / "one"), 1)
    assert alone == pytest.approx(wanted, rel=1e-4)  # logged with four digits
    folder = str(tmp_path / "ranks")
    for found in ranks(2).run(train_on_ranks, 2, folder, None):
        assert found == pytest.approx(wanted, rel=1e-4)
    saved = f"{folder}/checkpoint-{SAVED_AT}"
    for found in ranks(2).run(train_on_ranks, 2, str(tmp_path / "again"), saved):
        assert found == pytest.approx(wanted, rel=1e-4)


def test_mixed_precision_is_what_the_arguments_say(tmp_path: Path) -> None:
    """accelerate would put it around a model that it wraps; scaled losses are refused."""
    AcceleratorState._reset_state(True)
    arguments = TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True, report_to=[])
    model = penstock.parallelize(small("mixtral"))
    trainer = ScheduledTrainer(model=model, args=arguments, train_dataset=Samples())
    with trainer.compute_loss_context_manager():
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    arguments.fp16 = True
    with pytest.raises(ValueError, match="use bf16"):
        trainer.train()
    arguments.fp16, arguments.torch_compile = False, True
    with pytest.raises(ValueError, match="torch_compile = True"):
        trainer.train()
    AcceleratorState._reset_state(True)


def test_other_losses_are_refused_by_their_settings(tmp_path: Path) -> None:
    """Trainer itself takes the labels away for them: then it is said when the model is called."""
    model = penstock.parallelize(small("mixtral"))
    common: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "max_steps": 1}
    smooth = TrainingArguments(**common, label_smoothing_factor=0.1)
    for kind, arguments, more, words in (
        (ScheduledTrainer, smooth, {}, r"label_smoothing_factor = 0\.1: "),
        (ScheduledTrainer, TrainingArguments(**common), {"compute_loss_func": max}, "compute_loss_func: "),
        (Trainer, smooth, {}, "label_smoothing_factor and compute_loss_func"),
    ):
        AcceleratorState._reset_state(True)
        with pytest.raises(ValueError, match=words):
            kind(model=model, args=arguments, train_dataset=Samples(), **more).train()
    AcceleratorState._reset_state(True)


def draw(rank: int, world: int) -> torch.Tensor:
    """What this rank samples from its own prompt with a seed of its own."""
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe").eval()
    return sampled(model, rank)


def sampled(model: Any, rank: int) -> torch.Tensor:
    prompt = without_labels(Batch().inputs(rank, rank + 1))["input_ids"][:, : 4 + rank]
    torch.manual_seed(rank)
    found: torch.Tensor = model.generate(
        prompt, max_new_tokens=4 + rank, do_sample=True, top_k=20, top_p=0.9, eos_token_id=None
    )
    return found


@pytest.mark.slow
def test_sampled_generation_is_that_of_transformers(ranks: Pools) -> None:
    whole = small("mixtral").eval()
    for rank, found in enumerate(ranks(2).run(draw, 2)):
        assert found.equal(sampled(whole, rank))
