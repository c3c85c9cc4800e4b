"""Ranks whose values drift apart are told so, all of them in the same step; those that do not are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad, parameters_to_vector, vector_to_parameters

from penstock.mesh import Axes
from penstock.runtime import ParameterMismatchError, PipelinedStack, clip
from penstock.runtime.transport import GlooTransport
from penstock.topology import CommunicationError
from tests.runtime.features.sharded_optimizer.steps import Habits, build, loss_of
from tests.support.layouts import layout_case, tiny_case
from tests.support.parity import Case, stack_of
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow
CASE = tiny_case(2, moe_ffn_hidden_size=6, gate="sigmoid", expert_bias_rate=0.01)
REPLICAS = replace(CASE, ep_size=1)
PARTS = replace(layout_case((4, 2, 2, 1), "flowmoe", "gather"), double=False)
LATE = 5
"""The step after which some ranks are treated otherwise than others: none in which values are due."""

Act = Callable[[PipelinedStack, torch.optim.Optimizer, int, int], None]
"""What a loop does before an update; given the number of the rank and of the step."""


def clip_by_torch(stack: PipelinedStack, *_: Any) -> None:
    """By its own norm, which counts what a rank has: `parallelize` puts another in its place."""
    with patch.object(clip_grad, "_get_total_norm", clip._TORCH_NORM):
        torch.nn.utils.clip_grad_norm_(stack.parameters(), 0.1)


def set_rate(_: PipelinedStack, optimizer: torch.optim.Optimizer, rank: int, *__: int) -> None:
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank)


def load_alone(stack: PipelinedStack, _: torch.optim.Optimizer, rank: int, step: int) -> None:
    if (rank, step) == (0, LATE):
        state = stack.state_dict()
        changed = {name: 1.01 * each for name, each in state.items() if each.is_floating_point()}
        stack.load_state_dict({**state, **changed})


def load_state(_: PipelinedStack, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    if (rank, step) == (0, LATE):
        state = optimizer.state_dict()
        for each in state["state"].values():
            each["exp_avg"] = each["exp_avg"] * 2
        optimizer.load_state_dict(state)


def leave_out(_: PipelinedStack, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    if (rank, step) == (1, LATE):
        optimizer.zero_grad()


def set_rate_of(name: str, by: int) -> Act:
    """Ranks `by` apart have another rate for parameters of this name."""

    def act(stack: PipelinedStack, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
        if step == 0:
            chosen = [p for n, p in stack.named_parameters() if name in n]
            mine = {id(p) for p in chosen}
            group = optimizer.param_groups[0]
            group["params"] = [p for p in group["params"] if id(p) not in mine]
            optimizer.add_param_group({"params": chosen, "lr": 1e-3 * (1 + rank // by)})

    return act


def count_alone(stack: PipelinedStack, _: torch.optim.Optimizer, rank: int, step: int) -> None:
    if (rank, step) == (1, LATE):
        for name, buffer in stack.named_buffers():
            if name.endswith("bias.value_E"):
                buffer[0] += 0.1


APART: dict[str, tuple[Case, Act, int, str]] = {
    "clipping by torch": (CASE, clip_by_torch, 2, ""),
    "rates": (CASE, set_rate, 1, ""),
    "a state loaded by one": (CASE, load_alone, LATE + 1, ""),
    "moments loaded by one": (CASE, load_state, 8, ""),
    "an update left out by one": (CASE, leave_out, LATE + 1, ""),
    "rates of replicas": (REPLICAS, set_rate_of("w_up", 1), 1, "w_up"),
    "rates of parts": (PARTS, set_rate_of("q_proj.weight", 2), 1, "q_proj.weight"),
    "a buffer": (CASE, count_alone, 8, "bias.value_E"),
}
"""What a loop does, the step that notices it, counted from 0, and a part of the name in the error."""


def told(rank: int, case: Case, what: str, late: bool) -> tuple[int, str]:
    """The step in which a rank hears that values differ, and what it hears."""
    stack = stack_of(rank, case)
    stack.consistency.late = late
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-3)
    for step in range(10):
        try:
            loss = loss_of(stack, rank, case, step)
        except ParameterMismatchError as error:
            with pytest.raises(ParameterMismatchError):  # until they are equal again
                loss_of(stack, rank, case, step)
            return step, str(error)
        loss.backward()
        APART[what][1](stack, optimizer, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return -1, ""


@pytest.mark.every_value
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", APART)
def test_ranks_that_drift_apart_are_all_told_in_one_step(ranks: Pools, what: str, late: bool) -> None:
    """late: as on a GPU, whose numbers are read in the step after."""
    case, _, step, name = APART[what]
    found = ranks(case.world_size).run(told, case, what, late)
    assert len(set(found)) == 1, "all hear the same"
    at, said = found[0]
    assert at - step in ((0, 1) if late else (0,))
    assert name in said and " on rank" in said


def load_with_shares(rank: int, case: Case, late: bool) -> tuple[int, str]:
    """A state loaded by one rank, whose own shares an optimiser spreads in the next step."""
    stack, optimizer = build(rank, case, Habits(), sharded=True)
    stack.consistency.late = late
    for step in range(10):
        try:
            loss = loss_of(stack, rank, case, step)
        except ParameterMismatchError as error:
            return step, str(error)
        with optimizer.in_backward():
            loss.backward()
        optimizer.flush()
        load_alone(stack, optimizer, rank, step)
    return -1, ""


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_shares_of_one_rank_do_not_hide_what_it_has_loaded(ranks: Pools, late: bool) -> None:
    found = ranks(4).run(load_with_shares, PARTS, late)
    assert len(set(found)) == 1 and found[0][0] == LATE + 1


def swap_and_back(rank: int, case: Case) -> list[str]:
    """What is said where rank 0 alone puts other values in place after every step, and its own back."""
    stack = stack_of(rank, case)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4):
            loss_of(stack, rank, case, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                own = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
                floats = {name: each for name, each in own.items() if each.is_floating_point()}
                stack.load_state_dict({**own, **{name: each * 0 for name, each in floats.items()}})
                stack.load_state_dict(own)
    return [str(each.message) for each in said if "differs" in str(each.message)]


@pytest.mark.parametrize("case", [CASE, REPLICAS], ids=["spread", "replicas"])
def test_a_rank_may_change_values_and_take_them_back(ranks: Pools, case: Case) -> None:
    assert ranks(2).run(swap_and_back, case) == [[], []]


def rounded(rank: int, case: Case) -> tuple[list[str], str]:
    """What is said of values that differ by a unit in the last place, and by more."""
    stack = stack_of(rank, case)
    loss_of(stack, rank, case, 0).backward()
    weight = stack.model.get_parameter("lm_head.weight")
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        weight[::2] *= 1 + rank * torch.finfo(weight.dtype).eps
        loss_of(stack, rank, case, 1)  # in evaluation nothing is compared
        with torch.enable_grad():
            loss_of(stack, rank, case, 1).backward()
        weight[0, 0] += 1e-3 * rank
    with pytest.raises(ParameterMismatchError) as caught:
        loss_of(stack, rank, case, 2)
    return [str(each.message) for each in said if "differs" in str(each.message)], str(caught.value)


def test_what_rounding_explains_is_a_warning_of_rank_0(ranks: Pools) -> None:
    (first, said), (second, other) = ranks(2).run(rounded, CASE)
    assert len(first) == 1 and "lm_head.weight" in first[0] and not second
    assert said == other and said.startswith("lm_head.weight")


def evaluate_alone(rank: int, case: Case, late: bool) -> str:
    """What is said where rank 1 evaluates a batch on which the others train."""
    stack = stack_of(rank, case)
    stack.consistency.late = late
    loss_of(stack, rank, case, 0).backward()
    stack.train(rank == 0)
    with pytest.raises(ValueError) as caught:
        loss_of(stack, rank, case, 1)
    stack.train()
    loss_of(stack, rank, case, 2).backward()
    return str(caught.value)


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_only_evaluates_is_no_hang(ranks: Pools, late: bool) -> None:
    first, second = ranks(2).run(evaluate_alone, CASE, late)
    assert first == second and "train" in first


def lose_one(rank: int, case: Case) -> None:
    """A step whose sums of statistics lack what rank 1 has sent."""
    stack = stack_of(rank, case)
    whole = GlooTransport.all_reduce

    def lossy(self: GlooTransport, tensor: Tensor, group: Axes) -> None:
        if rank == 1 and tensor.dtype == torch.float64:  # of this model these are statistics alone
            tensor.zero_()
        whole(self, tensor, group)

    with patch.object(GlooTransport, "all_reduce", lossy):
        loss_of(stack, rank, case, 0)


def test_a_sum_that_lacks_a_rank_is_no_agreement(ranks: Pools) -> None:
    first, second = ranks(2).told(CommunicationError, lose_one, CASE)
    assert first == second and "counts 1:" in first


def seed_of_one(rank: int, case: Case) -> None:
    stack = stack_of(rank, case)
    stack.seed = rank
    loss_of(stack, rank, case, 0)


def test_ranks_that_share_attention_share_the_seed_of_dropout(ranks: Pools) -> None:
    """Others may have seeds of their own: no sample is on two of them."""
    ranks(2).run(seed_of_one, CASE)
    assert all("seed" in said for said in ranks(4).told(ValueError, seed_of_one, PARTS))


def scale_by_rank(rank: int, case: Case, late: bool) -> tuple[int, str]:
    """The step in which a rank hears that the loss of the one before was scaled by another number there."""
    stack = stack_of(rank, case)
    stack.consistency.late = late
    for step in range(5):
        try:
            loss = loss_of(stack, rank, case, step)
        except ValueError as error:
            loss_of(stack, rank, case, step).backward()  # of gradients that are cleared all is well
            return step, str(error)
        (loss * (2 if (rank, step) == (1, 1) else 1)).backward()
    return -1, ""


@pytest.mark.parametrize("late", [False, True])
def test_ranks_scale_their_loss_alike(ranks: Pools, late: bool) -> None:
    first, second = ranks(2).run(scale_by_rank, CASE, late)
    assert first == second and first[0] == (3 if late else 2)


def copied(rank: int, case: Case, what: str) -> None:
    """A step after all ranks have got the parameters of rank 0."""
    stack = stack_of(rank, case)
    with torch.no_grad():
        if what == "equal":  # as experts are that were made from one feed-forward part
            for name, parameter in stack.named_parameters():
                if ".experts." in name:
                    parameter.copy_(parameter[:1].expand_as(parameter))
                    dist.broadcast(parameter, 0)
        if what == "broadcast":
            for parameter in stack.parameters():
                dist.broadcast(parameter.detach(), 0)
        if what == "vector":
            vector = parameters_to_vector(stack.parameters())
            dist.broadcast(vector, 0)
            vector_to_parameters(vector, stack.parameters())
    loss_of(stack, rank, case, 0).backward()


@pytest.mark.parametrize("what", ["broadcast", "vector"])
def test_experts_of_one_rank_are_not_those_of_another(ranks: Pools, what: str) -> None:
    first, second = ranks(2).told(ParameterMismatchError, copied, CASE, what)
    assert first == second and first.startswith("rank 1 holds the same values in its experts as rank 0")


@pytest.mark.parametrize(
    ("case", "what"), [(CASE, "equal"), (REPLICAS, "broadcast"), (CASE, "nothing")], ids=str
)
def test_experts_may_begin_alike(ranks: Pools, case: Case, what: str) -> None:
    ranks(2).run(copied, case, what)
