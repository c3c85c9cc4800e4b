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
    Home,
    Part,
    PlacementError,
    Replication,
)


def test_the_default_is_even_and_contiguous() -> None:
    even = ExpertPlacement.even(6, 3)
    assert [even.held(rank) for rank in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert even.positions(0) == even.positions(2) == (0, 1, 2, 3, 4, 5)
    assert even.is_even and not even.has_replicas
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
    for rank in range(ranks):
        assert [placement.by_position[position] for position in placement.positions(rank)] == list(range(12))
    assert placement.is_even is (experts == sorted(experts))
    assert (placement.digest == ExpertPlacement.even(12, ranks).digest) is placement.is_even


def test_rows_go_to_the_own_replica_or_else_to_the_owner() -> None:
    placement = ExpertPlacement.of([[0, 1], [2, 0], [3, 4]], owners=[1, 0, 1, 2, 2])
    assert placement.has_replicas
    assert [placement.positions(rank)[0] for rank in range(3)] == [0, 3, 3]
    assert placement.digest != ExpertPlacement.of([[0, 1], [2, 0], [3, 4]]).digest, "another owner"


@pytest.mark.parametrize(
    ("held", "owners", "words"),
    [
        ([[0, 1], [3, 4]], None, "expert 2 has no home"),
        ([[0, 1], [2]], None, "rank 1 has 1 slots and rank 0 has 2"),
        ([[0, 1], [2, 3]], [0, 1, 1, 1], "expert 1 is owned by rank 1, which does not hold it (homes: 0)"),
        ([[0, 1], [2, 3]], [0, 0, 1], "3 owners for 4 experts"),
        ([[0, 0], [1, 2]], None, "expert 0 has two slots of one rank"),
    ],
)
def test_what_is_wrong_is_named(held: list[list[int]], owners: list[int] | None, words: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(words)):
        ExpertPlacement.of(held, owners)


@pytest.mark.parametrize(
    ("homes", "words"),
    [
        ([Home(0, 0), Home(0, 0)], "experts 0 and 1 are both in slot 0 of rank 0"),
        ([Home(0, 0), Home(2, 0)], "expert 1 is in slot 0 of rank 2, and there are ranks 0 to 1"),
        ([Home(0, 0), Home(1, 1)], "expert 1 is in slot 1 of rank 1, and there are ranks 0 to 1 with slots"),
        ([Home(0, 0)], "rank 1 uses 0 of 1 slots"),
    ],
)
def test_slots_are_checked(homes: list[Home], words: str) -> None:
    with pytest.raises(PlacementError, match=re.escape(words)):
        ExpertPlacement(2, 1, tuple((home,) for home in homes), tuple(home.rank for home in homes))


def test_without_replicas_rows_go_where_the_placement_sends_them() -> None:
    placement = ExpertPlacement.of([[0, 1], [2, 0], [3, 4]], owners=[1, 0, 1, 2, 2])
    replication = Replication.none(placement, 2)
    assert (replication.slots, replication.positions, replication.is_empty) == (4, 12, True)
    assert replication.by_position == (0, 1, EMPTY, EMPTY, 2, 0, EMPTY, EMPTY, 3, 4, EMPTY, EMPTY)
    for rank in range(3):
        positions = [part.position for (part,) in replication.splits[rank]]
        assert [replication.by_position[position] for position in positions] == list(range(5))
        old = [divmod(position, 2) for position in placement.positions(rank)]
        assert positions == [home * replication.slots + slot for home, slot in old]


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
