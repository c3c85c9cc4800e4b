"""The trace file: valid JSON in which Perfetto finds a row per rank and lane."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Name, Phase
from penstock.mesh import Mesh
from penstock.ops import spec_of
from penstock.step import Sharing, StepShape
from penstock.timing import simulate
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


SHAPES = {
    "flat, chunks of other sizes backward": StepShape(
        moe_layers=(True, False, True), microbatches=2, chunks=2, degree_backward=3
    ),
    "legs inside nodes, weights apart": StepShape(
        moe_layers=(True,), dispatch=DISPATCHES["hierarchical_2d"].hops, split_experts=True
    ),
    "shards of experts": StepShape(moe_layers=(True,), sharing=Sharing(tp_size=2, etp_size=2)),
    "samples that move": StepShape(moe_layers=(True, True), moves_samples=True, carries_residual=True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_arrows_follow_rows_from_bar_to_bar(tmp_path: Path, shape: StepShape) -> None:
    graph = build_graph(shape)
    records = [
        TaskRecord(task, rank, rank + place, rank + place + 0.25, step)
        for step in (1, 2)
        for rank in range(RANKS)
        for place, task in enumerate(graph.tasks, start=1000 * step)
    ]
    found = events(tmp_path, {"measured": records, "simulated": records})
    bars = [event for event in found if event["ph"] == "X"]
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in found:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
    met = set()
    for points in arrows.values():
        assert [point["ph"] for point in points] == ["s", *"t" * (len(points) - 2), "f"]
        assert all(point["bp"] == "e" for point in points)
        assert [point["ts"] for point in points] == sorted(point["ts"] for point in points)
        passed = [_bar_around(point, bars) for point in points]
        assert len({(bar["pid"], bar["args"]["step"], bar["name"].split(".")[0]) for bar in passed}) == 1
        names = [Name.parse(bar["name"]) for bar in passed]
        ops = [name.op for name in names]
        out, home = ops[: ops.index("X")], ops[ops.index("X") + 1 :]
        first, last = ("D", "C") if names[0].phase is Phase.FORWARD else ("C", "D")
        assert first in out and last in home, ops
        met |= {(bar["pid"], bar["args"]["step"], bar["name"]) for bar in passed}
    experts = {
        (bar["pid"], bar["args"]["step"], bar["name"]) for bar in bars if bar["cat"] in ("D", "X", "C")
    }
    weights = {each for each in experts if each[2].endswith("W")}
    assert met >= experts - weights, "every dispatch, computation of experts and combine has an arrow"


def _bar_around(point: Mapping[str, Any], bars: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The one bar in whose row and time a point lies."""
    (bar,) = (
        bar
        for bar in bars
        if (bar["pid"], bar["tid"]) == (point["pid"], point["tid"])
        and bar["ts"] < point["ts"] < bar["ts"] + bar["dur"]
    )
    return bar
