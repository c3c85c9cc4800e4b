"""Known routings of large steps: a sample is weighed and said to be one; small steps are weighed in full."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from penstock.cost.clusters import find_cluster
from penstock.cost.placed import Evidence
from penstock.decision import Decision, Movable
from penstock.features.expert_replicas.prices import LATE
from penstock.plan import Problem, evaluate, published_problem
from penstock.plan.moving import EXACT_CELLS, known_routing, sample_sizes, sample_words, weigh, with_routing
from penstock.plan.subject import Overrides
from penstock.workloads import RoutingConfig
from penstock.workloads.catalogue import representatives

FREE = Movable(
    samples=("none", "netmoe"),
    experts=("none", "planned", "least_loaded", "pro_prophet"),
    replica_slots=(1, 2),
)

FEW = replace(FREE, experts=("none", "planned"), replica_slots=(1,))

FROZEN = (
    ("zipf", 8, 4, 4, 2, "penstock", "0x1.887bcfd081b00p-6", "0x1.887bcfd081b00p-6", "none", 883898368),
    (
        "dirichlet,dirichlet_concentration=0.1",
        *(16, 2, 8, 2, "sequential"),
        *("0x1.ed1868c548b0ep-7", "0x1.ed1868c548b0ep-7", "none", 320268288),
    ),
    (
        "slow_drift,drift=0.3",
        *(8, 4, 8, 3, "sequential"),
        *("0x1.508e392029cd0p-4", "0x1.508e392029cd0p-4", "none", 867495936),
    ),
    (
        "zipf,zipf_exponent=1.5",
        *(64, 32, 8, 8, "sequential"),
        *("0x1.6d9030939a1d4p+0", "0x1.d26671414e76cp-1", "planned", 3398694912),
    ),
)
"""Routing, ranks of an expert group, layers, nodes, ranks of a node, schedule; seconds without and with
moves, which experts move, and bytes: as they were when every step was weighed as a whole."""


def step(ep_size: int, layers: int, nodes: int, per_node: int) -> Problem:
    sizes = Overrides(layers=layers, nodes=nodes, ranks_per_node=per_node, ep_size=ep_size, num_experts=64)
    return published_problem("pro-prophet/moe-gpt-s", find_cluster("fsmoe-testbed-b"), sizes).problem


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda frozen: str(frozen[0]))
def test_small_steps_are_weighed_as_a_whole_and_as_before(
    frozen: tuple[str, int, int, int, int, str, str, str, str, int],
) -> None:
    text, *sizes, schedule, still, best, experts, memory_bytes = frozen
    each = with_routing(step(*sizes), RoutingConfig.parse(text), FREE if sizes[1] < 32 else FEW)
    found = weigh(each, [Decision(schedule=schedule)])
    assert (found.still.predicted_s.hex(), found.best.predicted_s.hex()) == (still, best)
    assert (found.best.choice.experts, found.best.memory_bytes) == (experts, memory_bytes)
    assert not sample_words(each) and not any("Sample " in line for line in found.lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "zipf,zipf_exponent=1.5",
        *(pytest.param(text, marks=pytest.mark.soak) for text in ("even", "slow_drift", "dirichlet")),
    ],
)
def test_a_thousand_ranks_and_64_layers_are_weighed_by_a_sample(text: str) -> None:
    each = with_routing(step(64, 64, 128, 8), RoutingConfig.parse(text), FEW)
    assert sample_words(each) == "16 of 64 MoE layers and 1 of 16 expert groups"
    found = weigh(each, [Decision(schedule="sequential")])
    assert any(f"moves weighed on {sample_words(each)}" in line for line in found.lines)
    assert not any("not weighed" in line for line in found.lines), "samples, experts and both are weighed"
    assert any(line.startswith("Experts  ") and "times the mean load" in line for line in found.lines)
    assert not (text == "even" and found.moves)


@pytest.mark.slow
def test_a_thousand_nodes_of_64_are_weighed_by_one_expert_group() -> None:
    each = with_routing(step(64, 64, 1024, 64), RoutingConfig.parse("zipf"), FEW)
    assert sample_words(each) == "16 of 64 MoE layers and 1 of 1024 expert groups"
    found = weigh(each, [Decision(schedule="sequential")])
    assert not any("not weighed" in line for line in found.lines) and found.still.predicted_s > 0


def test_a_sample_of_everything_prices_what_the_whole_step_does() -> None:
    """Groups that are copies of one another and layers that are copies of others lose nothing by a sample."""
    whole = step(4, 4, 4, 2)
    known = with_routing(step(4, 4, 2, 2), RoutingConfig.parse("zipf"), FREE).evidence
    assert known is not None
    columns = (1, 0, 0, 1)
    part = Evidence(known.before_DBYE[:, :, :2], known.now_DBYE[:, :, :2], columns)
    copies = (whole.workload.world_size // len(part.now_DBYE), 1, 1, 1)
    before, now = (np.tile(each[:, :, list(columns)], copies) for each in (part.before_DBYE, part.now_DBYE))
    for experts in ("none", "planned"):
        choice = Decision(schedule="moe_pipeline", experts=experts, replica_slots=1)
        by_sample, in_full = (
            evaluate(replace(whole, evidence=evidence), choice) for evidence in (part, Evidence(before, now))
        )
        assert by_sample.predicted_s == pytest.approx(in_full.predicted_s, rel=1e-12)
        assert by_sample.memory_bytes == in_full.memory_bytes


@pytest.mark.slow
def test_a_planner_ends_between_layers_when_the_time_is_over() -> None:
    moments = count()
    each = replace(step(8, 4, 4, 2), ends=lambda: next(moments) > 1)
    found = weigh(with_routing(each, RoutingConfig.parse("zipf"), FREE), [Decision(schedule="sequential")])
    assert next(moments) > 2 and not found.best.choice.num_replica_slots
    assert any("not weighed" in line and LATE in line for line in found.lines)
    forced = replace(each, movable=Movable(experts=("planned",), replica_slots=(1,)))
    known = known_routing(forced, RoutingConfig.parse("zipf"))
    assert weigh(replace(forced, evidence=known), [Decision()]).still.choice.experts == "planned"


def test_a_sample_has_whole_nodes_and_whole_expert_groups() -> None:
    sizes = sample_sizes(step(4, 64, 256, 8))
    assert (sizes.groups, sizes.holders) == (8, 4), "two expert groups share a node"
    assert sample_sizes(replace(step(4, 64, 256, 8), slowness=(1.0,) * 2048)).groups == 2048
    exact = step(64, EXACT_CELLS // 64**2, 8, 8)
    assert sample_sizes(exact).moe_layers == sum(exact.shape.moe_layers)


def test_representatives_are_the_middle_of_equal_parts_by_load() -> None:
    load_Y = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    chosen, columns = representatives(load_Y, 3)
    assert sorted(chosen) == list(chosen)
    assert len(columns) == 6 and all(columns[layer] == place for place, layer in enumerate(chosen))
    for column in range(3):
        loads = sorted(load_Y[[layer for layer in range(6) if columns[layer] == column]])
        assert loads[1] - loads[0] == 1.0, "neighbours by load stand for each other"


@pytest.mark.slow
def test_the_sampled_layers_of_a_workload_are_its_own() -> None:
    each = step(64, 64, 128, 8)
    known = known_routing(each, RoutingConfig.parse("hot_rank,hot_share=0.5"))
    hottest_Y = known.now_DBYE.sum(axis=(0, 1)).argmax(axis=1)
    assert len(set(hottest_Y.tolist())) == known.known_layers, "every layer has a hot rank of its own"
    assert known.of_layers((0, 5)).now_DBYE.shape[2] == 2
