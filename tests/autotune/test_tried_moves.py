"""A plan that moves and the one before it, in turns: the faster is kept, whatever was predicted."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.autotune.planned import Learnt, Planned
from penstock.autotune.trial import TRIAL_STEPS, TRIALS_S, TriedMoves, worth_trying
from penstock.config import load
from penstock.cost import ClusterFile
from penstock.decision import Decision
from penstock.plan import PlanFile
from penstock.plan.plan_config import DROPPED_STEPS
from penstock.plan.plan_file import LostTrial, OtherPlan, moves_of
from penstock.runtime.features.expert_replicas.manager import ExpertReplicas
from penstock.topology import Control
from penstock.train.config import RunConfig
from penstock.train.trainer import Trainer
from tests.autotune.runs import RANKS, SLOW, STEP_S, TASK_S, auto, on_slow_devices, run
from tests.plan.problems import problem
from tests.support.ranks import Pools
from tests.support.training import Told, folder_of, pretend

EACH = problem()
OLD, NEW = Decision(schedule="flowmoe"), Decision(schedule="sequential")
MOVING = replace(OLD, experts="planned")


def plan_of(choice: Decision, number: int) -> Planned:
    return Planned(problem=EACH, choice=choice, plan=EACH.plan(choice), number=number, plans=number)


def tried(new_s: float, old_s: float) -> tuple[TriedMoves, list[str]]:
    """Both turns, with first steps that do not count; the schedules by step."""
    before = replace(plan_of(OLD, 2), learnt=Learnt(others=(OtherPlan(words="another", predicted_s=9.0),)))
    now = replace(plan_of(NEW, 4), lines=("moving pays",), learnt=before.learnt)
    trial, ran = TriedMoves(before, now), list[str]()
    while not trial.done:
        schedule = now.choice.schedule
        first = ran.count(schedule) < DROPPED_STEPS
        ran.append(schedule)
        if trial.note(10.0 if first else {"sequential": new_s, "flowmoe": old_s}[schedule], []):
            now = trial.turn
    return trial, ran


def test_turns_of_very_long_steps_end_when_one_step_counts() -> None:
    trial, ran = tried(1.1 * TRIALS_S, 0.4)
    assert ran == ["sequential"] * (DROPPED_STEPS + 1) + ["flowmoe"] * TRIAL_STEPS
    assert trial.turn.choice == OLD and "for 3 and 6 steps" in trial.lines[0]


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
    assert [(other.words, other.measured_s) for other in kept.learnt.others] == [
        (NEW.words, 0.5),
        ("another", None),
    ]
    assert trial.lines[0].endswith("500.0 ms by plan 4, 400.0 ms by plan 2: going back to plan 2")


@pytest.mark.parametrize(
    ("new", "before", "new_s", "told"),
    [
        (MOVING, OLD, 0.5, MOVING),  # moving lost
        (OLD, MOVING, 0.5, OLD),  # so did leaving it
        (OLD, MOVING, 0.3, MOVING),  # moving was right once, and is not any more
        (MOVING, OLD, 0.3, None),  # moving won: what told the opposite is forgotten
    ],
)
def test_what_lost_is_remembered(
    new: Decision, before: Decision, new_s: float, told: Decision | None
) -> None:
    earlier = LostTrial.of(MOVING, OLD, predicted=0.9, measured=1.1)
    another = LostTrial.of(replace(OLD, samples="netmoe"), OLD, predicted=0.9, measured=1.2)
    plans = [
        replace(plan_of(each, number), learnt=Learnt(lost=(earlier, another)))
        for number, each in enumerate((new, before))
    ]
    trial = TriedMoves(plans[1], plans[0])
    for step in range(2 * TRIAL_STEPS):
        trial.note(new_s if step < TRIAL_STEPS else 0.4, [])
    kept = trial.learned(trial.turn, Control(0, 1))
    assert kept.learnt.lost[0] == another and len(kept.learnt.lost) == (1 if told is None else 2)
    if told is not None:
        assert kept.learnt.lost[1].moves == moves_of(told)
        assert kept.learnt.lost[1].measured == pytest.approx(max(new_s / 0.4, 0.4 / new_s))


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


# ---- on real ranks -----------------------------------------------------------------------------------------


def slow_where(moves: bool, trainer: Trainer) -> None:
    """Steps are slow that plan replicas, or all others."""

    def step_s(step: int) -> float:
        del step
        return STEP_S * (SLOW if (trainer.stack.of(ExpertReplicas).moving is not None) is moves else 1.0)

    pretend(trainer, lambda _: TASK_S, step_s)


UNEVEN = ("moe.aux_loss_coeff=0.0", "optimizer.lr=0.02")
"""Settings with which experts' loads are soon uneven."""


