"""Names and tasks: the text form is one to one, nothing else is read as a name, and all facts count."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Cut, Lane, Name, Phase, ScheduleError, Task
from penstock.mesh import Group
from penstock.ops import OPS, Op, spec_of
from tests.steps import lone_task

TASK = Task(
    Name(2, Op.DISPATCH, Phase.FORWARD, 0, 1),
    Lane.INTER,
    Group.EXPERT,
    {"rows": (Name.parse("L2.AT.m0.F"),), "route": (Name.parse("L2.N.m0.F"),)},
    Cut(slices=2, first=1, stop=2),
)


@st.composite
def names(draw: st.DrawFn, limit: int = 1000) -> Name:
    """Names with any indices, of our ops and of others."""
    op = draw(st.sampled_from([*OPS, "Q", "RMS2", "X1Y"]))
    number = st.integers(0, limit)
    indices = [draw(st.none() | number) for _ in range(3)]
    return Name(draw(number), op, draw(st.sampled_from(Phase)), *indices)


@given(names())
def test_text_round_trips(name: Name) -> None:
    assert Name.parse(str(name)) == name


@given(names(limit=1), names(limit=1))
def test_equal_text_means_equal_name(first: Name, second: Name) -> None:
    assert (str(first) == str(second)) == (first == second)


def test_text_form() -> None:
    assert str(Name(2, Op.DISPATCH, Phase.FORWARD, 0, 1)) == "L2.D.m0.c1.F"
    assert str(Name(0, Op.ALL_REDUCE, Phase.BACKWARD, piece=3)) == "L0.AR.p3.B"
    assert str(Name(5, Op.STATISTICS, Phase.FORWARD)) == "L5.ST.F"
    assert str(Name(1, Op.EXPERTS, Phase.WEIGHT, 2, 0, 4)) == "L1.X.m2.c0.p4.W"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "L0",
        "L0.AT.m0",
        "l0.AT.m0.F",
        "L-1.AT.m0.F",
        "L00.AT.m0.F",
        "L0.AT.m٣.F",
        "L0.at.m0.F",
        "L0.2X.m0.F",
        "L0.AT.m0.G",
        "L0.D.c0.m0.F",
        "L0.AR.p0.c0.B",
        "L0.D.m.c0.F",
        "L0.AT.m1000000000.F",
        " L0.AT.m0.F",
        "L0.AT.m0.F\n",
        "L0.AT.m0.F.F",
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(repr(text))):
        Name.parse(text)


def test_an_op_that_nobody_registered_can_be_named_but_means_nothing() -> None:
    name = Name.parse("L0.ZZ.m0.F")
    with pytest.raises(ScheduleError, match="no op is called ZZ"):
        spec_of(name.op)


@given(st.text(alphabet="L01.DATRcmpFB", max_size=14))
def test_any_text_is_a_name_or_refused(text: str) -> None:
    try:
        name = Name.parse(text)
    except ScheduleError:
        return
    assert str(name) == text


def test_a_task_tells_what_its_name_says() -> None:
    assert (TASK.layer, TASK.op, TASK.phase) == (2, "D", Phase.FORWARD)
    assert (TASK.microbatch, TASK.chunk, TASK.piece) == (0, 1, None)
    assert str(TASK) == str(TASK.name) == "L2.D.m0.c1.F"
    assert TASK.meets and TASK.forward
    assert TASK.text == "L2.D.m0.c1.F inter ep rows=L2.AT.m0.F route=L2.N.m0.F"
    assert list(TASK.cut.held) == [1]


def test_the_text_of_a_task_that_meets_nobody_and_reads_several() -> None:
    read = {"loss": (Name.parse("L0.HD.m0.F"), Name.parse("L0.HD.m1.F")), "routers": ()}
    task = Task(Name.parse("L0.ST.F"), Lane.HOST, (), read)
    assert task.text == "L0.ST.F host - loss=L0.HD.m0.F,L0.HD.m1.F routers="
    assert not task.meets


def test_equal_tasks_are_equal_in_every_fact() -> None:
    same = replace(TASK, inputs=dict(TASK.inputs))
    assert (TASK, hash(TASK)) == (same, hash(same))
    others = [
        replace(TASK, name=TASK.name.back),
        replace(TASK, lane=Lane.INTRA),
        replace(TASK, axes=Group.RAIL),
        replace(TASK, inputs={}),
        replace(TASK, cut=Cut()),
        replace(TASK, accumulates=("gradients",)),
        replace(TASK, reads=("gradients",)),
        replace(TASK, writes=("gradients",)),
    ]
    assert [other for other in others if other == TASK] == []


def test_sources_stand_once_in_the_order_of_roles() -> None:
    attention, counts = Name.parse("L0.AT.m0.F"), Name.parse("L0.N.m0.F")
    read = {"rows": (counts,), "residual": (attention,), "weights": (attention, counts)}
    assert list(Task(Name.parse("L0.U.m0.F"), Lane.COMPUTE, (), read).sources()) == [counts, attention]


def test_cells_are_short_and_carry_what_the_row_does_not_say() -> None:
    cells = {
        "L3.AT.m1.F": "AT1",
        "L3.D.m1.c0.F": "D1",
        "L3.D.m1.c2.F": "D1.2",
        "L3.X.m1.c2.I": "X1.2",
        "L3.X.m1.c2.W": "W1.2",
        "L3.ST.F": "ST",
        "L3.AR.p0.B": "AR3.0",
        "L3.XR.p1.B": "XR3.1",
    }
    assert {name: lone_task(name).cell for name in cells} == cells


SENT = Task(
    Name(1, "X", Phase.FORWARD, 0, 1), Lane.COMPUTE, (), {"rows": (Name(1, "D", Phase.FORWARD, 0, 1),)}
)
SENDER = """
import pickle, sys
from penstock.graph import Lane, Name, Phase, Task
read = {"rows": (Name(1, "D", Phase.FORWARD, 0, 1),)}
pickle.dump(Task(Name(1, "X", Phase.FORWARD, 0, 1), Lane.COMPUTE, (), read), sys.stdout.buffer)
"""


def test_a_task_from_another_process_is_the_same_task() -> None:
    """Ranks send each other records of tasks, and texts have another hash in every process."""
    environ = {**os.environ, "PYTHONHASHSEED": "12345"}
    sent = subprocess.run([sys.executable, "-c", SENDER], capture_output=True, check=True, env=environ)
    assert {SENT: "found"}[pickle.loads(sent.stdout)] == "found"
