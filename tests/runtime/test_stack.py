"""The stack as a user sees it: an ordinary module with an ordinary training step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import expert_parameters
from penstock.runtime import PipelinedStack, TaskError
from tests.support.close import check_all_close
from tests.support.layouts import tiny_case
from tests.support.parity import Case, batch_of, gradients_of, stack_of


def case_of(schedule: str = "flowmoe", *, world_size: int = 1, ep_size: int = 1, **moe: Any) -> Case:
    settings = {"chunks": 2, "aux_loss_coeff": 0.1, "batch": 3, "double": True} | moe
    return tiny_case(world_size, schedule, ep_size=ep_size, **settings)


def stepped(case: Case) -> tuple[PipelinedStack, Tensor]:
    """A stack and the loss of a forward pass."""
    stack = stack_of(0, case)
    loss: Tensor = stack(*batch_of(case))
    return stack, loss


# ---- an ordinary module ------------------------------------------------------------------------------------


def test_every_parameter_is_saved_once() -> None:
    stack = stack_of(0, case_of())
    assert set(stack.state_dict()) == {name for name, _ in stack.named_parameters()}


def test_a_state_can_be_loaded_into_another_stack() -> None:
    case = case_of()
    first, second = stack_of(0, case), stack_of(0, replace(case, seed=5))
    batch = batch_of(case)
    assert not torch.equal(first(*batch), second(*batch))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(*batch), second(*batch))
    second(*batch).backward()  # the gradient buffers still belong to the parameters
    assert gradients_of(second).keys() == dict(second.named_parameters()).keys()


def test_parameters_are_those_of_the_model() -> None:
    stack = stack_of(0, case_of())
    assert {id(p) for p in stack.parameters()} == {id(p) for p in stack.model.parameters()}
    assert len(list(stack.parameters())) == len(list(stack.model.parameters()))


def test_expert_parameters_are_marked() -> None:
    stack = stack_of(0, case_of())
    for name, parameter in stack.named_parameters():
        assert getattr(parameter, "allreduce", True) is (".experts." not in name), name


def test_expert_parameters_are_found_at_any_time() -> None:
    """Before the first step, and when others have taken their place."""
    stack = stack_of(0, case_of())
    experts = [part.moe.experts for part in stack.parts.parts if part.moe is not None]
    held = {parameter for each in experts for parameter in each.parameters()}
    assert expert_parameters(stack) == expert_parameters(stack.model) == held != set()
    stack(*batch_of(case_of())).backward()
    for each in experts:
        for name, parameter in list(each.named_parameters(recurse=False)):
            setattr(each, name, nn.Parameter(parameter.detach().clone()))
    others = {parameter for each in experts for parameter in each.parameters()}
    assert expert_parameters(stack) == others and not others & held


@pytest.mark.parametrize("train", [False, True])
def test_evaluation_has_the_same_loss_and_no_backward(train: bool) -> None:
    """In evaluation mode, and in training mode under no_grad."""
    case = case_of()
    stack, loss = stepped(case)
    stack.train(train)
    with torch.set_grad_enabled(not train):
        evaluated = stack(*batch_of(case))
    assert torch.equal(evaluated, loss.detach())
    assert not evaluated.requires_grad
    assert not gradients_of(stack)
    loss.backward()  # the step before is not disturbed
    assert gradients_of(stack)


@pytest.mark.slow
def test_a_compiled_stack_runs_as_it_is() -> None:
    """The compiler would look into the whole schedule, for minutes."""
    stack, graphs = stack_of(0, case_of()), list[object]()

    def backend(graph: Any, inputs: object) -> Any:
        del inputs
        graphs.append(graph)
        return graph.forward

    tokens, labels = batch_of(case_of())
    found = torch.compile(stack, backend=backend)(tokens, labels)
    assert found.equal(stack(tokens, labels)) and not graphs


def test_the_loss_can_be_scaled() -> None:
    """As loss scaling and dividing by accumulation steps do it."""
    case = case_of()
    stack, loss = stepped(case)
    loss.backward()
    scaled, loss = stepped(case)
    (loss * 3).backward()
    check_all_close(gradients_of(scaled), gradients_of(stack), 1e-12, times=3)


# ---- gradients over several passes -------------------------------------------------------------------------


def test_gradients_accumulate_until_they_are_cleared() -> None:
    case = case_of()
    stack, loss = stepped(case)
    loss.backward()
    once = gradients_of(stack)
    stack(*batch_of(case)).backward()
    check_all_close(gradients_of(stack), once, 1e-12, times=2)
    for set_to_none in (True, False):
        stack.zero_grad(set_to_none=set_to_none)
        stack(*batch_of(case)).backward()
        check_all_close(gradients_of(stack), once, 0.0)


def test_two_forward_passes_before_one_backward() -> None:
    case = case_of()
    other = replace(case, seed=3)
    stack, loss = stepped(case)
    loss.backward()
    stack(*batch_of(other)).backward()
    wanted = gradients_of(stack)
    stack.zero_grad()
    (stack(*batch_of(case)) + stack(*batch_of(other))).backward()
    check_all_close(gradients_of(stack), wanted, 1e-12)


def test_a_second_backward_of_one_loss_leaves_the_gradients_alone() -> None:
    """It is a mistake in a training loop and no failure of a task: it must not stop the ranks."""
    stack, loss = stepped(case_of())
    loss.backward()
    before = gradients_of(stack)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert not isinstance(caught.value, TaskError)
    check_all_close(gradients_of(stack), before, 0.0)


# ---- batches -----------------------------------------------------------------------------------------------


def test_a_batch_may_differ_in_size_from_step_to_step() -> None:
    case = case_of()
    stack = stack_of(0, case)
    tokens, labels = batch_of(case)
    for samples, length in ((3, 5), (2, 5), (3, 1), (1, 5), (0, 5)):
        loss = stack(tokens[:samples, :length], labels[:samples, :length])
        loss.backward()
        assert loss.isfinite()


def test_labels_that_all_count_for_nothing() -> None:
    """Only the balance losses are left; nothing is divided by zero."""
    case = case_of()
    stack = stack_of(0, case)
    tokens, labels = batch_of(case)
    loss = stack(tokens, torch.full_like(labels, -100))
    loss.backward()
    assert stack.statistics is not None
    assert float(stack.statistics.cross_entropy) == 0.0
    assert loss.item() > 0
    assert all(gradient.isfinite().all() for gradient in gradients_of(stack).values())


@pytest.mark.parametrize("explicit", [False, True])
def test_sample_numbers_are_counted_over_the_run(explicit: bool) -> None:
    """Dropout draws a new mask in every step; the same numbers give the same masks."""
    case = case_of()
    case = replace(case, model=replace(case.model, dropout=0.5))
    stack = stack_of(0, case)
    ids = torch.arange(3) if explicit else None
    first, second = (stack(*batch_of(case), ids).item() for _ in range(2))
    assert (first == second) is explicit
    assert first == stack_of(0, case)(*batch_of(case), torch.arange(3)).item()


def test_statistics_add_up() -> None:
    case = case_of()
    stack, loss = stepped(case)
    found = stack.statistics
    assert found is not None and (loss.shape, loss.dtype) == ((), torch.float64)
    parts = found.cross_entropy + 0.1 * found.aux + case.moe.z_loss_coeff * found.z
    torch.testing.assert_close(found.loss, parts)
    assert torch.equal(loss.detach(), found.loss)
    assert float(found.tokens) == float(found.valid) == 15
    assert found.chosen_YE.sum(1).tolist() == [30.0, 30.0]
    assert found.dropped_Y.tolist() == [0.0, 0.0]
