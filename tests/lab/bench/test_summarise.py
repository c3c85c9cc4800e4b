"""From measurements to a result: slowest rank per round, ratios per round, bytes over the busiest uplink."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.lab.bench.compare import Measurements, busiest_device_bytes, busiest_uplink_bytes, summarise
from penstock.lab.bench.contender import Entry, Sample
from penstock.lab.bench.result import HEAD, LEGEND, BenchResult, Spread, render
from penstock.schedule import StepPlan
from penstock.step import StepShape
from penstock.trace import TaskRecord
from tests.steps import planned


def plan(name: str) -> StepPlan:
    return planned(name, StepShape(moe_layers=(True,), pieces={"replicated": (2,)}))


def sample(iteration_s: float) -> Sample:
    return Sample(
        iteration_s=iteration_s,
        busy_s={"compute": 0.5 * iteration_s, "inter": 0.25 * iteration_s},
        exposed_s=0.125 * iteration_s,
        overhead_s=0.01 * iteration_s,
    )


class Idle:
    """A contender of which only the entry is looked at."""

    def prepare(self, number: int) -> None:
        del number

    def step(self, number: int) -> None:
        del number

    def records(self) -> list[TaskRecord]:
        return []

    def close(self) -> None: ...


def entry(name: str, simulated_s: float) -> Entry:
    return Entry(name=name, transport="penstock", contender=Idle(), plan=plan(name), simulated_s=simulated_s)


def result(rate: float | None = 8e6, inside: float | None = None) -> BenchResult:
    iterations = {
        "sequential": [[4.0, 2.0, 4.0], [2.0, 4.0, 3.0]],
        "flowmoe": [[1.0, 2.0, 2.0], [2.0, 1.0, 2.0]],
    }
    promised = {"sequential": 5.0, "flowmoe": 1.6}
    found = Measurements(
        entries=tuple(entry(name, promised[name]) for name in iterations),
        samples={n: [[sample(s) for s in rank] for rank in ranks] for n, ranks in iterations.items()},
        peaks_bytes={name: [1 << 20, 1 << 21] for name in iterations},
        compute_s={"": [[0.5, 1.5, 0.75], [1.0, 1.0, 1.0]]},
        traffic={"": [[{1: 1_000_000}] * 3, [{0: 250_000}] * 3]},
        virtual=None,
    )
    rates = {"inter_rate_bit_per_s": rate, "intra_rate_bit_per_s": inside}
    return summarise(found, nodes=2, devices=1, **rates)


def test_the_slowest_rank_of_a_round_counts_and_ratios_are_per_round() -> None:
    sequential, flowmoe = result().cases
    assert sequential.iterations_s == (4.0, 4.0, 4.0)
    assert flowmoe.iterations_s == (2.0, 2.0, 2.0)
    assert flowmoe.speedup.median == 2.0 and sequential.speedup.median == 1.0
    assert flowmoe.microbatches == 2 and sequential.microbatches == 1


def test_the_limit_is_the_larger_of_wire_and_computation() -> None:
    slow, fast = result(8e6), result(8e9)
    assert (
        slow.limit.wire_s == 1.0 and slow.limit.compute_s == 1.0
    )  # medians of the slower rank: 1.0, 1.5, 1.0
    assert result(4e6).limit.seconds == 2.0 and result(4e6).cases[1].overlap_efficiency == 1.0
    assert fast.limit.seconds == fast.limit.compute_s and fast.cases[1].overlap_efficiency == 0.5
    assert result(None).limit.wire_s is None and result(None).limit.seconds == 1.0


def test_the_error_of_the_simulation_is_relative_to_its_promise() -> None:
    assert result().cases[1].simulation_error == pytest.approx(0.25)


def test_json_has_what_people_look_for() -> None:
    case = result().to_dict()["cases"][1]
    for key in ("schedule", "iteration_s_median", "speedup", "limit_s", "overlap_efficiency", "simulated_s"):
        assert key in case


def test_the_table_is_markdown_with_a_row_for_every_case() -> None:
    lines = render(result()).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4 and len({line.count("|") for line in rows}) == 1
    assert "physical limit 1,000 ms" in lines


@pytest.mark.parametrize("width", [60, 100])
def test_columns_are_explained_in_a_terminal_and_in_the_documentation(width: int) -> None:
    """A document's table stands without: one legend would stand below each of BENCHMARKS.md."""
    text = render(result(), width)
    assert " ".join(LEGEND.split()) in " ".join(text.split()) and LEGEND not in render(result())
    assert max(map(len, text.splitlines())) <= width
    own = replace(result(), cases=(replace(result().cases[0], label="deepspeed (gloo)"),))
    assert "(gloo): without" in render(own, width) and "(gloo)" not in text
    page = (Path(__file__).parents[3] / "docs" / "emulation.md").read_text()
    for column in HEAD:
        name = column.partition(" [")[0]
        assert name == "schedule" or f"`{name}`" in page, name


def test_a_device_s_own_link_carries_what_stays_in_the_node_too() -> None:
    """One link for every device, in either direction: rank 1 receives more than anybody sends."""
    traffic = [{1: 700, 2: 100}, {0: 300}, {1: 500, 3: 100}, {}]
    assert busiest_uplink_bytes(traffic, nodes=2, devices=2) == 500
    assert busiest_device_bytes(traffic) == 1200
    assert busiest_device_bytes([{}, {}]) == 0


def test_the_limit_of_slow_links_inside_is_theirs() -> None:
    slow = result(8e9, inside=2e6)
    assert slow.limit.device_bytes == 1_000_000 and slow.limit.device_s == slow.limit.seconds == 4.0
    assert result(8e9).limit.device_s is None


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.data(),
)
def test_bytes_inside_a_node_do_not_count(nodes: int, devices: int, data: st.DataObject) -> None:
    ranks = range(nodes * devices)
    sizes = {(a, b): data.draw(st.integers(0, 100)) for a in ranks for b in ranks if a != b}
    traffic = [{b: size for (a, b), size in sizes.items() if a == rank} for rank in ranks]
    crossing = [
        (a // devices, b // devices, s) for (a, b), s in sizes.items() if a // devices != b // devices
    ]
    out = [sum(s for a, _, s in crossing if a == node) for node in range(nodes)]
    into = [sum(s for _, b, s in crossing if b == node) for node in range(nodes)]
    assert busiest_uplink_bytes(traffic, nodes, devices) == max(out + into)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9))
def test_the_interval_holds_the_median(values: list[float]) -> None:
    spread = Spread.of(values)
    assert min(values) <= spread.low <= spread.median <= spread.high <= max(values)
    assert Spread.of(values) == spread
