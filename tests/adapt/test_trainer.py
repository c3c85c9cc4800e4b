"""The Trainer of transformers with scheduled models, on one rank and on several, and sampled generation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments

import penstock
from penstock.checkpoint.storage import CheckpointError
from tests.support.adapted import Batch, as_torchrun_starts_it, distance, small
from tests.support.families import tiny
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

STEPS, SAVED_AT, SAMPLES = 4, 2, 32
WORLDS = [2, pytest.param(4, marks=pytest.mark.soak)]


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """So many of them, one by one, with labels that are left out here and there."""

    def __init__(self) -> None:
        self._batch = Batch(samples=SAMPLES).inputs()
        self._batch["labels"][::3, 5:9] = -100

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: each[number] for name, each in self._batch.items()}


def smoothed(
    outputs: Mapping[str, Any], labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """Cross-entropy with smoothed labels, as a user would write it."""
    logits, wanted = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total: torch.Tensor = torch.nn.functional.cross_entropy(
        logits, wanted, reduction="sum", label_smoothing=0.1
    )
    return total.div(num_items_in_batch)


LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "labels": ({}, {}, {}),
    "router": ({}, {}, {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
    "smoothed": ({"label_smoothing_factor": 0.1}, {}, {}),
    "own": ({}, {"compute_loss_func": smoothed}, {}),
}
"""Settings of `TrainingArguments`, arguments of `Trainer`, changes of the model."""


def trained(
    model: Any,
    folder: str,
    world: int,
    resume: str | None = None,
    given: dict[str, Any] | None = None,
    **more: Any,
) -> list[float]:
    """Losses by step, and that of evaluation; every step has eight samples in two parts, of all ranks."""
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4 // world,
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
    trainer = Trainer(model=model, args=arguments, train_dataset=Samples(), **(given or {}))
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate(Samples())["eval_loss"]]


def train_on_ranks(rank: int, world: int, folder: str, loss: str, resume: str | None) -> list[float]:
    settings, given, changes = LOSSES[loss]
    model = small("mixtral", initializer_range=0.1, **changes)
    penstock.parallelize(model, ep_size=world, plan="flowmoe")
    with as_torchrun_starts_it(rank, world):
        return trained(model, folder, world, resume, given, **settings)


def refuse_on_ranks(rank: int, world: int, folder: str) -> None:
    model = penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe")
    with pytest.raises(ValueError, match=f"accelerate sees 1 of {world} processes"):
        trained(model, folder, world)
    with as_torchrun_starts_it(rank, world):
        with pytest.raises(ValueError, match="average_tokens_across_devices"):
            trained(model, folder, world, average_tokens_across_devices=False)
        with pytest.raises(ValueError, match="Adafactor"):
            trained(model, folder, world, optim="adafactor")
        trained(model, folder, world, save_only_model=True)
        with pytest.raises(ValueError, match="save_only_model"):
            trained(model, folder, world, resume=f"{folder}/checkpoint-{SAVED_AT}")


def test_one_process_trains_on_the_device_of_the_model_alone(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    model = penstock.parallelize(small("mixtral"), plan="flowmoe")
    trainer = Trainer(model=model, args=arguments, train_dataset=Samples())
    with pytest.raises(ValueError, match="steps run on cpu"):
        trainer._move_model_to_device(model, torch.device("meta"))  # as where there is a GPU
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match="on all 2 GPUs"):
        trainer.train()


def test_arguments_with_which_ranks_would_train_otherwise_are_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(refuse_on_ranks, 2, str(tmp_path))


@pytest.mark.few(2)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_trainer_trains_as_on_one_process(ranks: Pools, tmp_path: Path, loss: str, world: int) -> None:
    settings, given, changes = LOSSES[loss]
    wanted = trained(
        small("mixtral", initializer_range=0.1, **changes),
        str(tmp_path / "plain"),
        1,
        given=given,
        **settings,
    )
    folder = str(tmp_path / "ranks")
    results = ranks(world).run(train_on_ranks, world, folder, loss, None)
    if loss == "labels":  # what goes on, and on one rank, does not depend on the loss
        saved = f"{folder}/checkpoint-{SAVED_AT}"
        results += ranks(world).run(train_on_ranks, world, str(tmp_path / "again"), loss, saved)
        model = penstock.parallelize(small("mixtral", initializer_range=0.1))
        results.append(trained(model, str(tmp_path / "one"), 1))
    for found in results:  # logged with four digits
        assert found[:-1] == pytest.approx(wanted[:-1], rel=1e-4)
        if loss != "router":  # in evaluation, that of a router is of one rank's samples
            assert found[-1] == pytest.approx(wanted[-1], rel=1e-4)


class Lost(TrainerCallback):
    """Loses the first checkpoint during training."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        del control, others
        if state.global_step == SAVED_AT + 1 and args.should_save:
            shutil.rmtree(f"{args.output_dir}/checkpoint-{SAVED_AT}")


class Unseen(TrainerCallback):
    """Does not see the folder of the best model, as on a node with disks of its own."""

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        del args, control, others
        state.best_model_checkpoint = None


