"""Writes Chrome trace JSON, for Perfetto (ui.perfetto.dev) and chrome://tracing: a row per lane and rank.

Arrows lead from dispatch to experts to combine, and backward the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import penstock.features  # noqa: F401  # the ops of features have titles, too
from penstock.graph import Lane
from penstock.ops import spec_of
from penstock.ops.core import journeys
from penstock.timing import TaskRecord
from penstock.writing import write_whole

LANES = list(Lane)
MICROSECONDS = 1e6


def write_chrome_trace(path: Path, runs: Mapping[str, Sequence[TaskRecord]]) -> None:
    """Write runs such as {"measured": ..., "simulated": ...} above each other into one file."""
    events: list[dict[str, Any]] = []
    numbers, by_step = count(1), attrgetter("step", "rank")
    for number, (title, records) in enumerate(runs.items()):
        ranks = sorted({record.rank for record in records})
        process = {rank: number * 100_000 + rank for rank in ranks}
        events += [_meta("process_name", process[rank], 0, name=f"{title} rank {rank}") for rank in ranks]
        events += [_meta("process_sort_index", each, 0, sort_index=each) for each in process.values()]
        for rank, lane in sorted({(record.rank, record.lane) for record in records}):
            events.append(_meta("thread_name", process[rank], LANES.index(lane), name=str(lane)))
        events += [
            {
                "ph": "X",
                "name": str(record.task),
                "cat": str(record.task.op),
                "pid": process[record.rank],
                "tid": LANES.index(record.lane),
                "ts": record.start_s * MICROSECONDS,
                "dur": record.duration_s * MICROSECONDS,
                "args": {"what": spec_of(record.task.op).title, "step": record.step},
            }
            for record in records
        ]
        for (_, rank), step in groupby(sorted(records, key=by_step), key=by_step):
            events += _arrows(list(step), process[rank], numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _meta(what: str, process: int, thread: int, **values: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": values}


def _arrows(step: Sequence[TaskRecord], process: int, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield arrows along the way of rows through one rank's step, from the middle of a bar to the next."""
    by_name = {record.task.name: record for record in step}
    for journey in journeys(record.task for record in step):
        if len(journey) > 1:
            number, last = next(numbers), len(journey) - 1
            for place, task in enumerate(journey):
                phase = {0: "s", last: "f"}.get(place, "t")
                record = by_name[task.name]
                yield {
                    "ph": phase,
                    "bp": "e",
                    "id": number,
                    "name": "rows",
                    "cat": "rows",
                    "pid": process,
                    "tid": LANES.index(record.lane),
                    "ts": (record.start_s + record.duration_s / 2) * MICROSECONDS,
                }
