"""The trace file: valid JSON in which Perfetto finds a row per rank and lane."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.mesh import Mesh
from penstock.ops import spec_of
from penstock.simulate import simulate
from penstock.trace import TaskRecord, write_chrome_trace
from tests.steps import example_plan

PLAN = example_plan("flowmoe")
RANKS = 2
RECORDS = simulate(PLAN.schedule, PLAN.graph, lambda _: 0.25, Mesh(world_size=RANKS, ep_size=RANKS)).records()


def events(folder: Path, runs: Mapping[str, Sequence[TaskRecord]]) -> list[dict[str, Any]]:
    path = folder / "made" / "trace.json"
    write_chrome_trace(path, runs)
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def names(found: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    named = [event for event in found if event["ph"] == "M" and event["name"] == what]
    rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    assert len(rows) == len(named)
    return rows


def test_one_process_per_rank_and_one_row_per_lane(tmp_path: Path) -> None:
    found = events(tmp_path, {"simulated": RECORDS})
    ranks = names(found, "process_name")
    lanes = names(found, "thread_name")
    assert list(ranks.values()) == ["simulated rank 0", "simulated rank 1"]
    assert sorted(lanes.values()) == ["compute", "compute", "inter", "inter"]
    assert {process for process, _ in lanes} == {process for process, _ in ranks}


def test_every_record_is_a_bar_on_the_row_of_its_lane_in_microseconds(tmp_path: Path) -> None:
    found = events(tmp_path, {"simulated": RECORDS})
    lanes, ranks = names(found, "thread_name"), names(found, "process_name")
    bars = [event for event in found if event["ph"] == "X"]
    assert len(bars) == len(PLAN.graph.tasks) * RANKS
    for bar, record in zip(bars, RECORDS, strict=True):
        assert bar["name"] == str(record.task)
        assert lanes[bar["pid"], bar["tid"]] == record.lane
        assert ranks[bar["pid"], 0] == f"simulated rank {record.rank}"
        assert (bar["ts"], bar["dur"]) == (record.start_s * 1e6, 250_000.0)
        assert bar["args"] == {"what": spec_of(record.task.op).title, "step": 0}


def test_runs_stand_above_each_other(tmp_path: Path) -> None:
    found = events(tmp_path, {"measured": RECORDS, "simulated": RECORDS})
    order = {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"}
    ranks = {process: name for (process, _), name in names(found, "process_name").items()}
    assert [ranks[process] for process in sorted(order, key=order.__getitem__)] == [
        "measured rank 0",
        "measured rank 1",
        "simulated rank 0",
        "simulated rank 1",
    ]


def test_nothing_ran(tmp_path: Path) -> None:
    assert events(tmp_path, {"measured": []}) == []
