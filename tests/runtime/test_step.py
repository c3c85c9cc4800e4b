"""The two halves of a step: in what precision they compute, and what is left when the second one fails."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from penstock.models import MoEDecoder
from penstock.runtime import PipelinedStack
from penstock.runtime.executor import TaskError
from penstock.runtime.features.sharded_optimizer.adamw import ShardedAdamW
from penstock.step.shape import Recompute
from penstock.train.assemble import build_stack
from tests.support.casts import Casts
from tests.support.close import check_all_close
from tests.support.layouts import tiny_case
from tests.support.parity import Case, batch_of, gradients_of, machinery, stack_of
from tests.support.searching import short_search

CASE = tiny_case(
    num_layers=3,
    hidden_size=16,
    seq_len=8,
    vocab_size=32,
    moe_ffn_hidden_size=16,
    aux_loss_coeff=0.1,
    batch=4,
)
BFLOAT16 = torch.bfloat16


def gpt(stack: PipelinedStack) -> MoEDecoder:
    assert isinstance(stack.model, MoEDecoder)
    return stack.model


# ---- precision ---------------------------------------------------------------------------------------------


def stepped(case: Case, dtype: torch.dtype | None, *, forward: bool, backward: bool) -> dict[str, Tensor]:
    """Gradients of a step that computes in this type, under the caller's autocast in one half or both."""
    stack = stack_of(0, case)
    stack.machinery = replace(stack.machinery, autocast_dtype=dtype)
    with torch.autocast("cpu", BFLOAT16, enabled=forward):
        loss = stack(*batch_of(case))
    with torch.autocast("cpu", BFLOAT16, enabled=backward):
        loss.backward()
    return {"loss": loss.detach(), **gradients_of(stack.model)}


@pytest.mark.parametrize(
    ("schedule", "recompute", "dtype", "forward"),
    [
        ("penstock", "none", None, True),
        ("flowmoe", "none", None, False),
        ("flowmoe", "blocks", None, True),
        ("flowmoe", "none", BFLOAT16, True),
    ],
)
def test_the_callers_autocast_changes_nothing(
    schedule: str, recompute: Recompute, dtype: torch.dtype | None, forward: bool
) -> None:
    case = replace(CASE, recompute=recompute, schedule=replace(CASE.schedule, name=schedule))
    with short_search():
        wanted = stepped(case, dtype, forward=False, backward=False)
        found = stepped(case, dtype, forward=forward, backward=True)
    check_all_close(found, wanted, 0.0)


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_a_half_of_a_step_casts_a_parameter_once(recompute: Recompute) -> None:
    """However many microbatches read it; what runs without autograd casts by itself, since it has no
    history."""
    case = replace(CASE, recompute=recompute, double=False)
    stack = stack_of(0, case)
    stack.machinery = replace(stack.machinery, autocast_dtype=BFLOAT16)
    dense = [p for name, p in stack.model.named_parameters() if "experts" not in name]
    with Casts(*dense) as forward:
        loss = stack(*batch_of(case))
    with Casts(*dense) as backward:
        loss.backward()
    halves = {"none": forward, "blocks": backward}
    assert set(halves[recompute].by_tensor) == {0, 1}
    if recompute == "none":
        assert backward.count == 0


# ---- collections of garbage --------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "fails"), [(True, False), (True, True), (False, False)])
def test_no_task_collects_garbage(wanted: bool, fails: bool) -> None:
    """And after a half of a step, also one that fails, Python collects if it did before."""
    seen: list[bool] = []
    stack = stack_of(0, CASE)
    gpt(stack).lm_head.register_forward_hook(lambda *_: seen.append(gc.isenabled()))
    gpt(stack).lm_head.weight.register_hook(lambda _: boom() if fails else seen.append(gc.isenabled()))
    try:
        (gc.enable if wanted else gc.disable)()
        loss = stack(*batch_of(CASE))
        assert gc.isenabled() == wanted
        with pytest.raises(TaskError) if fails else nullcontext():
            loss.backward()
        assert gc.isenabled() == wanted
    finally:
        gc.enable()
    assert seen and not any(seen)


# ---- a backward pass that fails ----------------------------------------------------------------------------


def boom(*_: object) -> None:
    raise ZeroDivisionError("boom")


def fail_in(stack: PipelinedStack, layer: int) -> BaseException:
    """The error of a backward pass that fails in the attention of a layer, after its experts."""
    handle = gpt(stack).parts[layer].self_attn.o_proj.register_full_backward_hook(boom)
    loss = stack(*batch_of(replace(CASE, seed=7)))
    with pytest.raises(TaskError, match="boom") as caught:
        loss.backward()
    handle.remove()
    return caught.value


def test_a_first_pass_that_fails_leaves_no_gradient() -> None:
    stack = stack_of(0, CASE)
    failure = fail_in(stack, 1)
    assert gradients_of(stack.model) == {} and not hasattr(failure, "__notes__")
    stack(*batch_of(CASE)).backward()
    other = stack_of(0, CASE)
    other(*batch_of(CASE)).backward()
    check_all_close(gradients_of(stack.model), gradients_of(other.model), 0.0)


def test_what_was_accumulated_is_there_after_a_pass_that_failed() -> None:
    """Here the head fails, before anything has been added to an expert's gradient."""
    stack = stack_of(0, CASE)
    stack(*batch_of(CASE)).backward()
    before = {name: p.grad for name, p in stack.model.named_parameters()}
    values = gradients_of(stack.model)
    handle = gpt(stack).lm_head.weight.register_hook(boom)
    loss = stack(*batch_of(CASE))
    with pytest.raises(TaskError):
        loss.backward()
    for name, p in stack.model.named_parameters():
        assert p.grad is not None and p.grad is before[name] and torch.equal(p.grad, values[name]), name
    handle.remove()
    stack(*batch_of(CASE)).backward()
    check_all_close(gradients_of(stack.model), values, 1e-6, times=2)


