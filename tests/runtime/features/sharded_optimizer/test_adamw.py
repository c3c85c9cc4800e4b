"""A sharded optimiser in one process: what it refuses, narrow types, state, and what is current when."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.decision import Decision
from penstock.features.sharded_optimizer.feature import of_optimizer
from penstock.runtime import ShardedAdamW, clip_grad_norm_
from penstock.runtime.buckets import FlatGradients, InShares, ReleasedGradients
from penstock.runtime.features.sharded_optimizer.share import ReleasingShare, Share
from penstock.schedule import plan_step, unit_cost
from penstock.train.optimizer import OptimizerConfig, build_adamw
from tests.runtime.features.sharded_optimizer.steps import Habits, build, go_on, loss_of
from tests.support.close import check_all_close
from tests.support.layouts import layout_case
from tests.support.parity import Case
from tests.support.ranks import Pools

CASE = layout_case((1, 1, 1, 1), "flowmoe", "gather")


def test_what_is_read_between_steps_is_current_or_refused() -> None:
    stack, optimizer = build(0, CASE, Habits(), sharded=True)
    with optimizer.in_backward():
        loss_of(stack, 0, CASE, 0).backward()
    for look in (stack.state_dict, stack.model.state_dict, lambda: copy.deepcopy(stack)):
        with pytest.raises(RuntimeError, match=r"optimizer\.flush\(\) on all ranks"):
            look()
    optimizer.flush()
    assert pickle.loads(pickle.dumps(stack.model)).state_dict().keys() == stack.model.state_dict().keys()
    copied = copy.deepcopy(stack)
    with pytest.raises(RuntimeError, match="build ShardedAdamW"):
        loss_of(copied, 0, CASE, 0)
    assert stack.state_dict().keys() == copied.state_dict().keys()


def test_gradients_in_shares_are_not_clipped_or_added_to_from_outside() -> None:
    stack, optimizer = build(0, CASE, Habits(), sharded=True)
    loss_of(stack, 0, CASE, 0).backward()
    for given in (stack, list(stack.parameters())):
        with pytest.raises(RuntimeError, match="max_norm"):
            clip_grad_norm_(given, 1.0)
    optimizer.zero_grad()
    parameter = next(stack.parameters())
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match=r"has a gradient.*optimizer\.zero_stage=0"):
        loss_of(stack, 0, CASE, 0).backward()


def released_early(rank: int, case: Case) -> list[int]:
    """The highest layer of which a parameter still has a gradient, whenever one of layer 0 gets one."""
    habits = Habits(releases=True)
    stack, _ = build(rank, case, habits, sharded=True)
    seen: list[int] = []

    def look(gradient: Tensor) -> None:
        del gradient
        shared = [stack.parts.replicated_parameters(layer) for layer in range(case.model.num_layers)]
        seen.append(max(n for n, each in enumerate(shared) if any(p.grad is not None for p in each)))

    stack.parts.parts[0].self_attn.q_proj.weight.register_hook(look)  # type: ignore[attr-defined]
    loss_of(stack, rank, case, 0).backward()
    assert all(isinstance(parameter.grad, InShares) for parameter in stack.parameters())
    return seen


def layers_out_of_date(rank: int, case: Case) -> set[int]:
    """Of which layers a flush brings replicated parameters that a backward pass has updated elsewhere."""
    stack, optimizer = build(rank, case, Habits(), sharded=True)
    shared = [stack.parts.replicated_parameters(layer) for layer in range(case.model.num_layers)]
    with optimizer.in_backward():
        loss_of(stack, rank, case, 0).backward()
    had = [[p.detach().clone() for p in layer] for layer in shared]
    optimizer.flush()
    pairs = [zip(before, after, strict=True) for before, after in zip(had, shared, strict=True)]
    return {layer for layer, pair in enumerate(pairs) if not all(torch.equal(*each) for each in pair)}


def test_only_what_the_next_step_does_not_begin_with_waits_for_it(ranks: Pools) -> None:
    case = layout_case((2, 1, 1, 1), "flowmoe", "gather", num_layers=4)
    assert ranks(2).run(layers_out_of_date, case) == [{1, 2, 3}] * 2


def refused_hook(rank: int, case: Case) -> None:
    stack, _ = build(rank, case, Habits(releases=True), sharded=True)
    stack.parts.replicated_parameters(0)[0].register_post_accumulate_grad_hook(lambda _: None)
    loss_of(stack, rank, case, 0).backward()


def test_gradients_that_are_summed_are_given_up_and_not_to_be_looked_at(ranks: Pools) -> None:
    case = layout_case((2, 1, 1, 1), "flowmoe", "gather", num_layers=4)
    for seen in ranks(2).run(released_early, case):
        assert seen and max(seen) <= 1, "those of two layers at a time"
    for said in ranks(2).told(RuntimeError, refused_hook, case):
        assert "register_post_accumulate_grad_hook" in said and "optimizer.zero_stage=1" in said


def kept_when_refused(rank: int, case: Case) -> list[bool]:
    """Whether a gradient that should not be there still is, after each of two passes that it stops."""
    stack, _ = build(rank, case, Habits(releases=True), sharded=True)
    loss, found = loss_of(stack, rank, case, 0), []
    parameter = stack.parts.replicated_parameters(case.model.num_layers - 1)[0]
    given = parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has a gradient"):
            loss.backward()
        found.append(parameter.grad is given and bool(given.eq(1).all()))
    parameter.grad = None
    loss.backward()
    return found


def test_a_gradient_for_which_a_pass_is_refused_stays(ranks: Pools) -> None:
    case = layout_case((2, 1, 1, 1), "flowmoe", "gather")
    assert ranks(2).run(kept_when_refused, case) == [[True, True]] * 2


def test_shares_of_gradients_need_shares_of_the_optimiser() -> None:
    assert [OptimizerConfig(zero_stage=stage).shared_copies for stage in (0, 1, 2)] == [0, 2, 3]
    assert OptimizerConfig(zero_stage=2).settled(sharded=False).shared_copies == 0


def test_a_stack_of_another_kind_is_refused() -> None:
    plain, _ = build(0, CASE, Habits(), sharded=False)
    clipped, _ = build(0, CASE, Habits(clips=True), sharded=True)
    for stack in (plain, clipped):
        with pytest.raises(ValueError, match=r"updating=Updating\(clips=False\)"):
            ShardedAdamW(stack, [{"params": list(stack.parameters()), "weight_decay": 0.0}], lr=0.1)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    stack, optimizer = build(0, CASE, Habits(), sharded=True)
    before = {name: p.detach().clone() for name, p in stack.named_parameters()}
    with optimizer.in_backward():
        (loss_of(stack, 0, CASE, 0) * float("inf")).backward()
    assert not optimizer.norm.isfinite()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert {float(each["step"]) for each in state.values()} == {0.0}
    assert not any(each["exp_avg"].any() for each in state.values())
    for name, parameter in stack.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_narrow_weights_move_as_their_float32_masters_do() -> None:
    """A step of bfloat16 alone would round most updates away."""
    stack, optimizer = build(0, CASE, Habits(), sharded=True)
    stack.to(torch.bfloat16)
    wide = {name: p.detach().float() for name, p in stack.model.named_parameters()}
    twin, _ = build(0, CASE, Habits(), sharded=False)
    twin.to(torch.float32)
    with torch.no_grad():
        for name, parameter in twin.model.named_parameters():
            parameter.copy_(wide[name])
    adamw = build_adamw(twin.model.named_parameters(), CASE.config.optimizer)
    for number in range(4):
        loss_of(stack, 0, CASE, number).backward()
        for name, parameter in twin.model.named_parameters():
            narrow = stack.model.get_parameter(name)
            found = optimizer.updates.share_of(narrow)
            assert found is not None, name
            summed = [found[1].gradient(*each) for each in found[1].runs_of(narrow)]
            parameter.grad = torch.cat(summed).float().view(parameter.shape)
        clip = min(1.0, 0.05 / (_norm(twin) + 1e-6))
        for parameter in twin.model.parameters():
            assert parameter.grad is not None
            parameter.grad = (parameter.grad.to(torch.bfloat16) * torch.tensor(clip).bfloat16()).float()
        optimizer.step()
        adamw.step()
        for name, parameter in stack.model.named_parameters():
            assert torch.equal(parameter, twin.model.get_parameter(name).bfloat16()), (number, name)


def _norm(stack: torch.nn.Module) -> float:
    norm = torch.cat([p.grad.view(-1).double() for p in stack.parameters() if p.grad is not None]).norm()
    return float(norm)


def test_state_goes_from_one_kind_of_optimiser_to_the_other_and_back() -> None:
    habits = Habits()
    stack, sharded = build(0, CASE, habits, sharded=True)
    go_on(stack, sharded, 0, CASE, habits, range(2))
    saved, weights = sharded.state_dict(), copy.deepcopy(stack.state_dict())
    again, other = build(0, CASE, habits, sharded=True)
    plain, adamw = build(0, CASE, habits, sharded=False)
    results = [go_on(stack, sharded, 0, CASE, habits, range(2, 4))]
    for fresh, optimizer in ((again, other), (plain, adamw)):
        fresh.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        results.append(go_on(fresh, optimizer, 0, CASE, habits, range(2, 4)))
    for result in results[1:]:
        assert result.losses == pytest.approx(results[0].losses, rel=1e-12)
        check_all_close(result.parameters, results[0].parameters, 1e-12)


def test_loaded_state_is_what_the_next_steps_use() -> None:
    """Learning rates set afterwards count, and a parameter without a saved state begins anew."""
    stack, optimizer = build(0, CASE, Habits(), sharded=True)
    loss_of(stack, 0, CASE, 0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
    states = optimizer.state_dict()["state"].values()
    assert {float(each["step"]) for each in states} == {0.0}
    assert not any(each["exp_avg"].any() for each in states)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(stack.state_dict())
    loss_of(stack, 0, CASE, 1).backward()
    optimizer.step()
    check_all_close(stack.state_dict(), before, 0.0)


def test_a_parameter_that_is_frozen_keeps_its_loaded_state_until_it_is_trained() -> None:
    habits = Habits()
    stack, optimizer = build(0, CASE, habits, sharded=True)
    go_on(stack, optimizer, 0, CASE, habits, range(2))
    saved, weights = optimizer.state_dict(), copy.deepcopy(stack.state_dict())
    again, fresh = build(0, CASE, habits, sharded=True)
    again.load_state_dict(weights)
    frozen = [parameter for name, parameter in again.named_parameters() if "norm" in name]
    assert frozen
    for parameter in frozen:
        parameter.requires_grad_(False)
    fresh.load_state_dict(saved)
    fresh.load_state_dict({**saved, "state": {}})
    assert len(fresh.state_dict()["state"]) == len(saved["state"]) - len(frozen)
    fresh.load_state_dict(saved)
    for number, state in fresh.state_dict()["state"].items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], saved["state"][number][name]), (number, name)
    for parameter in frozen:
        parameter.requires_grad_(True)
    results = [go_on(*each, 0, CASE, habits, range(2, 4)) for each in ((stack, optimizer), (again, fresh))]
    check_all_close(results[1].parameters, results[0].parameters, 1e-12)


def test_the_state_of_other_parameters_is_refused() -> None:
    _, optimizer = build(0, CASE, Habits(), sharded=True)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].repeat(2, 1)
    with pytest.raises(ValueError, match="of another model, layout or order of parameters"):
        optimizer.load_state_dict(saved)
    _, plain = build(0, CASE, Habits(), sharded=False)
    more = {"state": {}, "param_groups": saved["param_groups"] * 2}
    for each in (optimizer, plain):
        with pytest.raises(ValueError):
            each.load_state_dict(more)


@pytest.mark.parametrize(
    ("settings", "group", "said"),
    [
        ({"lr": -0.1}, {}, "lr = -0.1 .* at least 0"),
        ({"lr": float("nan")}, {}, "lr = nan"),
        ({"betas": (0.9, 1.0)}, {}, "betas = .* less than 1"),
        ({"eps": -1.0}, {}, "eps = -1.0"),
        ({"max_norm": -1.0}, {}, "max_norm = -1.0: it must be more than 0"),
        ({}, {"weight_decay": -1.0}, "weight_decay = -1.0"),
        ({}, {"amsgrad": True}, "amsgrad = True .* does not have it"),
        ({}, {"params": [torch.nn.Parameter(torch.ones(2))]}, "none of the stack's"),
    ],
)
def test_what_would_not_be_as_adamw_does_is_refused(
    settings: dict[str, Any], group: dict[str, Any], said: str
) -> None:
    stack, _ = build(0, CASE, Habits(), sharded=True)
    made = {"params": list(stack.parameters()), "weight_decay": 0.0, **group}
    with pytest.raises(ValueError, match=said):
        ShardedAdamW(stack, [made], **{"lr": 0.1, "max_norm": 1.0, **settings})


def test_an_optimizer_whose_stack_has_another_one_is_refused() -> None:
    stack, first = build(0, CASE, Habits(), sharded=True)
    group = {"params": list(stack.parameters())}
    with pytest.raises(ValueError, match="no weight_decay"):
        ShardedAdamW(stack, [group], lr=0.1, max_norm=1.0)
    with first.in_backward():
        loss_of(stack, 0, CASE, 0).backward()
    ShardedAdamW(stack, [{**group, "weight_decay": 0.0}], lr=0.1, max_norm=1.0)
    assert not first.updates.is_stale  # nobody else would have gathered them
    loss_of(stack, 0, CASE, 0).backward()
    with pytest.raises(RuntimeError, match="another ShardedAdamW"):
        first.step()


def test_a_backward_pass_is_refused_after_an_update_that_followed_its_forward_pass() -> None:
    """The fused AdamW does not tell autograd that it has changed a tensor."""
    stack, optimizer = build(0, CASE, Habits(), sharded=True)
    losses = [loss_of(stack, 0, CASE, number) for number in range(3)]
    losses[0].backward()
    losses[1].backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="updated between a forward pass and its backward"):
        losses[2].backward()
    both = loss_of(stack, 0, CASE, 3) + loss_of(stack, 0, CASE, 4)
    with optimizer.in_backward(), pytest.raises(RuntimeError, match="that of one loss alone"):
        both.backward()


def test_a_plan_adopted_before_the_update_leaves_the_sums_whole() -> None:
    case = replace(CASE, schedule=replace(CASE.schedule, all_reduce_chunk_bytes=700))
    results = []
    for adopts in (False, True):
        stack, optimizer = build(0, case, Habits(), sharded=True)
        loss_of(stack, 0, case, 0).backward()
        if adopts:
            choice = Decision(schedule="flowmoe", microbatches=1)
            sizes = stack.gradients.sizes_bytes
            stack.adopt(plan_step(choice, stack.base_shape, sizes, lambda _: unit_cost))
        optimizer.step()
        results.append(stack.state_dict())
    check_all_close(results[1], results[0], 0.0)


class Launches(TorchDispatchMode):
    """How often a device would be given something to do: views are made by the host."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view and func.overloadpacket.__name__ != "split_with_sizes"
        return func(*args, **kwargs or {})


