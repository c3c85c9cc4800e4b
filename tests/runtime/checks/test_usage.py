"""What people do to a stack and its inputs that would give other numbers without a word."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.runtime import PipelinedStack, TaskError
from tests.steps import PLAIN
from tests.support.layouts import tiny_case
from tests.support.parity import Case, batch_of, stack_of
from tests.support.ranks import Pools


def case(name: str = "flowmoe", world_size: int = 1) -> Case:
    return tiny_case(world_size, name, seq_len=6, vocab_size=16, top_k=2, batch=4)


@pytest.mark.parametrize("name", ["sequential", "penstock"])
def test_experts_frozen_between_forward_and_backward_get_nothing(name: str) -> None:
    stack = stack_of(0, case(name))
    loss = stack(*batch_of(case(name)))
    stack.requires_grad_(False)
    loss.backward()
    assert [name for name, p in stack.named_parameters() if p.grad is not None] == []


ZEROS = torch.zeros(4, 6, dtype=torch.int64)
REFUSED: dict[str, list[dict[str, Tensor]]] = {
    "tokens and labels must both be": [
        {"tokens_BL": ZEROS[0], "labels_BL": ZEROS[0]},
        {"labels_BL": ZEROS[:, :5]},
        {"labels_BL": ZEROS[:2]},
        {"labels_BL": ZEROS.int()},
        {"tokens_BL": ZEROS.double()},
    ],
    r"valid_BL must be bool and as large as tokens_BL, \[4, 6\], not": [
        {"valid_BL": torch.ones(size, dtype=torch.bool)} for size in ((4,), (4, 1), (6, 4))
    ]
    + [{"valid_BL": ZEROS}],
    r"sample_ids_B must be int64 \[4\], one for each sample": [
        {"sample_ids_B": ids} for ids in (torch.arange(3), torch.arange(4.0), torch.arange(4).view(2, 2))
    ],
    # Numbers of documents, for one: positions would begin elsewhere than at 0.
    "place in its sample where its document begins": [
        {"documents_BL": torch.tensor([starts] * 4)}
        for starts in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 3, 3, 3], [0, 0, 0, 3, 2, 2], [0, 0, 0, -3, -3, -3])
    ]
    + [{"documents_BL": torch.tensor([[0, 1, 1, 3, 3, 1]] * 4)}],
}


@pytest.mark.parametrize("said", REFUSED)
def test_inputs_of_another_shape_or_type_are_refused(said: str) -> None:
    """By the rank that was given them, before anything is sent."""
    stack = stack_of(0, case())
    for given in REFUSED[said]:
        with pytest.raises(ValueError, match=said):
            stack(**{"tokens_BL": ZEROS, "labels_BL": ZEROS, **given})


def test_parameters_that_are_computed_are_refused() -> None:
    stack = stack_of(0, case())
    weight = dict(stack.named_parameters())["model.lm_head.weight"]
    computed = {"model.lm_head.weight": weight.detach().requires_grad_() * 1.0}
    with pytest.raises(ValueError, match=r"lm_head.weight is computed from other tensors"):
        torch.func.functional_call(stack, computed, batch_of(case()))


@pytest.mark.filterwarnings("ignore:Using backward")  # autograd's, of a cycle that is not made here
def test_second_derivatives_of_a_step_are_refused() -> None:
    """Gradients would be without a graph, so that a penalty on them trains nothing."""
    stack = stack_of(0, case())
    loss = stack(*batch_of(case()))
    with pytest.raises(RuntimeError, match=r"create_graph=True.* cannot be differentiated again"):
        loss.backward(create_graph=True)
    assert all(p.grad is None for p in stack.parameters())
    loss.backward()
    assert all(p.grad is not None for p in stack.parameters())


def test_gradients_of_a_step_are_not_returned() -> None:
    stack = stack_of(0, case())
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(stack(*batch_of(case())), list(stack.parameters()))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", PLAIN)
def test_a_step_is_freed_without_the_collector_of_circles(name: str) -> None:
    """Its activations may be all memory there is, and the collector counts objects, not bytes."""
    stack = stack_of(0, case(name))
    for number in range(2):
        loss = stack(*batch_of(case(name)))
        held = weakref.ref(loss.grad_fn.step.execution)
        if number == 0:
            loss.backward()
        del loss
        assert held() is None
        assert stack.records() != []


def fail(grad: Tensor) -> None:
    raise ValueError(f"no room for {grad.shape}")


def test_a_backward_that_fails_keeps_nothing_for_the_loss() -> None:
    """It may be computed again, with fewer samples, while the loss is still there."""
    stack = stack_of(0, case())
    loss = stack(*batch_of(case()))
    step, hook = loss.grad_fn.step, next(stack.parameters()).register_hook(fail)
    kept = [weakref.ref(each) for each in (step.context, step.loss)]
    with pytest.raises(TaskError):
        loss.backward()
    hook.remove()
    gc.collect()  # of the error, whose frames refer to it
    assert (step.execution.values, [ref() for ref in kept]) == ([], [None, None])
    stack(*batch_of(case())).backward()


def test_gradients_of_hidden_states_are_not_kept() -> None:
    """Nor hidden states themselves."""
    stack = stack_of(0, case())
    states = stack.hidden_states(batch_of(case())[0], averaged=True)
    loss = states.hidden_BLM.sum() + states.balance
    step: Any = states.hidden_BLM.grad_fn
    ending, left = step.step.ending, weakref.ref(step.step.loss)
    loss.backward()
    assert (ending._grads, left()) == ({}, None)


class Around(nn.Module):
    def __init__(self, stack: PipelinedStack) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, tokens_BL: Tensor, labels_BL: Tensor) -> Tensor:
        loss: Tensor = self.stack(tokens_BL, labels_BL)
        return loss


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": sharded,
}


def wrapped(rank: int, wrapper: str) -> None:
    stack = stack_of(rank, case(world_size=2))
    tokens, labels = batch_of(case(world_size=2))
    mine = slice(4 * rank, 4 * rank + 4)
    WRAPPERS[wrapper](Around(stack))(tokens[mine], labels[mine])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_around_a_module_with_a_stack_is_refused(ranks: Pools, wrapper: str) -> None:
    for text in ranks(2).told(TypeError, wrapped, wrapper):
        assert text.startswith("a scheduled model"), text
