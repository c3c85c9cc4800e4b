"""Modules whose `forward` was replaced one by one: by accelerate, for mixed precision, or by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.nn.modules import module as modules
from torch.utils.flop_counter import FlopCounterMode

import penstock
from tests.support.adapted import (
    Batch,
    as_torchrun_starts_it,
    check_grads,
    pair,
    small,
    without_labels,
)
from tests.support.ranks import Pools

PARTS = ("model", "model.layers.1", "model.layers.1.mlp", "model.layers.1.mlp.experts")
SHARED = "model.layers.1.mlp.shared_expert"


HALVED = (
    ("qwen2_moe", "mlp.experts", "register_forward_pre_hook"),
    ("llama4_text", "feed_forward.experts", "register_forward_pre_hook"),
    ("llama4_text", "feed_forward.router", "register_forward_pre_hook"),
    ("llama4_text", "feed_forward.router", "register_forward_hook"),
)
"""Families and hooks which change what experts get, where steps take that from elsewhere."""

GLOBAL = (
    modules.register_module_forward_hook,
    modules.register_module_forward_pre_hook,
    modules.register_module_full_backward_hook,
    modules.register_module_full_backward_pre_hook,
)


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


def halve(module: Any, given: Any, *returned: Any) -> Any:
    """Halve the first of what a module gets, or returns."""
    del module
    first, *others = returned[0] if returned else given
    return 0.5 * first, *others


@pytest.mark.slow
@pytest.mark.parametrize(("family", "path", "register"), HALVED)
def test_a_hook_that_steps_would_not_follow_is_refused(family: str, path: str, register: str) -> None:
    model = penstock.parallelize(small(family), plan="flowmoe")
    module = model.model.layers[1].get_submodule(path)
    handle = getattr(module, register)(halve)
    with pytest.raises(ValueError, match=f"hook on {type(module).__name__} of layer 1 may change what"):
        model(**Batch().inputs())
    handle.remove()
    assert model(**Batch().inputs()).loss.item() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "register"),
    [
        ("gate", "register_forward_pre_hook"),
        ("experts", "register_forward_pre_hook"),
        ("", "register_forward_pre_hook"),
    ],
)
def test_a_hook_on_the_way_to_experts_is_followed(path: str, register: str) -> None:
    """Also by the router loss."""
    wanted, model = pair("mixtral")
    given = {**Batch().inputs(), "output_router_logits": True}
    before = wanted(**given).loss.item()
    for each in (wanted, model):
        getattr(each.model.layers[1].mlp.get_submodule(path), register)(halve)
    expected, found = wanted(**given), model(**given)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5) != before
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)


@pytest.mark.slow
def test_a_hook_on_what_a_router_returns_is_followed_but_for_its_loss() -> None:
    wanted, model = pair("mixtral")
    for each in (wanted, model):
        each.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, out: (out[0], out[1] / 2, out[2]))
    given = Batch().inputs()
    assert model(**given).loss.item() == pytest.approx(wanted(**given).loss.item(), rel=1e-5)
    with pytest.raises(ValueError, match="a hook on MixtralTopKRouter of layer 1 may change its logits"):
        model(**given, output_router_logits=True)


@pytest.mark.slow
@pytest.mark.parametrize("register", GLOBAL)
def test_a_hook_on_all_modules_is_refused(register: Any) -> None:
    model = penstock.parallelize(small("mixtral"), plan="flowmoe")
    handle = register(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="a hook on all modules"):
            model(**Batch().inputs())
    finally:
        handle.remove()


@pytest.mark.slow
def test_operations_of_a_step_can_be_counted() -> None:
    """By torch's counter, which has hooks on all modules."""
    model = penstock.parallelize(small("mixtral"), plan="flowmoe")
    with FlopCounterMode(display=False) as counter:
        model(**Batch().inputs())
    assert counter.get_total_flops() > 0


def test_what_accelerate_has_prepared_before_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(ValueError, match="parallelize the model first, and prepare what that returns"):
        penstock.parallelize(accelerator.prepare(small("mixtral")))


def prepared_on_ranks(rank: int, world: int) -> tuple[float, float]:
    """Losses under mixed precision of accelerate, and of torch."""
    given = Batch().inputs(2 * rank, 2 * rank + 2)
    given["labels"] = given["input_ids"]  # as many on every rank, whose losses are averaged
    scheduled = [penstock.parallelize(small("mixtral"), ep_size=world, plan="flowmoe") for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = scheduled[0](**given).loss
    with as_torchrun_starts_it(rank, world):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        assert accelerator.num_processes == world
        with pytest.raises(TypeError, match="needs no DistributedDataParallel"):
            torch.nn.parallel.DistributedDataParallel(scheduled[0])
        model = accelerator.prepare(scheduled[1])
        found = model(**given).loss
        accelerator.backward(found)
        found = accelerator.reduce(found.detach(), "mean")  # a loss of labels is that of this rank
    assert model.model.layers[0].mlp.experts.down_proj.grad is not None
    return found.item(), expected.item()


def test_accelerate_puts_mixed_precision_around_models_of_several_ranks(ranks: Pools) -> None:
    for found, expected in ranks(2).run(prepared_on_ranks, 2):
        assert found == pytest.approx(expected, rel=1e-6)


# ---- torch.compile -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "model in place", "step"])
def test_a_compiled_model_runs_as_it_is(what: str) -> None:
    """The compiler would look into the whole schedule, and fail after a long time."""
    wanted, model = (penstock.parallelize(small("mixtral"), plan="flowmoe") for _ in range(2))
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, examples: object) -> object:
        del examples
        graphs.append(graph)
        return graph.forward

    def step(model: Any, given: Any) -> Tensor:
        loss: Tensor = model(**given).loss
        loss.backward()
        return loss.detach()

    compiled, compiled_step = model, step
    if what == "step":
        compiled_step = torch.compile(step, backend=backend)
    elif what == "model in place":
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    given = Batch().inputs()
    assert compiled_step(compiled, given) == step(wanted, given) and not graphs
    check_grads(model, wanted, within=1e-6)
    with torch.no_grad():
        both = [each.eval()(**without_labels(given)).logits for each in (wanted, compiled)]
    assert both[0].equal(both[1]) and not graphs
