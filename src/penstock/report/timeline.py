"""A run of one rank as a terminal picture: lanes as rows, seconds to the right, columns of equal time.

    iteration, 0 to 70 ms, one column = 2 ms
    layer    L0                                   busy
    compute  AT0━━━━AT1━━━━X0━━━━━━━━━X1━━━━━━━━ 100 %
    inter    ·······D0━━━━·D1━━━━····C0━━━━·····  47 %
    ms       └0        └20       └40       └60

A name starts a task and the line after it lasts as long as the task. A column shows one task: the op with
the most seconds in it, or idle if less than half of it was busy.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.graph import Lane, Phase, Task
from penstock.ops import OPS
from penstock.timing import TaskRecord

LABEL_WIDTH = 9
BUSY_WIDTH = 6
MIN_WIDTH = 50
IDLE = "·"
FILL = "━"
TICK = "└"

COLUMNS_PER_TASK = 5
"""Columns that a task's name needs; with fewer on average, forward and backward get a picture each."""

COLUMNS_PER_TICK = 10


def render_timeline(records: Sequence[TaskRecord], *, width: int = 100) -> str:
    """Return a picture of one rank in one step, simulated or measured, with a legend, `width` at most."""
    if width < MIN_WIDTH:
        raise ValueError(f"a timeline needs a width of {MIN_WIDTH} or more, not {width}")
    if len(runs := {(record.step, record.rank) for record in records}) > 1:
        raise ValueError(f"a timeline shows one rank in one step; these records mix {len(runs)}, pick one")
    if not records:
        return "nothing ran\n"
    columns = width - LABEL_WIDTH - BUSY_WIDTH
    lanes, windows = _by_lane(records), _windows(records, columns)
    pictures = [_picture(window, lanes) for window in windows]
    hidden = any(_is_hidden(window, tasks) for window in windows for tasks in lanes.values())
    return "\n\n".join([*pictures, _legend(records, width, hidden=hidden)]) + "\n"


def duration_text(seconds: float) -> str:
    """Return a duration for people: three digits, in seconds or milliseconds."""
    unit, unit_s = _unit(seconds)
    seconds = max(0.0, seconds)  # a difference of two sums may be a rounding error below zero
    return f"{_three_digits(seconds / unit_s)} {unit}"


def _unit(seconds: float) -> tuple[str, float]:
    """Return the name and the seconds of the unit in which a duration is given."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e-3)


def _three_digits(value: float) -> str:
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(digits, 3)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _by_lane(records: Sequence[TaskRecord]) -> dict[Lane, list[TaskRecord]]:
    """Return the records of every lane that occurs, lanes in their own order, records by time."""
    by_time = sorted(records, key=lambda record: (record.start_s, record.end_s))
    by_lane = {lane: [record for record in by_time if record.lane is lane] for lane in Lane}
    return {lane: lane_records for lane, lane_records in by_lane.items() if lane_records}


# ---- windows: what a picture spans -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Window:
    """A stretch of seconds divided into columns. unit: the name and the seconds of the axis's unit."""

    title: str
    start_s: float
    end_s: float
    columns: int
    unit: tuple[str, float]

    @property
    def column_s(self) -> float:
        return (self.end_s - self.start_s) / self.columns

    def column(self, time_s: float) -> int:
        """Return the column of a moment, clipped to the window."""
        return min(self.columns - 1, max(0, int((time_s - self.start_s) / self.column_s)))

    def overlap_s(self, record: TaskRecord, column: int | None = None) -> float:
        """Return the seconds of a task inside one column, or inside the whole window."""
        start_s, end_s = self.start_s, self.end_s
        if column is not None:
            start_s = self.start_s + column * self.column_s
            end_s = start_s + self.column_s
        return max(0.0, min(end_s, record.end_s) - max(start_s, record.start_s))


def _windows(records: Sequence[TaskRecord], columns: int) -> list[_Window]:
    """Return the whole iteration, or forward and backward separately where names would not fit otherwise."""
    start_s = min(record.start_s for record in records)
    # An iteration of no length at all still needs columns to divide by.
    end_s = max(start_s + 1e-9, *(record.end_s for record in records))
    unit = _unit(end_s)
    cut_s = min((r.start_s for r in records if not r.task.forward), default=start_s)
    most = max(len(lane_records) for lane_records in _by_lane(records).values())
    if most * COLUMNS_PER_TASK <= columns or not start_s < cut_s < end_s:
        spans = [("iteration", start_s, end_s)]
    else:
        spans = [("forward", start_s, cut_s), ("backward", cut_s, end_s)]
    return [_Window(title=t, start_s=a, end_s=b, columns=columns, unit=unit) for t, a, b in spans]


# ---- rows --------------------------------------------------------------------------------------------------


def _picture(window: _Window, lanes: Mapping[Lane, Sequence[TaskRecord]]) -> str:
    shown = {lane: _shown(window, lane_records) for lane, lane_records in lanes.items()}
    name, unit_s = window.unit
    begin, end = (_three_digits(time_s / unit_s) for time_s in (window.start_s, window.end_s))
    title = f"{window.title}, {begin} to {end} {name}, one column = {duration_text(window.column_s)}"
    layers = _layer_row(shown.get(Lane.COMPUTE, []))
    rows = [_row("layer", f"{layers:<{window.columns}}", "  busy")]
    for lane, tasks in shown.items():
        share = sum(window.overlap_s(record) for record in lanes[lane]) / (window.end_s - window.start_s)
        rows.append(
            _row(
                lane,
                "".join(_run(task, sum(1 for _ in columns)) for task, columns in groupby(tasks)),
                f"{100 * share:4.0f} %",
            )
        )
    return "\n".join([title, *rows, _row(window.unit[0], _axis(window), "")])


