"""Planning again where something moves, by simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock.autotune.planned import Order, Planned, with_choice
from penstock.autotune.problem import run_problem
from penstock.autotune.watch import WORTH, Diagnosis, Verdict, _decide, replan
from penstock.config import load
from penstock.decision import Decision
from penstock.features.field import NOTHING_MOVES
from penstock.plan import evaluate, find_plan
from penstock.runtime import Machinery
from penstock.topology import Control, Layout
from penstock.train.config import RunConfig
from tests.plan.problems import FILE
from tests.plan.test_moving import routed
from tests.support.runs import write_config
from tests.support.searching import short_search

BUDGET = 0.02
SLOW = Diagnosis(transfers={}, compute=(1.0, 1.0, 1.0, 1.5), threshold=0.2)


@pytest.mark.slow
def test_a_cluster_file_of_other_sizes_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load(RunConfig, write_config(tmp_path), ["parallel.ep_size=2"])
    layout = Layout(world_size=2, ep_size=2, rank=0)
    assert FILE.ranks != layout.world_size
    problem = run_problem(config, layout, FILE)
    with short_search():
        found = find_plan(problem, budget=BUDGET)
    best = found.best
    planned = Planned(problem=problem, choice=best.choice, plan=best.plan, file=FILE)
    order = Order.of(best.choice, best.plan)
    verdict = Verdict(order=order, why=(), line="", searched=found.searched, others=())
    monkeypatch.setattr("penstock.autotune.watch._decide", lambda *_: verdict)
    machinery = cast("Machinery", SimpleNamespace(layout=layout, control=Control(0, 1)))
    slow = Diagnosis(transfers={}, compute=(1.0, 1.5), threshold=0.2)
    now = replan(config, machinery, planned, slow)
    assert (now.problem.slowness, now.file) == ((1.0, 1.5), FILE)


@pytest.mark.slow
def test_rows_keep_their_form(tmp_path: Path) -> None:
    """The model was built for it, so a plan that is resumed must name it, and be priced by it."""
    lossy = ("parallel.ep_size=4", "plan.mode=auto", "plan.comm_dtype=auto", f"plan.budget={BUDGET}")
    config, layout = load(RunConfig, write_config(tmp_path), lossy), Layout(world_size=4, ep_size=4, rank=0)
    problem = run_problem(config, layout, FILE)
    choice = Decision(schedule="flowmoe", microbatches=4, dispatch="flat", comm_dtype="bfloat16")
    planned = Planned(problem=problem, choice=choice, plan=problem.plan(choice), file=FILE)
    machinery = cast("Machinery", SimpleNamespace(layout=layout, control=Control(0, 1)))
    with short_search():
        now = replan(config, machinery, planned, SLOW)
    assert (now.number, now.choice.dispatch, now.choice.comm_dtype) == (2, "flat", "bfloat16")
    assert with_choice(config, now.choice).moe.comm_dtype == "bfloat16"
    assert now.problem.workload_of(now.choice) == problem.workload_of(choice)


@pytest.mark.slow
def test_a_search_that_moves_nothing_does_not_end_what_moves(tmp_path: Path) -> None:
    """Beside plans for even routing, which nobody needs replicas for, a plan that brings some looks slow."""
    evenly = replace(routed("even", NOTHING_MOVES), evidence=None)
    hot = routed("hot_expert,hot_share=0.5", NOTHING_MOVES).evidence
    config = load(RunConfig, write_config(tmp_path), [f"plan.budget={BUDGET}"])
    with short_search():
        best = find_plan(evenly, budget=BUDGET).best
        choice = replace(best.choice, experts="planned", replica_slots=1)
        moving = evaluate(evenly, choice)
        assert best.predicted_s < WORTH * moving.predicted_s
        now = Planned(problem=evenly, choice=choice, plan=moving.plan, number=3, plans=3).seeing(hot)
        verdict = _decide(config, now, FILE, SLOW)
    assert verdict.order.choice == choice
    assert "keeping plan 3 in a new order (predicted " in verdict.line
    assert best.choice.words in [each.words for each in verdict.others]
