"""Task names: the text form is one to one, and nothing else is read as a task."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Lane, Phase, ScheduleError, Task
from penstock.mesh import Group
from penstock.ops import OPS, Op


@st.composite
def tasks(draw: st.DrawFn, limit: int = 1000) -> Task:
    op = draw(st.sampled_from(str))
    spec, number = OPS[op], st.integers(0, limit)
    return Task(
        draw(number),
        op,
        Phase(draw(st.sampled_from(spec.phases))),
        draw(number) if spec.microbatch else None,
        draw(number) if spec.chunk else None,
    )


@given(tasks())
def test_text_round_trips(task: Task) -> None:
    assert Task.parse(str(task)) == task


@given(tasks(limit=1), tasks(limit=1))
def test_equal_text_means_equal_task(first: Task, second: Task) -> None:
    assert (str(first) == str(second)) == (first == second)


def test_text_form() -> None:
    assert str(Task(2, Op.DISPATCH, Phase.FORWARD, 0, 1)) == "L2.D.m0.c1.F"
    assert str(Task(0, Op.ALL_REDUCE, Phase.BACKWARD, None, 3)) == "L0.AR.c3.B"
    assert str(Task(5, Op.STATISTICS, Phase.FORWARD)) == "L5.ST.F"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "L0",
        "L0.AT.m0",
        "l0.AT.m0.F",
        "L-1.AT.m0.F",
        "L00.AT.m0.F",
        "L0.AT.m٣.F",
        "L0.at.m0.F",
        "L0.ZZ.m0.F",
        "L0.AT.m0.G",
        "L0.D.c0.m0.F",
        "L0.D.m.c0.F",
        " L0.AT.m0.F",
        "L0.AT.m0.F\n",
        "L0.AT.m0.F.F",
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(repr(name))):
        Task.parse(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("L0.D.m0.F", "op D has a chunk index"),
        ("L0.D.c0.F", "op D has a microbatch index"),
        ("L0.AT.m0.c0.F", "op AT has no chunk index"),
        ("L0.AR.m0.c0.B", "op AR has no microbatch index"),
        ("L0.ST.m0.F", "op ST has no microbatch index"),
        ("L0.ST.B", "op ST has no phase B"),
        ("L0.N.m0.B", "op N has no phase B"),
        ("L0.AR.c0.F", "op AR has no phase F"),
    ],
)
def test_a_name_that_no_task_has_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(f'{name}: {why}')}$"):
        Task.parse(name)


@given(st.text(alphabet="L01.DATRcmFB", max_size=14))
def test_any_text_is_a_task_or_refused(text: str) -> None:
    try:
        task = Task.parse(text)
    except ScheduleError:
        return
    assert Task.parse(str(task)) == task


@pytest.mark.parametrize("op", str)
def test_computing_is_done_alone_and_communicating_is_not(op: str) -> None:
    spec = OPS[op]
    assert (spec.lane is Lane.COMPUTE) == (spec.group == Group.ALONE)


def test_cells_are_short_and_carry_what_the_row_does_not_say() -> None:
    cells = {
        "L3.AT.m1.F": "AT1",
        "L3.D.m1.c0.F": "D1",
        "L3.D.m1.c2.F": "D1.2",
        "L3.ST.F": "ST",
        "L3.AR.c0.B": "AR3.0",
        "L3.XR.c1.B": "XR3.1",
    }
    assert {name: Task.parse(name).cell for name in cells} == cells
