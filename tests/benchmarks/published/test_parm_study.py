"""Parm's layers: the grid, what is counted of a step, and what the study says of it."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from benchmarks.published import PublishedResult, render_published
from benchmarks.published.parm import BASELINE, PARM, S1, ParmSpec, parm_layers, parm_problem, parm_seconds
from benchmarks.published.parm_study import TESTBEDS, run_parm
from penstock.decision import Decision
from penstock.ops import Op

SPEC = ParmSpec(devices=8, tp_size=4, etp_size=4, batch=2, seq_len=512, hidden_size=1024, capacity_factor=1.2)


def test_the_grid_has_as_many_layers_as_the_paper() -> None:
    layers = {cluster: list(parm_layers(cluster)) for cluster in TESTBEDS}
    assert len(layers["parm-testbed-b"]) == len(set(layers["parm-testbed-b"])) == 1296
    assert {spec.devices for spec in layers["parm-testbed-a"]} == {8}, "it has no more"
    assert SPEC in layers["parm-testbed-a"]


def test_a_layer_is_a_moe_part_alone() -> None:
    """Two nodes of four devices: of the baseline's tasks those count that the paper compares."""
    asked = parm_problem(SPEC, "parm-testbed-b")
    assert (asked.workload.nodes, asked.workload.num_experts) == (2, 2)
    choice = Decision(schedule=BASELINE)
    plan = asked.plan(choice)
    cost = asked.cost(choice, plan.shape)
    counted = {task.op for task in plan.graph.tasks if cost(task)}
    gate = {Op.GATE, Op.UNPERMUTE}
    assert counted - gate == {
        Op.ROWS_GATHER,
        Op.DISPATCH,
        Op.EXPERTS,
        Op.ROWS_REDUCE,
        Op.COMBINE,
        Op.ROWS_KEEP,
    }


def test_experts_of_the_baseline_do_the_work_of_all_ranks_with_the_same_tokens() -> None:
    asked = parm_problem(SPEC, "parm-testbed-b")
    flops = {}
    for schedule in (BASELINE, S1):
        choice = Decision(schedule=schedule)
        plan = asked.plan(choice)
        cost = asked.cost(choice, plan.shape)
        experts = next(task for task in plan.graph.tasks if task.op == Op.EXPERTS and task.forward)
        flops[schedule] = cost(experts) - asked.cluster.task_overhead_s
    assert flops[BASELINE] == pytest.approx(SPEC.tp_size * flops[S1], rel=0.01)


def test_gains_grow_with_the_ranks_that_have_the_same_tokens() -> None:
    """By as much as the paper says, roughly: 2.1 for two ranks that share all, to 5.8 for four."""
    gains = {}
    for size in (1, 2, 4):
        spec = ParmSpec(**{**asdict(SPEC), "tp_size": size, "etp_size": max(2, size), "devices": 32})
        seconds = parm_seconds(parm_problem(spec, "parm-testbed-b"))
        gains[size] = seconds[BASELINE] / seconds[PARM]
    assert 1 < gains[1] < 1.5 < gains[2] < 3 < gains[4] < 6


def test_the_study_is_counted_and_shown() -> None:
    found = run_parm("parm-testbed-a", sample=6)
    assert found.layers == 6 and found == run_parm("parm-testbed-a", sample=6, workers=2)
    assert sum(found.wins.values()) == pytest.approx(1) == pytest.approx(sum(found.whole_wins.values()))
    assert 0 <= found.right <= 1 <= found.lost
    for spread in (*found.spreads, *found.by_sharing):
        assert 1 < spread.least <= spread.median <= spread.most
        assert spread.least <= spread.mean <= spread.most
    text = render_published(PublishedResult(grids=(), parm=(found,)))
    for words in ("6 layers", "parm by tp x etp", "1.13 to 5.77", "Algorithm 1"):
        assert words in text
