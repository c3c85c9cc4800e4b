"""Collectives of several ranks that do not fit each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.recording.hazards import Issued, find_disorder
from tests.support.recording.recorder import Call

EVEN = (8, 8)


def issued(
    communicator: str,
    op: str = "all_to_all",
    sent: Sequence[int] = EVEN,
    received: Sequence[int] = EVEN,
    ranks: Sequence[int] = (0, 1),
) -> Issued:
    return f"task of {communicator}", Call(communicator, tuple(ranks), op, tuple(sent), tuple(received))


A, B, SUM = issued("a"), issued("b"), issued("a", "all_reduce")


def messages(rank: int, name: str, size_bytes: int = 8) -> list[Issued]:
    """What a rank of two issues to exchange messages: it receives, and then sends."""
    found = []
    for source in (1 - rank, rank):
        pair = (source, 1 - source)
        here, none = (size_bytes, 0) if source != rank else (0, size_bytes), (0, 0)
        sent, received = (here, none) if source == rank else (none, here)
        call = Call(f"{name}, rank {pair[0]} to {pair[1]}", pair, "message", sent, received, name)
        found.append((f"task of {name}", call))
    return found


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([[A, B, A], [A, B, A]], []),
        ([[A, B], [B, A]], ["deadlock"]),
        ([[A, SUM], [SUM, A]], ["kind"]),
        ([[A, A], [A]], ["number"]),
        ([[A], []], ["number"]),
        ([[issued("a", sent=(0, 4), received=(0, 0))], [issued("a", sent=(0, 0), received=(4, 0))]], []),
        (
            [[issued("a", sent=(0, 4), received=(0, 0))], [issued("a", sent=(0, 0), received=(8, 0))]],
            ["bytes"],
        ),
        ([messages(0, "a"), messages(1, "a")], []),
        ([messages(0, "a")[::-1], messages(1, "a")], []),
        ([messages(0, "a") + messages(0, "b"), messages(1, "a") + messages(1, "b")], []),
        ([messages(0, "a") + messages(0, "b"), messages(1, "b") + messages(1, "a")], ["deadlock"]),
        ([messages(0, "a"), messages(1, "a")[:1]], ["number"]),
        ([messages(0, "a"), messages(1, "a", 4)], ["bytes", "bytes"]),
        ([[issued("a", ranks=(0, 1))], [issued("a", ranks=(1, 0))]], ["kind"]),
    ],
)
def test_two_ranks(ranks: list[list[Issued]], found: list[str]) -> None:
    assert [disorder.kind for disorder in find_disorder(ranks)] == found


def test_three_ranks_of_which_each_two_agree_may_wait_for_each_other_in_a_ring() -> None:
    ab, bc, ca = (
        issued(name, ranks=ranks) for name, ranks in (("ab", (0, 1)), ("bc", (1, 2)), ("ca", (2, 0)))
    )
    assert find_disorder([[ab, ca], [ab, bc], [bc, ca]]) == []
    (disorder,) = find_disorder([[ca, ab], [ab, bc], [bc, ca]])
    assert disorder.kind == "deadlock"
    assert {rank for rank, _ in disorder.tasks} == {0, 1, 2}


def test_the_tasks_of_both_ranks_are_named() -> None:
    (disorder,) = find_disorder([[A, SUM], [SUM, A]])
    assert (disorder.communicator, dict(disorder.tasks)) == ("a", {0: A[0], 1: SUM[0]})
