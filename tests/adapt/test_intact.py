"""Modules whose `forward` was replaced one by one: by accelerate, for mixed precision, or by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import penstock
from tests.support.adapted import Batch, as_torchrun_starts_it, small
from tests.support.ranks import Pools

PARTS = ("model", "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.experts")
SHARED = "model.layers.1.mlp.shared_expert"


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """With mixed precision."""
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


def patch(module: Any) -> None:
    """As a tool does that stands around a module's `forward`."""
    inner = module.forward
    module.forward = partial(inner)


@pytest.mark.parametrize("path", ["", *PARTS, SHARED])
def test_a_patched_module_is_refused(path: str) -> None:
    model = small("qwen2_moe")
    patch(model.get_submodule(path))
    with pytest.raises(ValueError, match="was replaced in this one module"):
        penstock.parallelize(model)


@pytest.mark.parametrize("path", [*PARTS, SHARED])
def test_a_module_that_is_patched_afterwards_is_refused(path: str) -> None:
    model = penstock.parallelize(small("qwen2_moe"))
    model(**Batch().inputs())
    patch(model.get_submodule(path))
    with pytest.raises(ValueError, match="was replaced in this one module"):
        model(**Batch().inputs())


def test_mixed_precision_of_accelerate_is_around_the_scheduled_model(accelerator: Accelerator) -> None:
    given = Batch().inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = penstock.parallelize(small("mixtral"))(**given).loss
    model, optimizer = small("mixtral"), torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    model, optimizer = accelerator.prepare(penstock.parallelize(model), optimizer)
    found = model(**given).loss
    assert found.item() == expected.item()
    accelerator.backward(found)
    assert model.model.layers[0].mlp.experts.down_proj.grad is not None
    assert found.item() != penstock.parallelize(small("mixtral"))(**given).loss.item()


def test_what_accelerate_has_prepared_before_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(ValueError, match="parallelize the model first, and prepare what that returns"):
        penstock.parallelize(accelerator.prepare(small("mixtral")))


def prepared_on_ranks(rank: int, world: int) -> tuple[float, float]:
    """Losses under mixed precision of accelerate, and of torch."""
    given = Batch().inputs(2 * rank, 2 * rank + 2)
    scheduled = [penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe") for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = scheduled[0](**given).loss
    with as_torchrun_starts_it(rank, world):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        assert accelerator.num_processes == world
        with pytest.raises(TypeError, match="needs no DistributedDataParallel"):
            accelerator.prepare(scheduled[0])
        model = accelerator.prepare_model(scheduled[1], evaluation_mode=True)
        found = model(**given).loss
        accelerator.backward(found)
    assert model.model.layers[0].mlp.experts.down_proj.grad is not None
    return found.item(), expected.item()


@pytest.mark.slow
def test_accelerate_puts_mixed_precision_around_models_of_several_ranks(ranks: Pools) -> None:
    for found, expected in ranks(2).run(prepared_on_ranks, 2):
        assert found == expected
