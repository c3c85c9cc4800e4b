"""The terminal picture of a run: golden pictures, and what must hold for any records."""

import re
import textwrap
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Lane, Phase
from penstock.report import duration_text, render_timeline, timeline
from penstock.report.timeline import IDLE
from penstock.trace import TaskRecord, occupation
from tests.steps import lone_task

PICTURE = """\
iteration, 0 to 80 ms, one column = 1.78 ms
layer    L0                                             busy
compute  AT0━━━━━━━━·····X0━━━━━━━━━━━······AT0━━━━━━━  75 %
inter    ···········D0━━━···········C0━━━━━···········  26 %
ms       └0         └20        └40        └60

compute  AT  attention, router, permute (a dense block: all
             of it)
         X   expert computation
inter    N   exchange of tokens per expert
         D   tokens to their experts
         C   expert outputs back home
inter = network between ranks
A name starts a task, ━ continues it, · is idle. X0 and X0.1
are chunks 0 and 1 of microbatch 0, AR3.0 is piece 0 of
layer 3. Where a name does not fit, its first letter stands
for it; of several tasks in one column the largest is shown.
"""

SPLIT = """\
forward, 0 to 0.85 s, one column = 24.3 ms
layer    L0                                   busy
compute  AT0━━━AT1━━━X0━━━━━━━━━X1━━━━━━━━··  94 %
inter    ······D0━━··D1━━━━━━━··············  35 %
s        └0                  └0.5

backward, 0.85 to 3.2 s, one column = 67.1 ms
layer    L0                                   busy
compute  X1━━━━━━━━X0━━━━━AT1━━━AT0━━━······  83 %
inter    ··········D1━····D0━━━·······AR0.0━  40 %
s          └1             └2             └3
"""


def record(name: str, start_s: float, end_s: float) -> TaskRecord:
    return TaskRecord(lone_task(name), 0, start_s, end_s)


ITERATION = [
    record("L0.AT.m0.F", 0.0, 0.019),
    record("L0.N.m0.F", 0.019, 0.0195),
    record("L0.D.m0.c0.F", 0.0195, 0.028),
    record("L0.X.m0.c0.F", 0.028, 0.051),
    record("L0.C.m0.c0.F", 0.0485, 0.06),
    record("L0.AT.m0.B", 0.062, 0.08),
]


def test_picture_of_one_iteration() -> None:
    assert render_timeline(ITERATION, width=60) == PICTURE


def test_the_picture_in_the_docstring_is_true() -> None:
    records = [
        record("L0.AT.m0.F", 0.0, 0.014),
        record("L0.AT.m1.F", 0.014, 0.028),
        record("L0.D.m0.c0.F", 0.014, 0.025),
        record("L0.D.m1.c0.F", 0.028, 0.039),
        record("L0.X.m0.c0.F", 0.028, 0.049),
        record("L0.X.m1.c0.F", 0.049, 0.07),
        record("L0.C.m0.c0.F", 0.049, 0.06),
    ]
    picture, _, _ = render_timeline(records, width=50).partition("\n\n")
    assert textwrap.indent(picture, "    ") in (timeline.__doc__ or "")


def test_order_of_records_does_not_matter() -> None:
    assert render_timeline(ITERATION[::-1], width=60) == PICTURE


def test_forward_and_backward_are_drawn_apart_when_names_would_not_fit() -> None:
    records = [
        record("L0.AT.m0.F", 0.0, 0.15),
        record("L0.AT.m1.F", 0.15, 0.3),
        record("L0.D.m0.c0.F", 0.15, 0.25),
        record("L0.D.m1.c0.F", 0.3, 0.5),
        record("L0.X.m0.c0.F", 0.3, 0.55),
        record("L0.X.m1.c0.F", 0.55, 0.8),
        record("L0.X.m1.c0.B", 0.85, 1.5),
        record("L0.X.m0.c0.B", 1.5, 2.0),
        record("L0.D.m1.c0.B", 1.5, 1.75),
        record("L0.D.m0.c0.B", 2.0, 2.3),
        record("L0.AT.m1.B", 2.0, 2.4),
        record("L0.AT.m0.B", 2.4, 2.8),
        record("L0.AR.p0.B", 2.8, 3.2),
    ]
    assert render_timeline(records, width=50).startswith(SPLIT + "\n")
    assert render_timeline(records, width=100).startswith("iteration, 0 to 3.2 s")


def inter_row(records: list[TaskRecord]) -> str:
    """The picture of lane `inter`, 35 columns wide, and its percentage."""
    lines = render_timeline(records, width=50).splitlines()
    return next(line for line in lines if line.startswith("inter")).removeprefix("inter    ")


