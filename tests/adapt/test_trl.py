"""TRL's trainers, as they are, with scheduled models: curves on several ranks are those of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.distributed import DistributedBackend
from trl.experimental.online_dpo import OnlineDPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import dpo_trainer
from trl.trainer.callbacks import SyncRefModelCallback

import penstock
from penstock.adapt.scheduled import engine_of
from tests.adapt.test_adapters import adapted
from tests.support.adapted import as_torchrun_starts_it, distance, small
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
WORDS = [f"w{number}" for number in range(57)]
STEPS, SAVED_AT, SAMPLES = 4, 2, 32


def tokenizer() -> Any:
    """Every word is a token."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def texts(seed: int, fewest: int, most: int) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(fewest, most))) for _ in range(SAMPLES)]


def preferences() -> Dataset:
    columns = {"prompt": texts(1, 4, 4), "chosen": texts(2, 5, 5), "rejected": texts(3, 5, 5)}
    return Dataset.from_dict(columns)


def sft(model: Any, common: dict[str, Any], **more: Any) -> Any:
    data = Dataset.from_dict({"text": texts(0, 6, 14)})
    arguments = SFTConfig(**common, max_length=16, router_aux_loss_coef=0.0)
    return SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), **more)


def sft_with_adapters(model: Any, common: dict[str, Any]) -> Any:
    """Attention alone: adapters of experts begin otherwise where ranks have shares of them."""
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return sft(model, common, peft_config=adapters)


def dpo(model: Any, common: dict[str, Any], **more: Any) -> Any:
    arguments = DPOConfig(**common, max_length=16, router_aux_loss_coef=0.0, **more)
    return DPOTrainer(model=model, args=arguments, train_dataset=preferences(), processing_class=tokenizer())


def dpo_with_a_reference_that_follows(model: Any, common: dict[str, Any]) -> Any:
    """After the third step: checkpoints do not have the reference, with which a later start would go on."""
    return dpo(model, common, sync_ref_model=True, ref_model_sync_steps=3, ref_model_mixup_alpha=0.7)


def reward(model: Any, common: dict[str, Any]) -> Any:
    arguments = RewardConfig(**common, max_length=16)
    return RewardTrainer(
        model=model, args=arguments, train_dataset=preferences(), processing_class=tokenizer()
    )


def grpo(model: Any, common: dict[str, Any]) -> Any:
    """Every rank writes completions of its own, of other lengths, inside of the training loop."""
    per_device = 2 * common.pop("per_device_train_batch_size")
    arguments = GRPOConfig(
        **common,
        per_device_train_batch_size=per_device,
        max_completion_length=6,
        num_generations=2,
        beta=0.1,
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(set(each.split()))) for each in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts(1, 4, 4)}),
        processing_class=tokenizer(),
    )


def distillation(model: Any, common: dict[str, Any]) -> Any:
    """Completions are the student's own, as in GRPO."""
    return DistillationTrainer(
        model=model,
        teacher_model=small("mixtral", seed=1).eval(),
        args=DistillationConfig(**common, max_completion_length=6),
        train_dataset=Dataset.from_dict({"prompt": texts(1, 4, 4)}),
        processing_class=tokenizer(),
    )


TRAINERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "sft": sft,
    "sft with adapters": sft_with_adapters,
    "dpo": dpo,
    "dpo with a reference that follows": dpo_with_a_reference_that_follows,
    "reward": reward,
    "grpo": grpo,
    "distillation": distillation,
}

DRAWN = ("grpo", "distillation")
"""Whose samples are drawn by the model: otherwise on other ranks, and after a checkpoint."""


FEW = ("sft", "dpo with a reference that follows", "reward", "grpo")
"""Without DPO by itself, and adapters, which `test_peft.py` trains."""


