"""Chrome trace JSON, opened by Perfetto (ui.perfetto.dev) and chrome://tracing: a row per lane and rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.graph import Lane
from penstock.ops import spec_of
from penstock.trace.records import TaskRecord

LANES = list(Lane)
MICROSECONDS = 1e6


def write_chrome_trace(path: Path, runs: Mapping[str, Sequence[TaskRecord]]) -> None:
    """Write runs such as {"measured": ..., "simulated": ...} above each other into one file."""
    events: list[dict[str, Any]] = []
    for number, (title, records) in enumerate(runs.items()):
        events += _run_events(title, number, records)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=None))


def _run_events(title: str, run: int, records: Iterable[TaskRecord]) -> list[dict[str, Any]]:
    records = list(records)
    ranks = sorted({record.rank for record in records})
    process = {rank: run * 100_000 + rank for rank in ranks}
    events = [_named("process_name", process[rank], 0, f"{title} rank {rank}") for rank in ranks]
    events += [
        {
            "ph": "M",
            "name": "process_sort_index",
            "pid": process[rank],
            "tid": 0,
            "args": {"sort_index": process[rank]},
        }
        for rank in ranks
    ]
    for rank, lane in sorted({(record.rank, record.lane) for record in records}):
        events.append(_named("thread_name", process[rank], LANES.index(lane), str(lane)))
    return events + [_event(record, process[record.rank]) for record in records]


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(record: TaskRecord, process: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": str(record.task),
        "cat": str(record.task.op),
        "pid": process,
        "tid": LANES.index(record.lane),
        "ts": record.start_s * MICROSECONDS,
        "dur": record.duration_s * MICROSECONDS,
        "args": {"what": spec_of(record.task.op).title, "step": record.step},
    }
