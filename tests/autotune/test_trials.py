"""Trials of plans: turns of equal length, the fastest is kept, and predictions are remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.autotune.planned import Order, Planned
from penstock.autotune.trial import TRIAL_STEPS, TRIALS_S, Trials, worth_while
from penstock.decision import Decision
from penstock.plan import PlanFile, evaluate
from penstock.plan.candidate import whole_s
from penstock.plan.optimizers import sharing_updates
from penstock.plan.plan_config import DROPPED_STEPS
from penstock.plan.plan_file import OtherPlan
from penstock.plan.predict import closing_s
from tests.plan.problems import problem

EACH = problem()
CHOICES = tuple(Decision(schedule=name) for name in ("penstock", "flowmoe", "sequential"))


def planned() -> Planned:
    first, *others = (Order.of(choice, EACH.plan(choice)) for choice in CHOICES)
    to_try = zip(others, (0.2, 0.3), strict=True)
    return Planned(problem=EACH, choice=first.choice, plan=first.plan, to_try=tuple(to_try))


def predicted_s() -> float:
    """The prediction for the plan in use."""
    return planned().predicted_s


def run(seconds: dict[str, float]) -> tuple[Trials, list[str]]:
    """All trials where a step of every schedule takes so long; the schedules by step."""
    now = planned()
    ran: list[str] = []
    trials = Trials(now)
    while not trials.done:
        name = now.choice.schedule
        position = ran.count(name)
        ran.append(name)
        hiccup = 10.0 if position < DROPPED_STEPS or position == TRIAL_STEPS - 1 else 0.0
        if trials.note(seconds[name] + hiccup, []):
            now = trials.turn
    return trials, ran


def test_turns_of_equal_length_and_the_fastest_is_kept() -> None:
    """The first steps of a turn do not count, and one hiccup is none."""
    trials, ran = run({"penstock": 0.5, "flowmoe": 0.3, "sequential": 0.4})
    assert ran == [choice.schedule for choice in CHOICES for _ in range(TRIAL_STEPS)]
    kept = trials.turn
    assert (kept.choice, kept.plan.schedule.name, kept.to_try) == (CHOICES[1], "flowmoe", ())
    assert kept.learnt.misses == pytest.approx(
        {"penstock": 0.5 / predicted_s(), "flowmoe": 1.5, "sequential": 0.4 / 0.3}
    )
    assert (kept.number, kept.plans) == (2, 3)
    head, columns, *rows, last = trials.lines
    assert head == f"trials of {TRIAL_STEPS} steps each, time per whole step (update included):"
    assert last == "keeping plan 2"
    assert columns.split() == ["plan", "predicted", "measured"]
    assert rows[1] == f"     2   200.0 ms   300.0 ms  {CHOICES[1].words}"
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    *described, times = trials.said.splitlines()
    assert described == [f"Plan {number}   {CHOICES[number - 1].words}" for number in (2, 3)]
    assert all(f"by plan {number}" in times for number in (1, 2, 3)) and times.endswith(last)


def test_trials_end_by_the_time_of_their_steps_with_the_plans_that_were_tried() -> None:
    """The first plan gets a step that counts, whatever it takes."""
    hour = dict.fromkeys(("penstock", "flowmoe", "sequential"), 3600.0)
    trials, ran = run(hour)
    assert ran == ["penstock"] * (DROPPED_STEPS + 1)
    kept = trials.turn
    assert (
        kept.choice == CHOICES[0] and set(kept.learnt.misses) == {"penstock"} and kept.learnt.won is not None
    )
    assert "2 plans not tried" in trials.lines[-1]
    slow = {"penstock": 0.5, "flowmoe": 0.9 * TRIALS_S / DROPPED_STEPS, "sequential": 0.1}
    trials, ran = run(slow)
    assert ran == ["penstock"] * TRIAL_STEPS + ["flowmoe"] * (DROPPED_STEPS + 1)
    assert trials.turn.choice == CHOICES[0] and "1 plan not tried" in trials.lines[-1]


@pytest.mark.slow
def test_later_predictions_are_corrected_like_the_first() -> None:
    kept = run({"penstock": 0.5, "flowmoe": 0.3, "sequential": 0.4})[0].turn
    penstock, lina = (evaluate(EACH, Decision(schedule=name)) for name in ("penstock", "lina"))
    assert kept.expected_s(penstock) == pytest.approx(0.5 / predicted_s() * whole_s(EACH, penstock))
    usual = (0.5 / predicted_s() + 1.5 + 0.4 / 0.3) / 3
    assert kept.expected_s(lina) == pytest.approx(usual * whole_s(EACH, lina))
    assert planned().expected_s(lina) == whole_s(EACH, lina)


@pytest.mark.slow
def test_steps_are_measured_with_their_updates_and_predicted_with_them(tmp_path: Path) -> None:
    found = evaluate(EACH, planned().choice)
    assert predicted_s() == found.predicted_s + closing_s(EACH) > found.predicted_s
    planned().save(tmp_path, "a model")
    paper = PlanFile.read(tmp_path / "plan.json")
    assert paper.predicted_s == predicted_s() >= paper.lower_bound_s > found.bound.seconds
    (other,) = OtherPlan.among(EACH, [found])
    assert other.predicted_s == predicted_s()
    sharded = sharing_updates(EACH)
    assert whole_s(sharded, evaluate(sharded, found.choice)) == evaluate(sharded, found.choice).predicted_s


def test_only_runs_that_gain_by_it_try_plans() -> None:
    assert worth_while(planned(), 30 * TRIAL_STEPS)
    assert not worth_while(planned(), 30 * TRIAL_STEPS - 1)
    assert not worth_while(replace(planned(), to_try=()), 10_000)
