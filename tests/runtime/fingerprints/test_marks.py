"""Marks of parameters: they cancel where ranks agree, and name what differs, on every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.fingerprints import (
    EXPERTS,
    FACTS,
    PARAMETERS,
    Entry,
    Marks,
    ParameterMismatchError,
    agree,
    raise_mismatch,
)
from penstock.topology import Control, Layout
from tests.support.ranks import Pools

WHOLE = ("norm", "gate", "qkv")
OF_EXPERTS = ("w_up", "w_down")


def marks_of(layout: Layout) -> Marks:
    def entries(names: tuple[str, ...]) -> tuple[Entry, ...]:
        return tuple(Entry(name, 0, True, "float32", (2, 3)) for name in names)

    return Marks(entries(WHOLE), entries(OF_EXPERTS) if layout.edp_size > 1 else ())


@st.composite
def worlds(draw: st.DrawFn) -> list[Layout]:
    """The layouts of all ranks of a world of 2 to 32."""
    tp, etp, ep = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    size = max(2, tp, ep * etp) * draw(st.integers(1, 2))
    return [Layout(world_size=size, rank=rank, tp_size=tp, etp_size=etp, ep_size=ep) for rank in range(size)]


def total(marks: list[Marks], world: list[Layout]) -> list[float]:
    sums = [0.0] * FACTS
    for mine, layout in zip(marks, world, strict=True):
        parameters, experts = mine.numbers(layout)
        sums[PARAMETERS] += parameters
        sums[EXPERTS] += experts
    return sums


@given(worlds())
def test_marks_of_equal_parameters_cancel(world: list[Layout]) -> None:
    assert agree(total([marks_of(layout) for layout in world], world))


@given(worlds(), st.data())
def test_a_difference_of_one_rank_is_seen(world: list[Layout], data: st.DataObject) -> None:
    marks = [marks_of(layout) for layout in world]
    rank = data.draw(st.integers(0, len(world) - 1))
    mine = marks[rank]
    name = data.draw(st.sampled_from([e.name for e in (*mine.replicated, *mine.experts)]))
    what: list[dict[str, object]] = [{"trained": False}, {"shape": (3, 2)}]
    changed = data.draw(st.sampled_from(what))
    marks[rank] = Marks(changed_in(mine.replicated, name, changed), changed_in(mine.experts, name, changed))
    assert not agree(total(marks, world))


def changed_in(entries: tuple[Entry, ...], name: str, change: dict[str, object]) -> tuple[Entry, ...]:
    return tuple(
        replace(entry, **change) if entry.name == name else entry  # type: ignore[arg-type]  # any field
        for entry in entries
    )


def with_a_change(rank: int, name: str, only: int, change: dict[str, object]) -> None:
    layout = Layout(world_size=4, rank=rank, tp_size=2, etp_size=2, ep_size=1)
    mine = marks_of(layout)
    if rank == only:
        mine = Marks(changed_in(mine.replicated, name, change), changed_in(mine.experts, name, change))
    raise_mismatch(mine, layout, Control(rank, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("norm", {"shape": (3, 2)}, "on rank 3 against rank 0: norm is float32 [3, 2] there"),
        ("qkv", {"trained": False}, "on rank 3 against rank 0: qkv is frozen there and trained here"),
        ("w_up", {"dtype": "float64"}, "on rank 3 against rank 1: w_up is float64 [2, 3] there"),
    ],
)
def test_a_difference_is_named_between_ranks_that_hold_the_same(
    ranks: Pools, name: str, change: dict[str, object], words: str
) -> None:
    told = ranks(4).told(ParameterMismatchError, with_a_change, name, 3, change)
    assert all(words in text for text in told)