def trained(name: str, folder: Path, world: int, *, scheduled: bool, resume: str | None = None) -> Any:
    """The trainer when it has trained; every step has eight samples in two parts, of all ranks."""
    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    named = {"num_labels": 1} if name == "reward" else {}
    torch.manual_seed(0)
    model = kind.from_pretrained(folder / "whole", **named).train()
    if scheduled:
        model = penstock.parallelize(model, plan="flowmoe")
    common: dict[str, Any] = {
        "output_dir": str(folder / f"{name} {world} {scheduled} {resume is None}"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // world,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": SAVED_AT,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
    }
    trainer = TRAINERS[name](model, common)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def curve(trainer: Any) -> list[tuple[float, float]]:
    """Losses and norms of gradients by step."""
    return [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]


def train_on_ranks(rank: int, world: int, name: str, folder: Path) -> list[list[tuple[float, float]]]:
    """As a whole, and from a checkpoint in between."""
    with as_torchrun_starts_it(rank, world):
        one = trained(name, folder, world, scheduled=True)
        engine_of(one.model).stack.compare_values()
        saved = f"{one.args.output_dir}/checkpoint-{SAVED_AT}"
        other = trained(name, folder, world, scheduled=True, resume=saved)
        if name not in DRAWN:
            for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
                assert distance(theirs.detach(), mine.detach()) < 1e-6
        return [curve(one), curve(other)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small("qwen3_moe", initializer_range=0.1).save_pretrained(tmp_path / "whole")
    tokenizer().save_pretrained(tmp_path / "whole")
    AcceleratorState._reset_state(True)
    return tmp_path


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=() if world == 2 and name in FEW else pytest.mark.soak)
        for world in (2, 4)
        for name in TRAINERS
    ],
)
def test_trainers_of_trl_train_as_on_one_process(ranks: Pools, folder: Path, world: int, name: str) -> None:
    wanted = curve(trained(name, folder, 1, scheduled=False))
    AcceleratorState._reset_state(True)
    assert len(wanted) == STEPS
    for one, other in ranks(world).run(train_on_ranks, world, name, folder, timeout_s=300):
        assert len(one) == len(other) == STEPS and torch.tensor([one, other]).isfinite().all()
        if name not in DRAWN:
            assert torch.tensor(one).allclose(torch.tensor(wanted), rtol=1e-3)


def hash_twice(rank: int, world: int) -> tuple[str, str]:
    """The second time, an expert of the last rank is another one."""
    model = penstock.parallelize(small("qwen3_moe"), plan="flowmoe")
    before = dpo_trainer.hash_module(model)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[-1].add_(float(rank == world - 1))
    return before, dpo_trainer.hash_module(model)


def test_reference_log_probs_are_stored_under_a_hash_of_all_ranks_weights(ranks: Pools) -> None:
    (before, after), same = ranks(2).run(hash_twice, 2)
    assert same == (before, after) and before != after


def follow_in_shares(rank: int, world: int) -> None:
    """A parallelized reference has the shares of its model; a whole one would need all of them."""
    del rank
    model, reference = (
        penstock.parallelize(small("mixtral", seed=seed), plan="flowmoe", etp_size=world) for seed in (0, 1)
    )
    follow = SyncRefModelCallback._sync_target_model
    follow(model, reference, alpha=1.0)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="etp_size = 2"):
        follow(model, small("mixtral"), 0.5)


def test_a_reference_follows_a_model_whose_experts_are_shared_if_it_is_parallelized(ranks: Pools) -> None:
    ranks(2).run(follow_in_shares, 2)


def given_to_vllm(model: Any) -> dict[str, torch.Tensor]:
    """What TRL reads of a model; vLLM, which would get it, need not be there."""
    generation = object.__new__(VLLMGeneration)
    generation.model, generation.accelerator = model, Accelerator(cpu=True)
    generation._dist = DistributedBackend(generation.accelerator)
    return {name: tensor.clone() for name, tensor in generation._iter_named_params()}


def give_to_vllm(rank: int, world: int) -> None:
    with as_torchrun_starts_it(rank, world):
        for make in (lambda: small("mixtral"), lambda: adapted(small("mixtral"))):
            wanted, found = given_to_vllm(make()), given_to_vllm(penstock.parallelize(make(), plan="flowmoe"))
            assert found.keys() == wanted.keys()
            assert all(distance(found[name], tensor) < 1e-6 for name, tensor in wanted.items())
        model = penstock.parallelize(make(), plan="flowmoe")
        plain = VLLMGeneration._iter_named_params.__wrapped__
        VLLMGeneration._iter_named_params = plain  # as where a trainer loads the class when it is made
        Accelerator(cpu=True).prepare(model)
        assert all(distance(each, wanted[name]) < 1e-6 for name, each in given_to_vllm(model).items())
        with pytest.raises(ValueError, match="etp_size = 2"):
            given_to_vllm(penstock.parallelize(small("mixtral"), plan="flowmoe", etp_size=world))
        online = object.__new__(OnlineDPOTrainer)
        online.model = penstock.parallelize(small("mixtral"), plan="flowmoe")
        with pytest.raises(ValueError, match="OnlineDPOTrainer would give vLLM"):
            online._move_model_to_vllm()


def test_vllm_gets_every_expert(ranks: Pools) -> None:
    ranks(2).run(give_to_vllm, 2)