TRIED_BY = 48
"""After so many steps the plan has been in use for some that is kept."""


def stop_after(last: int, trainer: Trainer, step: int) -> None:
    """As Ctrl-C does. Only a long run tries moves, and what follows a trial is more of the same."""
    del trainer
    if step == last:
        signal.raise_signal(signal.SIGINT)


def long_run(ranks: Pools, folder: Path, last: int, *settings: str, slow: bool | None = None) -> list[Told]:
    """The first steps of a run that is long enough to try moves."""
    usual = "plan.trials=2", "plan.watch=false", "train.steps=120", "schedule.refine_after=4"
    before = None if slow is None else partial(slow_where, slow)
    words = (*auto(folder), *usual, *UNEVEN, *settings)
    return run(ranks, folder, *words, on_step=partial(stop_after, last), before=before)


def run_that_moves(ranks: Pools, folder: Path, *, slow: bool) -> tuple[list[Told], PlanFile]:
    """A run whose prediction says that moving pays. slow: it takes longer than the prediction says."""
    on_slow_devices(folder)
    told = long_run(ranks, folder, TRIED_BY, slow=slow)
    assert told[0].plans == told[1].plans
    return told, PlanFile.read(folder / "run" / "plan.json")


TRIED = r"changing to (plan \d+): .*\1 re-ordered .*tried for 6 steps each: .* by \1, .* by (plan \d+): "


@pytest.fixture(scope="module")
def went_back(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Told], PlanFile]:
    """A run in which moving takes longer than predicted: its folder, what it said, and its plan."""
    folder = folder_of(tmp_path_factory.mktemp("slow"), "run", RANKS)
    return folder, *run_that_moves(ranks, folder, slow=True)


def test_a_run_in_which_moving_takes_longer_than_predicted_goes_back(
    went_back: tuple[Path, list[Told], PlanFile],
) -> None:
    """To the very plan that it had, in the order that was timed; its file knows what was tried."""
    _, told, paper = went_back
    log = " ".join(told[0].logged.split())
    tried = re.search(TRIED + r"going back to \2", log)
    assert tried and tried.end() > log.rfind("re-ordered"), log
    assert paper.choice.experts == "none" and paper.explains_choice
    assert any(line.endswith(f"going back to {tried[2]}") for line in paper.why)
    assert any("experts move" in other.words and other.measured_s == SLOW * STEP_S for other in paper.others)
    last = told[0].plans[-1]
    assert told[0].plans[-TRIAL_STEPS:] == [last] * TRIAL_STEPS and last in told[0].plans[: -2 * TRIAL_STEPS]


def test_a_run_that_plans_again_does_not_try_what_has_lost(
    ranks: Pools, went_back: tuple[Path, list[Told], PlanFile]
) -> None:
    """Its files keep what the trial told, also where a resumed run cannot continue its plan."""
    folder, _, paper = went_back
    (trial,) = paper.lost
    assert trial.experts != "none" and trial.against == ("none", "none")
    assert trial.measured == pytest.approx(SLOW)
    learnt = ClusterFile.read(folder / "run" / "cluster.json").moves
    assert {"GP", "GG"} <= {move.op for move in learnt}
    again = long_run(ranks, folder, TRIED_BY + 30, "train.resume=true", "plan.budget=0.9")
    said = " ".join(again[0].said.split())
    assert "planning again instead of continuing" in said and "changing to plan" not in said, said
    paper = PlanFile.read(folder / "run" / "plan.json")
    assert paper.lost == (trial,)
    assert any(line.startswith("Experts ") and "does not pay" in " ".join(line.split()) for line in paper.why)
    assert ClusterFile.read(folder / "run" / "cluster.json").moves == learnt


def test_a_run_in_which_moving_is_as_fast_as_predicted_keeps_it(ranks: Pools, tmp_path: Path) -> None:
    """Replicas, none, and replicas again, after which the run goes on as it was saved."""
    folder = folder_of(tmp_path, "run", RANKS)
    told, paper = run_that_moves(ranks, folder, slow=False)
    log = " ".join(told[0].logged.split())
    assert (tried := re.search(TRIED + r"keeping \1", log)), log
    assert paper.choice.num_replica_slots > 0 and paper.explains_choice and paper.lost == ()
    assert any(line.endswith(f"keeping {tried[1]}") for line in paper.why)
    assert paper.trial_s == STEP_S
    (before,) = paper.others
    assert before.measured_s == SLOW * STEP_S and "experts move" not in before.words
    again = long_run(ranks, folder, TRIED_BY + 4, "train.resume=true")
    assert set(again[0].plans) == {told[0].plans[-1]}
    assert PlanFile.read(folder / "run" / "plan.json").choice == paper.choice
