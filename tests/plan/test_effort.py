"""What a search may look at is counted, so no clock changes its answer, and it says what it left out."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count, pairwise

import pytest

from penstock.config import ConfigError
from penstock.decision import Decision
from penstock.plan import FoundPlan, evaluate, find_plan
from penstock.plan.effort import PLACEMENTS, QUICK, Effort, Meter, Searched
from penstock.plan.published import PUBLISHED
from penstock.plan.search import first_choices
from penstock.schedule.penstock import MOST_PLACEMENTS, trials
from tests.plan.problems import problem

BUDGETS = (2e-4, 0.025, 0.075, 0.25)
LARGE = (0.75, 2.5)


@pytest.mark.slow
def test_a_machine_on_which_nothing_gets_done_finds_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every look at the clock came an hour after the one before."""
    each = problem((True, True))
    usual = find_plan(each, budget=0.02)
    hours = count(0, 3600)
    for clock in ("monotonic", "time", "perf_counter", "process_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(hours)))
    slow = find_plan(each, budget=0.02)
    assert slow.best.choice == usual.best.choice
    assert slow.best.plan.schedule.digest == usual.best.plan.schedule.digest
    assert slow.searched == usual.searched


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize("budgets", [BUDGETS, pytest.param((*BUDGETS, *LARGE), marks=pytest.mark.soak)])
def test_a_larger_budget_never_finds_a_worse_plan(layers: int, budgets: tuple[float, ...]) -> None:
    """Nor a worse one than those it begins with. 12 layers are searched through a short model."""
    each = problem((True,) * layers)
    seconds = [find_plan(each, budget=budget).best.predicted_s for budget in budgets]
    assert all(later <= earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] < seconds[0], "no budget made a difference"
    assert seconds[0] <= min(evaluate(each, choice).predicted_s for choice in first_choices(each))


@pytest.mark.slow
def test_the_usual_budget_leaves_no_published_planner_out() -> None:
    """However large the model: its plans alone may be more than the budget."""
    each = problem((True,) * 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLACEMENTS, "usual", 10)
        found = find_plan(each)
    assert found.searched.stopped is not None and found.searched.skipped == ()
    for planner in PUBLISHED.values():
        assert found.best.predicted_s <= evaluate(each, planner(each)).predicted_s


@pytest.mark.slow
@pytest.mark.parametrize("effort", ["low", "usual"])
def test_work_ends_soon_after_the_budget(effort: Effort) -> None:
    """The last simulation may exceed it, or the last order that is searched for, and nothing else."""
    each = problem((True,) * 12)
    searched = find_plan(each, budget=0.2, effort=effort).searched
    assert searched.allowed == PLACEMENTS[effort] // 5 and searched.stopped is not None
    assert searched.placements <= searched.allowed + MOST_PLACEMENTS // QUICK + 10_000


@pytest.mark.slow
@pytest.mark.parametrize("looks", [0, 40])
def test_a_search_that_others_wait_for_ends_by_the_clock(looks: int) -> None:
    """With the best plan by then, never worse than those with which it begins."""
    each, seen = problem((True, True)), count()
    found = find_plan(each, ends=lambda: next(seen) >= looks)
    searched = found.searched
    assert searched.late and searched.stopped is not None and not searched.complete
    assert searched.placements < searched.allowed and "took too long" in searched.words
    assert found.best.predicted_s <= min(evaluate(each, choice).predicted_s for choice in first_choices(each))
    assert next(seen) < looks + 60, "it goes on"


@pytest.mark.slow
def test_what_was_left_out_is_said() -> None:
    found = find_plan(problem(), budget=1e-4)
    searched = found.searched
    assert not searched.complete and searched.left_out > 100
    assert searched.stopped == "better cuts" and searched.skipped == tuple(PUBLISHED)
    for words in (
        "The budget of 0.0001 (20 simulated tasks) was used up",
        f"Not examined: {searched.left_out:,} plans and the choices of these planners: sequential, ",
        "better cuts",
    ):
        assert words in searched.words
    assert searched.lines == (f"Search   {searched.words}",)


@pytest.mark.slow
def test_what_is_complete_claims_nothing_more() -> None:
    searched = find_plan(problem((True,)), budget=500).searched
    assert searched.complete and searched.stopped is None and searched.lines == ()
    assert searched.left_out == 0 and "examined" not in searched.words and "enough" not in searched.words


def looked(found: FoundPlan) -> Searched:
    return replace(found.searched, budget=0, allowed=0, stopped=None)


@pytest.mark.slow
def test_every_choice_is_counted_once() -> None:
    """Simulated, ruled out and left out are all there are, whatever the budget; some are not in the space."""
    each = problem((True, True))
    sums = []
    for budget in (0.05, 50.0):
        found = looked(find_plan(each, budget=budget))
        sums.append(found.simulated + found.ruled_out + found.left_out)
    assert max(sums) - min(sums) <= len(first_choices(each)) + len(PUBLISHED) + 10


def test_work_is_counted_by_tasks_and_timelines() -> None:
    each, meter = problem(), Meter("usual", 1.0)
    meter.note(each, Decision(schedule="lina"), 100)
    assert meter.spent == 200  # ordered and simulated
    meter.note(each, Decision(schedule="penstock", priority="search"), 100)
    assert meter.spent == 400 + 100 * trials(100) // QUICK


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_no_budget_at_all_is_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="it multiplies the usual search effort"):
        find_plan(problem(), budget=budget)