def _row(label: str, picture: str, busy: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{picture}{busy}".rstrip()


def _shown(window: _Window, records: Sequence[TaskRecord]) -> list[Task | None]:
    """Return, for every column of a lane, the task that is drawn there."""
    shares: list[dict[Task, float]] = [{} for _ in range(window.columns)]
    for record in records:
        for column in range(window.column(record.start_s), window.column(record.end_s) + 1):
            if (overlap_s := window.overlap_s(record, column)) > 0:
                shares[column][record.task] = overlap_s
    return [_majority(share, window.column_s) for share in shares]


def _is_hidden(window: _Window, records: Sequence[TaskRecord]) -> bool:
    """Return whether a lane is busy and drawn wholly idle."""
    busy = any(window.overlap_s(record) > 0 for record in records)
    return busy and not any(_shown(window, records))


def _majority(share: Mapping[Task, float], column_s: float) -> Task | None:
    """Return the longest task of the symbol with the most seconds; None if most of the column was idle."""
    if 2 * sum(share.values()) < column_s:
        return None
    by_symbol: dict[str, float] = defaultdict(float)
    for task, seconds in share.items():
        by_symbol[task.symbol] += seconds
    symbol = max(by_symbol, key=lambda each: by_symbol[each])
    return max((task for task in share if task.symbol == symbol), key=lambda task: share[task])


def _run(task: Task | None, columns: int) -> str:
    """Return a task as its longest fitting name, then a line; an op's first letter is unique on its lane."""
    if task is None:
        return IDLE * columns
    names = (task.cell, task.symbol, task.symbol[0])
    return next(name for name in names if len(name) <= columns).ljust(columns, FILL)


def _layer_row(compute: Sequence[Task | None]) -> str:
    """Return which block is computed, written where it changes and there is room."""
    row, written = "", -1
    for column, task in enumerate(compute):
        if task is None or task.layer == written:
            continue
        label = f"L{task.layer} "
        if column >= len(row) and column + len(label) <= len(compute):
            row, written = f"{row:<{column}}{label}", task.layer
    return row


def _axis(window: _Window) -> str:
    """Return ticks at round times. A label may reach under the percentages but not beyond them."""
    unit_s = window.unit[1]
    value = window.column_s / unit_s * COLUMNS_PER_TICK
    power = 10.0 ** math.floor(math.log10(value))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))
    row, tick = "", math.ceil(window.start_s / unit_s / step - 1e-9)
    while (position := (tick * step * unit_s - window.start_s) / window.column_s) < window.columns:
        text = f"{TICK}{tick * step:.12g}"
        if int(position) >= len(row) and int(position) + len(text) <= window.columns + BUSY_WIDTH:
            row = f"{row:<{int(position)}}{text}"
        tick += 1
    return row


# ---- legend ------------------------------------------------------------------------------------------------


def _legend(records: Sequence[TaskRecord], width: int, *, hidden: bool) -> str:
    """Return the meaning of names: the ops that occur, lane by lane, and how to read an index.

    hidden: a lane has tasks, and all are too short to be drawn.
    """
    ops = {(record.task.op, record.lane) for record in records}
    lines = []
    for lane in Lane:
        on_lane = [op for op in OPS if (op, lane) in ops]
        for op in on_lane:
            label = lane if op == on_lane[0] else ""
            lines.append(f"{label:<{LABEL_WIDTH}}{op:<3} {OPS[op].title}")
        if lane.computes and any(record.task.phase is Phase.RECOMPUTE for record in records):
            lines.append(f"{'':<{LABEL_WIDTH}}x   in lower case: recomputed, before its backward")
        if lane.computes and any(record.task.phase is Phase.WEIGHT for record in records):
            lines.append(f"{'':<{LABEL_WIDTH}}W   weight gradients of experts (separate tasks)")
    reading = (
        f"A name starts a task, {FILL} continues it, {IDLE} is idle. X0 and X0.1 are chunks 0 and 1 of "
        "microbatch 0, AR3.0 is piece 0 of layer 3. Where a name does not fit, its first letter stands for "
        "it; of several tasks in one column the largest is shown."
    )
    reading += " Tasks shorter than half a column are not drawn." if hidden else ""
    lanes = {record.lane for record in records}
    nodes = any(lane.is_inside for lane in lanes)
    meanings = {
        Lane.INTER: "network between nodes" if nodes else "network between ranks",
        Lane.INTRA: "links inside a node",
        Lane.HOST: "a CPU thread",
    }
    if explained := [f"{lane} = {meaning}" for lane, meaning in meanings.items() if lane in lanes]:
        lines.append(", ".join(explained))
    indent = " " * (LABEL_WIDTH + 4)
    wrapped = [textwrap.fill(line, width, subsequent_indent=indent) for line in lines]
    return "\n".join([*wrapped, textwrap.fill(reading, width)])
