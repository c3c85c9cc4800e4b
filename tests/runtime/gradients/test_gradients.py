"""Gradients of shared and of frozen parameters: what plain PyTorch has, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.topology import Layout
from penstock.train.assemble import gradient_bytes
from penstock.train.history import total_parameters
from tests.steps import PLAIN
from tests.support.draws import draws
from tests.support.layouts import tiny_case
from tests.support.parity import Case, batch_of
from tests.support.ranks import Pools
from tests.support.sharing import check_steps, plain_steps, shared_stack, steps

NAMES = sorted(PLAIN)
SHARED = ["tied", "tied later", "shared expert", "attention", "experts"]
PARTS = [
    "embed_tokens",
    "lm_head",
    "self_attn.q_proj",
    "self_attn",
    "norm",
    "gate",
    "w_up",
    "experts",
    "model.layers.1",
    "",
]
"""Parts of names that are frozen; the last is in every name."""


def case_of(world_size: int, ep_size: int, schedule: str = "flowmoe") -> Case:
    return tiny_case(
        world_size,
        schedule,
        chunks=2,
        all_reduce_chunk_bytes=512,
        num_layers=3,
        seq_len=4,
        moe_ffn_hidden_size=6,
        shared_ffn_hidden_size=5,
        aux_loss_coeff=0.1,
        ep_size=ep_size,
        double=True,
    )


def subsets(of: list[str], most: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(of), max_size=most, unique=True).map(tuple)


@pytest.mark.every_value
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_is_shared_and_frozen(ranks: Pools, world_size: int, schedule: str) -> None:
    @draws(10)
    @given(
        ep_size=st.sampled_from([n for n in (1, 2) if n <= world_size]),
        sharing=subsets(SHARED, 4),
        frozen=st.lists(subsets(PARTS, 2), min_size=1, max_size=3),
    )
    def check(ep_size: int, sharing: tuple[str, ...], frozen: list[tuple[str, ...]]) -> None:
        case = case_of(world_size, ep_size, schedule)
        everyone = ranks(world_size).run(steps, case, sharing, frozen)
        check_steps(everyone, plain_steps(case, sharing, frozen))

    check()


@pytest.mark.slow
@pytest.mark.every_value
@pytest.mark.parametrize("schedule", ["dense_overlap", "fsmoe", "lina", "penstock"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_everything_that_can_be_shared_is_reduced_once(ranks: Pools, schedule: str, ep_size: int) -> None:
    """With those schedules a layer's all-reduce runs while a layer below still adds to the same parameter."""
    case, sharing = case_of(2, ep_size, schedule), ("tied", "shared expert", "attention", "experts")
    check_steps(ranks(2).run(steps, case, sharing, [()]), plain_steps(case, sharing, [()]))


# ---- tied embeddings ---------------------------------------------------------------------------------------


def sizes(tie: bool) -> tuple[tuple[int, ...], int, set[str]]:
    """Planned bytes of replicated gradients by layer, parameters in all, and names."""
    case = replace(case_of(1, 1), double=False)
    case = replace(case, model=replace(case.model, tie_word_embeddings=tie))
    stack = shared_stack(0, case, ("tied",) if tie else ())
    planned = gradient_bytes(case.model, case.moe, Layout(world_size=1, ep_size=1, rank=0)).replicated
    assert planned == stack.gradients.sizes_bytes[0]
    return planned, total_parameters(stack), {name for name, _ in stack.model.named_parameters()}


def test_a_tied_head_is_planned_and_counted_once() -> None:
    (separate, count, names), (tied, fewer, tied_names) = sizes(False), sizes(True)
    matrix = 11 * 8
    assert count - fewer == matrix
    assert [a - b for a, b in zip(separate, tied, strict=True)] == [0, 0, 4 * matrix]
    assert names - tied_names == {"lm_head.weight"}


# ---- frozen parameters -------------------------------------------------------------------------------------


def test_a_gradient_from_before_freezing_stays() -> None:
    case = case_of(1, 1)
    stack = shared_stack(0, case, ())
    stack(*batch_of(case)).backward()
    parameter = stack.model.get_parameter("lm_head.weight")
    assert parameter.grad is not None
    before = parameter.grad.clone()
    parameter.requires_grad_(False)
    stack(*batch_of(case)).backward()
    assert torch.equal(parameter.grad, before)
