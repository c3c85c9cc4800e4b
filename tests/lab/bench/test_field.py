"""Comparisons on real ranks: who takes part, that all ranks agree, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.config import ConfigError
from penstock.decision import ScheduleConfig
from penstock.lab.bench.compare import Measurements, compare, summarise
from penstock.lab.bench.config import BenchConfig, CompareConfig, variants
from penstock.lab.bench.contender import Entry, Sample
from penstock.lab.bench.field import (
    Field,
    RealField,
    fastest,
    planned_field,
    predicted,
    profiled_for,
    schedules_field,
)
from penstock.lab.bench.result import BenchResult, render
from penstock.lab.bench.scheduled import Stacks
from penstock.lab.bench.virtual_field import VirtualField
from penstock.lab.virtual import VirtualConfig
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.runtime.clip import follow_torch
from penstock.topology import Layout, ParallelConfig
from tests.support.ranks import Pools

pytestmark = pytest.mark.slow

ALL = ("flowmoe", "sequential", "penstock", "moe_pipeline")
"""Not in the order of the catalogue."""

ROUNDS = 2
SHAPE = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=8, vocab_size=32)
ZIPF = VirtualConfig(routing="zipf", zipf_exponent=1.5)


def config_of(
    world_size: int = 2, *, schedules: tuple[str, ...] = ALL, tune: bool = False, **moe: Any
) -> BenchConfig:
    sizes: dict[str, Any] = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 16, "capacity_factor": 1.25}
    return BenchConfig(
        model=SHAPE,
        moe=MoEConfig(**(sizes | moe)),
        schedule=ScheduleConfig(microbatches=2, all_reduce_chunk_bytes=2048),
        parallel=ParallelConfig(processes=world_size, timeout_s=60),
        compare=CompareConfig(schedules=schedules, rounds=ROUNDS, warmup=1, tune=tune, profile_s=0.1),
        virtual=ZIPF,
    )


def ranks_of(config: BenchConfig) -> int:
    assert config.parallel.processes is not None
    return config.parallel.processes


def layout_of(rank: int, config: BenchConfig) -> Layout:
    return Layout.build(config.parallel, ranks_of(config), rank, config.moe.num_experts)


def field_of(rank: int, config: BenchConfig, virtual: bool) -> Field:
    layout = layout_of(rank, config)
    return VirtualField(config, layout) if virtual else schedules_field(config, layout)


@dataclass(frozen=True)
class Compared:
    """What one rank knows of a comparison; contenders themselves cannot be sent. orders: text by label."""

    labels: list[str]
    orders: dict[str, str]
    simulated_s: list[float | None]
    samples: Mapping[str, list[list[Sample]]]
    peaks_bytes: Mapping[str, list[int]]
    compute_s: Mapping[str, list[list[float]]]
    traffic: Mapping[str, list[list[Mapping[int, int]]]]
    result: BenchResult


def run_comparison(rank: int, config: BenchConfig, virtual: bool) -> Compared:
    """Compare in a process that scheduled a model of transformers before, so torch's clipping meets ranks."""
    follow_torch()
    field = field_of(rank, config, virtual)
    found: Measurements = compare(field, config.compare)
    field.close()
    nodes = ranks_of(config) // 2
    return Compared(
        labels=[entry.label for entry in found.entries],
        orders={entry.label: order_text(entry) for entry in found.entries},
        simulated_s=[entry.simulated_s for entry in found.entries],
        samples=found.samples,
        peaks_bytes=found.peaks_bytes,
        compute_s=found.compute_s,
        traffic=found.traffic,
        result=summarise(found, nodes=nodes, devices=2, inter_rate_bit_per_s=None),
    )


def order_text(entry: Entry) -> str:
    assert entry.plan is not None
    entry.plan.schedule.check(entry.plan.graph)
    return entry.plan.schedule.text()


@pytest.fixture(scope="module")
def real(ranks: Pools) -> list[Compared]:
    found: list[Compared] = ranks(2).run(run_comparison, config_of(), False)
    return found


@pytest.fixture(scope="module")
def virtual(ranks: Pools) -> list[Compared]:
    """Dropless, so that uneven routing is seen in sizes, too."""
    found: list[Compared] = ranks(4).run(run_comparison, config_of(4, capacity_factor=None), True)
    return found


# ---- both fields -------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["real", "virtual"])
def test_schedules_take_turns_in_the_order_asked_for(kind: str, request: pytest.FixtureRequest) -> None:
    for found in request.getfixturevalue(kind):
        assert found.labels == list(ALL)
        assert [found.orders[name].splitlines()[0] for name in ALL] == [f"schedule {name}" for name in ALL]
        assert all(seconds is not None and seconds > 0 for seconds in found.simulated_s)


