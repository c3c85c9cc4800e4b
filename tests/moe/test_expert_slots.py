"""Which position a row goes to while ranks host replicas, and what a rank computes with its replicas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.moe import Experts, ModuleExperts, SwiGLUExperts
from penstock.moe.experts import OwnAndReplicas, Spread
from penstock.placement import SPLIT, Part

DEVICE = torch.device("cpu")


def test_an_expert_with_one_position_sends_all_rows_there_and_padding_nowhere() -> None:
    spread = Spread([[Part(4, SPLIT)], [Part(0, SPLIT)]], DEVICE)
    assert spread(torch.tensor([[0, 1], [-1, -1], [1, 0]])).tolist() == [[4, 0], [-1, -1], [0, 4]]


@given(st.lists(st.integers(1, 999), min_size=1, max_size=5), st.integers(0, 300), st.integers(0, 500))
def test_any_run_of_rows_is_shared_as_the_split_says(shares: list[int], first: int, rows: int) -> None:
    """Of any rows in a row a position gets its share, but for a few."""
    parts = [
        *(
            Part(i, share * 4 // len(shares))
            for i, share in enumerate(shares[1:], 1)
            if share * 4 >= len(shares)
        )
    ]
    parts.append(Part(0, SPLIT - sum(part.parts for part in parts)))
    spread = Spread([parts, [Part(9, SPLIT)]], DEVICE)
    positions = spread(torch.zeros(first + rows, 1, dtype=torch.int64))[first:]
    for position, share in parts:
        found = int((positions == position).sum())
        assert abs(found - rows * share / SPLIT) <= 6
    assert spread(torch.full((3, 1), 1)).tolist() == [[9]] * 3


@pytest.mark.parametrize(
    "own", [ModuleExperts(lambda: torch.nn.Linear(4, 4), 3), SwiGLUExperts(4, 6, 3)], ids=["module", "swiglu"]
)
@torch.no_grad()
def test_replicas_compute_what_their_owners_would(own: Experts) -> None:
    replicas = own.replicas(2)
    assert replicas.num_local_experts == 2
    assert {id(p) for p in own.parameters()}.isdisjoint(map(id, replicas.parameters()))
    values = {(name, slot): part for n, p in own.named_parameters() for name, slot, part in own.split(n, p)}
    for name, parameter in replicas.named_parameters():
        for logical, slot, part in replicas.split(name, parameter):
            part.copy_(values[logical, 2 - slot])
    rows = torch.randn(11, 4)
    sizes = [2, 0, 3, 4, 2]
    both = OwnAndReplicas(own, replicas)
    wanted = own(rows[:5], [2, 0, 3]), own(rows[5:9], [0, 0, 4]), own(rows[9:], [0, 2, 0])
    assert torch.allclose(both(rows, sizes), torch.cat(wanted))
    assert torch.equal(both(rows[:5], [2, 0, 3, 0, 0]), wanted[0])


def test_replicas_are_trained_where_the_own_experts_are() -> None:
    own = SwiGLUExperts(4, 6, 3).double()
    own.w_up.requires_grad_(False)
    replicas = own.replicas(1)
    assert isinstance(replicas, SwiGLUExperts)
    assert (replicas.w_up.requires_grad, replicas.w_gate.requires_grad) == (False, True)
    assert replicas.w_down.shape == (1, 6, 4) and replicas.w_down.dtype == torch.float64
