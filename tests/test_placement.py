"""Placements: what they say, and what they refuse by name."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.placement import (
    EMPTY,
    SPLIT,
    ExpertPlacement,
    Part,
    PlacementError,
    Replication,
)


def test_the_default_is_even_and_contiguous() -> None:
    even = ExpertPlacement.even(6, 3)
    assert [even.held(rank) for rank in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert even.is_even and even.positions == (0, 1, 2, 3, 4, 5)
    assert even.owners == (0, 0, 1, 1, 2, 2)
    assert even == ExpertPlacement.of([[0, 1], [2, 3], [4, 5]])


@pytest.mark.parametrize(("num_experts", "ranks", "nearest"), [(7, 3, 6), (10, 3, 9), (2, 4, 4), (7, 4, 8)])
def test_experts_that_ranks_cannot_share_are_refused_with_the_nearest_number(
    num_experts: int, ranks: int, nearest: int
) -> None:
    with pytest.raises(PlacementError, match=rf"num_experts = {num_experts} .*nearest valid: {nearest}$"):
        ExpertPlacement.even(num_experts, ranks)


@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_positions_and_slots_say_the_same(experts: list[int], ranks: int) -> None:
    slots = 12 // ranks
    held = [experts[rank * slots : (rank + 1) * slots] for rank in range(ranks)]
    placement = ExpertPlacement.of(held)
    assert [list(placement.held(rank)) for rank in range(ranks)] == held
    assert list(placement.by_position) == experts
    assert [placement.by_position[position] for position in placement.positions] == list(range(12))
    assert all(expert in placement.held(rank) for expert, rank in enumerate(placement.owners))
    assert placement.is_even is (experts == sorted(experts))
    assert (placement.digest == ExpertPlacement.even(12, ranks).digest) is placement.is_even


def test_a_saved_run_knows_its_placements_again() -> None:
    """By digests, which checkpoints have."""
    assert ExpertPlacement.of([[2, 0], [1, 3]]).digest == "782830b04ef73bf299181c5bbed918b4"


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([[0, 1], [3, 4]], "expert 2 has no home"),
        ([[0, 1], [2]], "rank 1 has 1 slots and rank 0 has 2"),
        ([[0, 1], [0, 2]], "expert 0 has 2 homes"),
    ],
)
def test_what_is_wrong_is_named(held: list[list[int]], words: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(words)):
        ExpertPlacement.of(held)


def test_without_replicas_rows_go_where_the_placement_sends_them() -> None:
    placement = ExpertPlacement.of([[0, 1], [2, 5], [3, 4]])
    replication = Replication.none(placement, 2)
    assert (replication.slots, replication.positions, replication.is_empty) == (4, 12, True)
    assert replication.by_position == (0, 1, EMPTY, EMPTY, 2, 5, EMPTY, EMPTY, 3, 4, EMPTY, EMPTY)
    for rank in range(3):
        assert [part.position for (part,) in replication.splits[rank]] == [0, 1, 4, 8, 9, 5]


def test_a_replica_takes_the_rows_of_its_own_rank() -> None:
    replication = Replication.local(ExpertPlacement.even(4, 2), [[3], [EMPTY]])
    assert replication.by_position == (0, 1, 3, 2, 3, EMPTY)
    assert [[part.position for (part,) in splits] for splits in replication.splits] == [
        [0, 1, 3, 2],
        [0, 1, 3, 4],
    ]
    assert not replication.is_empty
    assert replication.digest != Replication.none(replication.placement, 1).digest


@pytest.mark.parametrize(
    ("replicas", "split", "words"),
    [
        ([[3]], None, "replicas of 1 ranks, and 2 ranks have experts"),
        ([[3], []], None, "rank 1 has 0 replica slots, all ranks have 1"),
        (
            [[4], [0]],
            None,
            "replica slot 0 of rank 0 has expert 4, and there are experts 0 to 3 (-1 for none)",
        ),
        ([[1], [0]], None, "replica slot 0 of rank 0 has expert 1, which the rank holds already"),
        (
            [[3], [0]],
            [(3, SPLIT)],
            "rows of expert 3 that start on rank 0 go to position 3, which does not hold",
        ),
        ([[3], [0]], [(2, 1)], "are split into 1 parts in all, which must be 4096"),
        ([[3], [0]], [(2, SPLIT), (4, 0)], "go to position 4 with 0 parts: leave it out"),
        ([[3], [0]], [(4, 1), (4, SPLIT - 1)], "name a position twice"),
    ],
)
def test_what_is_wrong_with_replicas_is_named(
    replicas: list[list[int]], split: list[tuple[int, int]] | None, words: str
) -> None:
    placement = ExpertPlacement.even(4, 2)
    with pytest.raises(PlacementError, match=re.escape(words)):
        if split is None:
            Replication(placement, 1, tuple(map(tuple, replicas)), Replication.none(placement, 1).splits)
        else:
            good = Replication.local(placement, replicas)
            first = (*good.splits[0][:3], tuple(Part(*part) for part in split))
            Replication(placement, 1, good.replicas, (first, good.splits[1]))
