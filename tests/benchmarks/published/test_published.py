"""Published planners on the layers of their papers: the grids, what is averaged, and the tables."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.published import PublishedResult, grids, joint_plan_s, render_published, run_grid
from benchmarks.published.layers import fsmoe_problem, one_lane
from benchmarks.published.study import FSMOE_BASELINE, Grid
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.graph import Phase
from penstock.plan import Problem
from penstock.plan.published import PUBLISHED, Durations
from tests.support.forked import run_forked

GRIDS = {grid.cluster: grid for grid in grids()}

TESTBEDS = ("fsmoe-testbed-a", "fsmoe-testbed-b")


@pytest.mark.parametrize("cluster", GRIDS)
def test_the_grids_have_as_many_layers_as_the_papers(cluster: str) -> None:
    specs = GRIDS[cluster].specs
    assert len(set(specs)) == len(specs) == (1458 if cluster in TESTBEDS else 675)


def test_durations_are_those_of_the_cluster_s_rates() -> None:
    """Testbed B: volumes of the paper's cost model (Eq. 1), by hand. Four shards share a node's card."""
    grid = GRIDS["fsmoe-testbed-b"]
    spec = next(s for s in grid.specs if s.capacity_factor is None and s.expert_matrices == 3)
    asked, rates = fsmoe_problem(spec, grid.cluster), find_cluster(grid.cluster).rates
    copies, shards = 2 * spec.batch * spec.seq_len, 4
    part = Durations(asked).part(0, Phase.FORWARD)
    size_bytes = 4 * copies * spec.hidden_size
    flops = 2 * 3 * copies * spec.hidden_size * spec.ffn_hidden_size / shards
    across_s = shards * 7 / 8 * size_bytes / shards / rates.link_bytes_per_s
    inside_s = 3 / 4 * size_bytes / rates.intra_bytes_per_s
    assert part.a2a.chunk_s(1) == pytest.approx(1.75e-4 + across_s, rel=1e-3)
    assert part.ag.chunk_s(1) == part.rs.chunk_s(1) == pytest.approx(3.20e-5 + inside_s, rel=1e-3)
    assert part.experts.chunk_s(1) == pytest.approx(3 * 9.24e-5 + flops / rates.flops_per_s, rel=1e-3)
    back = Durations(asked).part(0, Phase.BACKWARD)
    assert back.experts.chunk_s(1) == pytest.approx(2 * part.experts.chunk_s(1))


def test_one_lane_carries_what_two_did() -> None:
    """Where nothing overlaps, it makes no difference on how many lanes traffic is."""
    grid = GRIDS["fsmoe-testbed-b"]
    asked = fsmoe_problem(grid.specs[100], grid.cluster)
    narrow = one_lane(asked)
    plain = [p.simulate(Decision(), p.plan(Decision())).iteration_s for p in (asked, narrow)]
    assert plain[0] == pytest.approx(plain[1])


@pytest.mark.slow
@pytest.mark.parametrize("cluster", TESTBEDS)
def test_systems_come_in_the_published_order(cluster: str) -> None:
    result = run_grid(GRIDS[cluster], sample=6)
    mean = {gain.contender: gain.mean for gain in result.gains}
    assert 1 < mean["dense_overlap, one lane"] < mean["fsmoe"]
    assert mean["fsmoe, one lane"] < mean["fsmoe"] < 1.5
    published = {gain.contender: gain.published for gain in result.gains if gain.published}
    assert published == dict(GRIDS[cluster].published)
    assert result.baseline == FSMOE_BASELINE
    assert (result.distinct, result.layers) == (6, 18), "three numbers of heads cost the same"


def best_of_all(problem: Problem) -> float:
    choices = [plan(problem) for plan in PUBLISHED.values()]
    return min(problem.simulate(choice, problem.plan(choice)).iteration_s for choice in choices)


@pytest.mark.slow
def test_a_plan_that_is_the_best_published_one_gains_nothing_over_the_best() -> None:
    result = run_grid(GRIDS["flowmoe-cluster-1"], sample=1, joint_sample=2, joint=best_of_all)
    best, *each = result.joint
    assert result.sampled == 2
    assert (best.mean, best.least, best.most) == (1.0, 1.0, 1.0)
    assert [gain.contender for gain in each] == list(PUBLISHED)
    assert all(gain.least >= 1.0 for gain in each)
    assert f"{result.gains[0].mean:.3f}" in render_published(PublishedResult(grids=(result,)))


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("cluster", GRIDS)
def test_the_joint_plan_is_never_worse_than_a_published_one(cluster: str) -> None:
    result = run_grid(GRIDS[cluster], sample=1, joint_sample=1, joint=low)
    assert all(gain.least >= 1 - 1e-9 for gain in result.joint)


def low(problem: Problem) -> float:
    return joint_plan_s(problem, "low")


@pytest.mark.slow
def test_processes_find_what_one_finds() -> None:
    grid: Grid = replace(GRIDS["flowmoe-cluster-2"], specs=GRIDS["flowmoe-cluster-2"].specs[:3])
    assert run_grid(grid, workers=2) == run_grid(grid)


@pytest.mark.slow
def test_the_module_is_a_command() -> None:
    once = ("--json", "--sample", "1", "--joint", "0")
    run = run_forked(1, *once, program="benchmarks.published", environs=[{}])  # no launcher has started it
    assert run.returncode == 0, run.stderr
    assert [grid["cluster"] for grid in json.loads(run.stdout)["grids"]] == [grid.cluster for grid in grids()]
