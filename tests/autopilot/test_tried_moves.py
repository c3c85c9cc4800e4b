"""A plan that moves and the one before it, in turns: the faster is kept, whatever was predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.autopilot.planned import Planned
from penstock.autopilot.trials import TRIAL_STEPS
from penstock.autopilot.tried_moves import TriedMoves, worth_trying
from penstock.config import load
from penstock.decision import Decision
from penstock.plan.plan_config import DROPPED_STEPS
from penstock.plan.plan_file import OtherPlan
from penstock.train.config import RunConfig
from tests.plan.problems import problem

EACH = problem()
OLD, NEW = Decision(schedule="flowmoe"), Decision(schedule="sequential")


def plan_of(choice: Decision, number: int) -> Planned:
    return Planned(problem=EACH, choice=choice, plan=EACH.plan(choice), number=number, plans=number)


def tried(new_s: float, old_s: float) -> tuple[TriedMoves, list[str]]:
    """Both turns, with first steps that do not count; the schedules by step."""
    before = replace(plan_of(OLD, 2), others=(OtherPlan(words="another", predicted_s=9.0),))
    now = replace(plan_of(NEW, 4), lines=("moving pays",), others=before.others)
    trial, ran = TriedMoves(before, now), list[str]()
    while not trial.done:
        schedule = now.choice.schedule
        first = ran.count(schedule) < DROPPED_STEPS
        ran.append(schedule)
        if trial.note(10.0 if first else {"sequential": new_s, "flowmoe": old_s}[schedule]):
            now = trial.turn
    return trial, ran


def test_the_new_plan_stays_where_its_steps_are_shorter() -> None:
    trial, ran = tried(0.3, 0.4)
    assert ran == ["sequential"] * TRIAL_STEPS + ["flowmoe"] * TRIAL_STEPS
    kept = trial.turn
    assert (kept.choice, kept.number, kept.plans, kept.trial_s) == (NEW, 4, 4, 0.3)
    assert trial.lines == (
        "tried for 6 steps each: a step takes 300.0 ms by plan 4, 400.0 ms by plan 2: keeping plan 4",
    )


def test_else_the_one_before_comes_back_and_knows_of_it() -> None:
    trial, _ = tried(0.5, 0.4)
    kept = trial.turn
    assert (kept.choice, kept.number, kept.plans, kept.trial_s) == (OLD, 2, 4, 0.4)
    assert kept.lines == ("moving pays",), "why it was tried is not forgotten"
    assert [(other.words, other.measured_s) for other in kept.others] == [(NEW.words, 0.5), ("another", None)]
    assert trial.lines[0].endswith("500.0 ms by plan 4, 400.0 ms by plan 2: going back to plan 2")


@pytest.mark.parametrize(
    ("settings", "worth"),
    [
        (["train.steps=120"], True),
        (["train.steps=119"], False),
        (["train.steps=1000", "plan.trials=1"], False),
    ],
)
def test_only_runs_with_trials_that_gain_by_it_try_moves(settings: list[str], worth: bool) -> None:
    assert worth_trying(load(RunConfig, None, settings)) is worth