def test_a_crowded_column_shows_the_op_with_most_seconds() -> None:
    crowd = [record(f"L0.D.m{i}.c0.F", i * 0.001, i * 0.001 + 0.001) for i in range(3)]
    combine = record("L0.C.m0.c0.F", 0.003, 0.008)
    iteration = record("L0.AT.m0.F", 0.0, 0.28)
    assert inter_row([*crowd, combine, iteration]) == f"C{IDLE * 34}   3 %"
    combine = record("L0.C.m0.c0.F", 0.003, 0.0055)
    assert inter_row([*crowd, combine, iteration]) == f"D{IDLE * 34}   2 %"


def test_a_column_that_is_mostly_idle_is_idle_but_counts_as_busy() -> None:
    records = [record("L0.AT.m0.F", 0.0, 0.1), record("L0.N.m0.F", 0.05, 0.051)]
    assert inter_row(records) == f"{IDLE * 35}   1 %"


def test_records_of_several_ranks_or_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="pick one"):
        render_timeline([*ITERATION, replace(ITERATION[0], rank=1)])
    with pytest.raises(ValueError, match="pick one"):
        render_timeline([*ITERATION, replace(ITERATION[0], step=1)])


def test_no_records_and_no_room() -> None:
    assert render_timeline([]) == "nothing ran\n"
    with pytest.raises(ValueError, match="width of 50"):
        render_timeline(ITERATION, width=49)


def test_tasks_without_duration_are_drawn_too() -> None:
    assert "compute" in render_timeline([record("L0.AT.m0.F", 0.0, 0.0)])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (-1e-17, "0 ms"),
        (3e-6, "0.003 ms"),
        (0.00123, "1.23 ms"),
        (0.1, "100 ms"),
        (1.814, "1.81 s"),
        (500, "500 s"),
    ],
)
def test_duration_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


NAMES = {
    Lane.COMPUTE: ("EM.m{m}", "AT.m{m}", "X.m{m}.c{c}", "U.m{m}", "HD.m{m}"),
    Lane.INTER: ("D.m{m}.c{c}", "C.m{m}.c{c}"),
}


@st.composite
def runs(draw: st.DrawFn) -> list[TaskRecord]:
    """Any lanes of tasks one after another, forward then backward, with gaps."""
    records: list[TaskRecord] = []
    for lane in draw(st.sets(st.sampled_from(list(NAMES)), min_size=1)):
        names = draw(st.lists(st.sampled_from(NAMES[lane]), min_size=1, max_size=60))
        clock_s = draw(st.floats(0, 2))
        for number, name in enumerate(names):
            phase = Phase.FORWARD if 2 * number < len(names) else Phase.BACKWARD
            task = lone_task(f"L{number}.{name.format(m=number % 3, c=number % 2)}.{phase}")
            start_s = clock_s + draw(st.sampled_from((0.0, 0.0, 0.001, 0.3)))
            clock_s = start_s + draw(st.floats(1e-6, 0.5))
            records.append(TaskRecord(task, 0, start_s, clock_s))
    return records


@given(runs(), st.integers(50, 160))
def test_a_picture_is_never_too_wide_and_has_every_lane(records: list[TaskRecord], width: int) -> None:
    lines = render_timeline(records, width=width).splitlines()
    assert max(map(len, lines)) <= width
    pictures = sum("one column = " in line for line in lines)
    for lane in {record.lane for record in records}:
        rows = [line for line in lines if re.match(rf"{lane} .*%$", line)]
        assert len(rows) == pictures
        assert {len(row) for row in rows} == {width}


@given(runs())
def test_busy_percentages_are_those_of_the_occupation(records: list[TaskRecord]) -> None:
    lines = render_timeline(records, width=50 + 5 * len(records)).splitlines()
    whole = [line for line in lines if line.startswith("iteration")]
    assert whole, "there is room for every name"
    used = occupation(records)
    for lane, seconds in ((Lane.COMPUTE, used.compute_s), (Lane.INTER, used.communication_s)):
        for row in lines:
            if match := re.match(rf"{lane} .* (\d+) %$", row):
                assert abs(float(match[1]) - 100 * seconds / used.iteration_s) <= 0.51


def test_lanes_are_named_and_tasks_that_are_too_short_are_said_not_to_be_drawn() -> None:
    inside = TaskRecord(replace(lone_task("L0.SD.m0.c0.F"), lane=Lane.INTRA), 0, 0.001, 0.0011)
    text = " ".join(render_timeline([*ITERATION, inside], width=60).split())
    assert "inter = network between nodes, intra = links inside a node" in text
    assert text.endswith("Tasks shorter than half a column are not drawn.")
    assert "not drawn" not in render_timeline(ITERATION, width=60)