@pytest.mark.parametrize("kind", ["real", "virtual"])
def test_all_ranks_know_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    first, *others = request.getfixturevalue(kind)
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", ["real", "virtual"])
def test_every_rank_and_round_has_its_sample(kind: str, request: pytest.FixtureRequest) -> None:
    found, *others = request.getfixturevalue(kind)
    world_size = 1 + len(others)
    assert found.samples.keys() == found.peaks_bytes.keys() == set(ALL)
    for name in ALL:
        assert [len(rank) for rank in found.samples[name]] == [ROUNDS] * world_size
        assert len(found.peaks_bytes[name]) == world_size
        for sample in (sample for rank in found.samples[name] for sample in rank):
            assert set(sample.busy_s) == {"compute", "inter"}
            assert sample.exposed_s is not None and sample.overhead_s is not None
            assert 0 <= sample.exposed_s < sample.iteration_s
    assert found.compute_s.keys() == found.traffic.keys() == {""}
    assert [len(rank) for rank in found.compute_s[""]] == [ROUNDS] * world_size
    assert [len(rank) for rank in found.traffic[""]] == [ROUNDS] * world_size
    assert all(seconds > 0 for rank in found.compute_s[""] for seconds in rank)


def test_a_step_sends_the_same_bytes_every_time(real: list[Compared]) -> None:
    for rank, rounds in enumerate(real[0].traffic[""]):
        assert set(rounds[0]) == {1 - rank} and rounds[0][1 - rank] > 0
        assert all(sent == rounds[0] for sent in rounds)


def test_iterations_end_with_an_update_whole_or_in_shares(ranks: Pools) -> None:
    """Each kind of update has a limit of its own; the prediction is of the whole iteration."""
    names = ("sequential", "sequential+zero1", "flowmoe+zero2")
    first, second = ranks(2).run(run_comparison, config_of(schedules=names), False)
    assert first == second
    assert first.labels == list(names)
    assert list(first.compute_s) == ["", "+zero1", "+zero2"]
    assert all(seconds is not None and seconds > 0 for seconds in first.simulated_s)
    whole, shares, _ = first.result.cases
    assert whole.limit.device_bytes > 0 and shares.limit != whole.limit
    assert "clipping, update" in render(first.result)


# ---- virtual devices ---------------------------------------------------------------------------------------


def test_virtual_devices_are_marked_everywhere(virtual: list[Compared]) -> None:
    result = virtual[0].result
    assert result.virtual == "virtual devices, zipf routing (exponent 1.5)"
    assert result.to_dict()["virtual"] is True and result.to_dict()["virtual_devices"] == result.virtual
    assert "4 ranks on 2 nodes: virtual devices, zipf routing" in render(result)


def needed_bytes(rank: int, config: BenchConfig) -> int:
    field = field_of(rank, config, True)
    assert isinstance(field, VirtualField)
    field.close()
    return field._memory_bytes["sequential"]


def test_the_memory_of_a_device_is_that_of_its_rows(ranks: Pools) -> None:
    """Zipf's routing sends most rows to the first expert: its device needs more than with even routing."""
    uneven = config_of(4, capacity_factor=None, schedules=("sequential",))
    even = replace(uneven, virtual=VirtualConfig(routing="even"))
    (found, *others), (usual, *_) = (ranks(4).run(needed_bytes, each) for each in (uneven, even))
    assert found > usual and others == [found] * 3


def test_real_devices_are_not(real: list[Compared]) -> None:
    result = real[0].result
    assert result.virtual is None and result.to_dict()["virtual"] is False
    assert "virtual" not in render(result)


# ---- ranks that share attention and experts ----------------------------------------------------------------

FORMS = ("baseline_esp", "parm_s1", "parm_s2", "fsmoe", "auto")


LABELS = ["Plan", "Time", "Limit", "Next", "What if"]
"""Of the lines that explain a plan."""


def label_of(line: str) -> str:
    return line.split("  ", maxsplit=1)[0]


def explains(notes: tuple[str, ...]) -> bool:
    """Whether these say why a plan was chosen, and beyond that only what a profile could not tell: which
    doubts it has depends on what else the machine did."""
    found = [label_of(line) for line in notes]
    return found[:5] == LABELS and not set(found[5:]) & set(LABELS)


def sharing_config() -> BenchConfig:
    config = config_of(4, schedules=FORMS)
    shared = replace(config.parallel, tp_size=2, etp_size=2, ranks_per_node=2, ep_size=2)
    return replace(config, parallel=shared, compare=replace(config.compare, profile_s=0.1))