def end_with_the_worst(rank: int, world: int, folder: str) -> None:
    """A family that is not described, whose losses fall: the worst model is that of the first checkpoint."""

    def run(name: str, *callbacks: TrainerCallback, **more: Any) -> list[float]:
        model = penstock.parallelize(tiny("mellum").float(), plan="flowmoe")
        given = {"eval_dataset": Samples(), "callbacks": [*callbacks]}
        return trained(model, f"{folder}/{name}", world, given=given, **more)

    worst = {
        "eval_strategy": "steps",
        "eval_steps": SAVED_AT,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
    }
    with as_torchrun_starts_it(rank, world):
        *losses, found = run("kept", **worst)
        again = run("again", resume=f"{folder}/kept/checkpoint-{SAVED_AT}")
        assert again[:-1] == losses
        state = json.loads(Path(f"{folder}/kept/checkpoint-{STEPS}/trainer_state.json").read_text())
        assert found == state["best_metric"] > again[-1]
        assert run("unseen", *[Unseen()] * rank, **worst)[-1] == found
        with pytest.warns(match="load_best_model_at_end") if rank == 0 else nullcontext():
            assert run("lost", Lost(), **worst) == again


def test_the_best_model_is_loaded_at_the_end_if_it_is_there(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(end_with_the_worst, 2, str(tmp_path))


def test_mixed_precision_is_what_the_arguments_say(tmp_path: Path) -> None:
    """accelerate puts it around the model, and nothing else; scaled losses are refused."""
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "max_steps": 1}
    seen: list[torch.dtype] = []
    for more, words in (({"bf16": True}, ""), ({"torch_compile": True}, "torch_compile")):
        AcceleratorState._reset_state(True)
        model = penstock.parallelize(small("mixtral"))
        model.lm_head.register_forward_hook(lambda head, given, out: seen.append(out.dtype))
        trainer = Trainer(model=model, args=TrainingArguments(**settings, **more), train_dataset=Samples())
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            trainer.train()
    assert set(seen) == {torch.bfloat16}
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_what_spreads_parameters_is_refused_in_a_loop_of_accelerate(kind: DistributedType) -> None:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    model = penstock.parallelize(small("mixtral"))
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.state.distributed_type = kind
    for given in ((model, optimizer), (optimizer, model)):
        with pytest.raises(ValueError, match=f"spread already.*{kind.value}"):
            accelerator.prepare(*given)
    AcceleratorState._reset_state(True)


def loop(rank: int, world: int, folder: str) -> list[float]:
    """Losses in a loop of accelerate that stops after two steps, and goes on in another process."""
    losses: list[float] = []
    for begins, ends in ((0, 2), (2, STEPS)):
        shown: list[Any] = []
        with as_torchrun_starts_it(rank, world):
            torch.manual_seed(begins)
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            model = small("mixtral", initializer_range=0.1, seed=begins)
            if world > 1:
                model = penstock.parallelize(model, plan="flowmoe")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            samples = torch.utils.data.DataLoader(Samples(), batch_size=4 // world)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)  # accelerate steps it per rank
            model, optimizer, samples, scheduler = accelerator.prepare(model, optimizer, samples, scheduler)
            for when in ("save", "load"):
                getattr(accelerator, f"register_{when}_state_pre_hook")(
                    lambda models, *others, shown=shown: shown.append(([*models], *others))
                )
            if begins:
                accelerator.load_state(folder)
            for number, given in enumerate(samples):
                if begins <= number // 2 < ends:
                    with accelerator.accumulate(model):
                        logits = model(given["input_ids"]).logits
                        loss = smoothed({"logits": logits}, given["labels"], 11 * len(logits))
                        accelerator.backward(loss)
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.save_state(folder)
            models, states, where = shown.pop()
            plain = accelerator.unwrap_model(model)
            assert models == [plain] and states[0].keys() == plain.state_dict().keys() and where == folder
            assert shown == [([plain], folder)] * bool(begins)
            accelerator.save_model(model, f"{folder}/alone")
    return losses


@pytest.mark.parametrize("world", WORLDS)
def test_a_loop_of_accelerate_goes_on_from_its_state(ranks: Pools, tmp_path: Path, world: int) -> None:
    wanted = loop(0, 1, str(tmp_path / "one"))
    for found in ranks(world).run(loop, world, str(tmp_path / "two")):
        assert found == pytest.approx(wanted, rel=1e-5)
    one, two = (
        {
            name: each
            for file in (tmp_path / run / "alone").glob("*.safetensors")
            for name, each in load_file(file).items()
        }
        for run in ("one", "two")
    )
    assert one.keys() == two.keys()
    assert all(distance(two[name], tensor) < 1e-4 for name, tensor in one.items())


def test_a_state_that_cannot_be_written_leaves_the_former_one_of_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what accelerate itself has written of it, and hooks."""
    accelerator = Accelerator(cpu=True)
    model = penstock.parallelize(small("mixtral"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_save_state_pre_hook(
        lambda models, states, folder: Path(folder, "rate").write_text(str(scheduler.get_last_lr()))
    )
    accelerator.save_state(str(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model(**Batch().inputs()).loss.backward()
    optimizer.step()
    scheduler.step()
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=str(tmp_path)):
        patch.delattr("penstock.checkpoint.storage.write_shard")
        accelerator.save_state(str(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    accelerator.save_state(str(tmp_path))
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {name for name, content in before.items() if after[name] == content}
    assert after.keys() >= before.keys() and not kept & {"model.safetensors", "scheduler.bin", "rate"}