def test_experts_gradients_with_a_part_of_a_failed_pass_are_refused_until_cleared() -> None:
    stack = stack_of(0, CASE)
    stack(*batch_of(CASE)).backward()
    values = gradients_of(stack.model)
    failure = fail_in(stack, 0)
    doubt = r"layers\.0\.mlp\.experts\.w_\w+ and \d more, which was there before"
    assert any("call zero_grad()" in note for note in failure.__notes__)
    for name, gradient in gradients_of(stack.model).items():
        assert torch.equal(gradient, values[name]) is (".experts." not in name), name
    loss = stack(*batch_of(CASE))
    with pytest.raises(RuntimeError, match=doubt):
        loss.backward()
    stack.zero_grad(set_to_none=False)
    loss.backward()
    check_all_close(gradients_of(stack.model), values, 1e-6)


SHARDED = replace(CASE, sharded=True)


def sharded(case: Case = SHARDED) -> tuple[PipelinedStack, ShardedAdamW]:
    """A stack and the optimiser that owns its sums."""
    without_clipping = replace(case.config.optimizer, clip_grad_norm=None)
    stack = build_stack(replace(case.config, optimizer=without_clipping), machinery(1, 1, 0))
    groups = [{"params": list(stack.parameters()), "weight_decay": 0.0}]
    return stack, ShardedAdamW(stack, groups, lr=1e-3, max_norm=None)


def weight_of(stack: PipelinedStack) -> nn.Parameter:
    """Of the last layer, so that the buckets of all others come before its own."""
    return gpt(stack).parts[2].self_attn.o_proj.get_parameter("weight")


@pytest.mark.parametrize("in_backward", [True, False])
def test_a_sharded_optimizer_does_not_use_what_a_failed_pass_has_left(in_backward: bool) -> None:
    stack, optimizer = sharded()
    handle = gpt(stack).parts[0].self_attn.o_proj.register_full_backward_hook(boom)
    loss = stack(*batch_of(CASE))
    if in_backward:
        with optimizer.in_backward(), pytest.raises(TaskError):
            loss.backward()
    else:
        with pytest.raises(TaskError):
            loss.backward()
    handle.remove()
    told = "load the last checkpoint" if in_backward else r"call optimizer\.zero_grad\(\)"
    with pytest.raises(RuntimeError, match=told):
        optimizer.step()
    with pytest.raises(RuntimeError, match=told):
        stack(*batch_of(CASE)).backward()
    if in_backward:
        optimizer.zero_grad()  # it is not enough here
        for hand_on in (optimizer.state_dict, optimizer.flush, stack.state_dict, stack.model.state_dict):
            with pytest.raises(RuntimeError, match=told):
                hand_on()
        return
    assert optimizer.state_dict()["state"], "without the sums it is what it was"
    optimizer.zero_grad()
    stack(*batch_of(CASE)).backward()
    optimizer.step()


def give_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)


def take_gradient(parameter: nn.Parameter) -> None:
    parameter.grad = None


@torch.no_grad()
def change_in_place(parameter: nn.Parameter) -> None:
    parameter.add_(0.0)


@pytest.mark.parametrize(
    ("recompute", "spoil", "told"),
    [("none", give_gradient, "has a gradient"), ("blocks", change_in_place, "was changed between")],
)
def test_a_sharded_optimizer_keeps_its_sums_when_a_pass_is_refused(
    recompute: Recompute, spoil: Callable[[nn.Parameter], None], told: str
) -> None:
    updated = []
    for refused in (False, True):
        stack, optimizer = sharded(replace(SHARDED, recompute=recompute))
        stack(*batch_of(CASE)).backward()
        if refused:
            loss = stack(*batch_of(replace(CASE, seed=7)))
            spoil(weight_of(stack))
            with pytest.raises(RuntimeError, match=told):
                loss.backward()
            take_gradient(weight_of(stack))
        stack(*batch_of(replace(CASE, seed=3))).backward()
        optimizer.step()
        updated.append({name: p.detach().clone() for name, p in stack.model.named_parameters()})
    check_all_close(updated[1], updated[0], 0.0)


def test_a_sharded_optimizer_refuses_sums_that_a_pass_has_cleared_and_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where memory runs out while buffers are made ready: those before have lost what they held."""
    stack, optimizer = sharded()
    stack(*batch_of(CASE)).backward()
    loss = stack(*batch_of(CASE))
    monkeypatch.setattr(stack.buckets.all[-1], "begin", boom)
    with pytest.raises(ZeroDivisionError) as caught:
        loss.backward()
    assert any("call optimizer.zero_grad()" in note for note in caught.value.__notes__)
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\)"):
        optimizer.step()
    monkeypatch.undo()
    optimizer.zero_grad()
    stack(*batch_of(CASE)).backward()
    optimizer.step()


def test_a_sharded_optimizer_does_not_use_sums_without_a_gradient_that_was_replaced() -> None:
    stack, optimizer = sharded()
    stack(*batch_of(CASE)).backward()
    loss = stack(*batch_of(CASE))
    hook = weight_of(stack).register_post_accumulate_grad_hook(take_gradient)
    with pytest.raises(RuntimeError, match="was replaced or removed"):
        loss.backward()
    hook.remove()
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\)"):
        optimizer.step()