@pytest.mark.parametrize("asleep", [pytest.param(False, marks=pytest.mark.soak), True])
def test_every_form_has_a_limit_of_its_own(ranks: Pools, asleep: bool) -> None:
    first, *others = ranks(4).run(run_comparison, sharing_config(), asleep)
    assert all(other == first for other in others)
    assert list(first.compute_s) == list(first.traffic) == ["baseline", "s1", "s2", "gather"]
    result = first.result
    assert result.layout == "dp 2 x tp 2, edp 1 x ep 2 x etp 2"
    assert result.layout in render(result) and "limit ms" in render(result)
    baseline, s1, s2, gather, auto = (case.limit for case in result.cases)
    assert result.limit == baseline and auto in (baseline, s1, s2, gather)
    assert explains(result.notes)
    assert baseline.wire_bytes > max(s1.wire_bytes, s2.wire_bytes) > gather.wire_bytes > 0
    assert min(limit.device_bytes for limit in (baseline, s1, s2, gather)) > 0
    if asleep:  # every rank of a pair computes all of its rows; others each their share
        assert baseline.compute_s > s1.compute_s


# ---- the plan that is searched for -------------------------------------------------------------------------


def run_planned(rank: int, config: BenchConfig) -> tuple[list[str], list[float | None], tuple[str, ...]]:
    field = planned_field(config, layout_of(rank, config))
    labels, simulated_s = [e.label for e in field.entries], [e.simulated_s for e in field.entries]
    field.close()
    return labels, simulated_s, field.notes


def test_the_plan_stands_beside_published_ones_and_is_explained(ranks: Pools) -> None:
    first, second = ranks(2).run(run_planned, config_of())
    assert first == second
    labels, simulated_s, notes = first
    assert labels == ["sequential", "pipemoe", "flowmoe", "fsmoe", "planned"] and explains(notes)
    *published_s, planned_s = (seconds or 0.0 for seconds in simulated_s)
    assert 0 < planned_s <= min(published_s)


# ---- tuning ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """What was chosen and what every variant promised, by number of microbatches and chunks."""

    chosen: tuple[int, int]
    chosen_s: float | None
    promised_s: dict[tuple[int, int], float | None]


def cut_of(entry: Entry) -> tuple[int, int]:
    assert entry.plan is not None
    return entry.plan.shape.microbatches, entry.plan.shape.chunks


def tuned_by(field: VirtualField, chosen: Entry, config: BenchConfig) -> Tuned:
    """Every variant predicted again, from the same measurements."""
    plans = [field._first_plan(chosen.name, variant) for variant in variants(config, chosen.name)]
    tried = [field._ordered(chosen.name, plan) for plan in plans]
    return Tuned(cut_of(chosen), chosen.simulated_s, {cut_of(e): e.simulated_s for e in tried})


def run_tuned(rank: int, config: BenchConfig, virtual: bool) -> list[Tuned]:
    if virtual:
        sleeping = VirtualField(config, layout_of(rank, config))
        found = [tuned_by(sleeping, entry, config) for entry in sleeping.entries]
        sleeping.close()
        return found
    stacks = Stacks(config, layout_of(rank, config))
    tried = predicted(stacks, profiled_for(stacks))
    field = RealField(stacks, {name: fastest(several) for name, several in tried.items()})
    found = []
    for entry in field.entries:
        promised: dict[tuple[int, int], float | None] = {}
        for each in tried[entry.name]:  # of two sizes of chunks the better one counts
            shape = each.candidate.plan.shape
            cut = shape.microbatches, shape.chunks
            promised[cut] = min(promised.get(cut) or each.predicted_s, each.predicted_s)
        found.append(Tuned(cut_of(entry), entry.simulated_s, promised))
    field.close()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("asleep", [False, True])
def test_tuning_takes_what_promises_most(ranks: Pools, asleep: bool) -> None:
    config = config_of(schedules=("flowmoe", "moe_pipeline"), tune=True)
    first, second = ranks(2).run(run_tuned, config, asleep)
    assert first == second
    flowmoe, pipeline = first
    assert flowmoe.promised_s.keys() == {(2, 1), (4, 1)} and pipeline.promised_s.keys() == {(1, 2), (1, 4)}
    for found in first:
        assert found.chosen_s == min(s for s in found.promised_s.values() if s is not None)
        assert found.promised_s[found.chosen] == found.chosen_s


def test_without_tuning_the_section_decides(ranks: Pools) -> None:
    config = config_of(schedules=("flowmoe",))
    config = replace(config, schedule=replace(config.schedule, microbatches=3))
    for (found,) in ranks(2).run(run_tuned, config, True):
        assert found.chosen == (3, 1) and found.promised_s.keys() == {(3, 1)}


def test_the_base_of_all_ratios_has_a_name() -> None:
    with pytest.raises(ConfigError, match="must be a schedule by name"):
        CompareConfig(schedules=("auto", "flowmoe"))