def test_an_update_is_a_few_launches_whatever_the_number_of_parameters() -> None:
    """In two bytes, with copies in float32."""
    case = replace(layout_case((1, 1, 1, 1), "sequential", "gather"), double=False)
    stack, optimizer = build(0, case, Habits(), sharded=True)
    stack.to(torch.bfloat16)
    loss_of(stack, 0, case, 0).backward()
    with Launches() as launches:
        optimizer.step()
    tasks = [task for task in stack.plan.graph.tasks if of_optimizer(task)]
    assert launches.number < 20 * len(tasks), f"{len([*stack.parameters()])} parameters"


# ---- shares by themselves ----------------------------------------------------------------------------------


def test_weights_of_two_bytes_that_were_changed_from_outside_replace_their_exact_copy() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.bfloat16))
    share = Share(FlatGradients([parameter]), (1,), 1, 0)
    (exact,) = share.weights(0)
    assert exact.dtype == torch.float32 and exact.tolist() == [1.0, -2.0, 3.0]
    exact.add_(1e-4)  # less than bfloat16 can say
    assert torch.equal(share.weights(0)[0], torch.tensor([1.0, -2.0, 3.0]) + 1e-4)
    with torch.no_grad():
        parameter[1] = 8.0
    assert share.weights(0)[0].tolist() == pytest.approx([1.0 + 1e-4, 8.0, 3.0 + 1e-4], rel=1e-6)


@pytest.mark.parametrize("kind", [Share, ReleasingShare])
def test_a_gradient_may_be_a_part_of_a_sum(kind: type[Share]) -> None:
    """Where ranks compute the same in different places, what they add up is averaged."""
    flat = FlatGradients([nn.Parameter(torch.zeros(4))], share=0.5)
    flat.begin()
    share = kind(flat, (1,), 1, 0)
    share.begin(adds=False)
    share.take(0, torch.tensor([2.0, 4.0, 6.0, 8.0]))
    assert share.owned(0).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_buffer_with_fewer_numbers_than_pieces_has_empty_pieces() -> None:
    """A small parameter of another type than its layer has a buffer of its own, cut like the layer's."""
    flat = ReleasedGradients([nn.Parameter(torch.zeros(2))])
    share = ReleasingShare(flat, (1, 1, 1), 1, 0)
    share.begin(adds=False)
    flat.parameters[0].grad = torch.tensor([1.0, 2.0])
    for piece in range(3):
        share.take(piece, share.rows(piece))
    sums = torch.cat([share.owned(piece) for piece in range(3)])
    assert sums.tolist() == [1.0, 2.0] and flat.parameters[0].grad is None
