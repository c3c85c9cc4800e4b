"""Runs the most promising plans for some steps each: the best prediction is still a prediction.

Where ranks share cores, for example, or task durations vary a lot, a plan of fewer pieces may be faster than
predicted. These steps train like any others. Every rank receives the same times, so all ranks choose the same
plan after the same step without communicating.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from penstock.autotune.planned import Planned, Rival, decided
from penstock.cost import MeasuredCost
from penstock.cost.cluster_file import MoveModel
from penstock.cost.placed import Evidence
from penstock.graph import Task
from penstock.plan.lost import LostTrial
from penstock.plan.plan_config import DROPPED_STEPS
from penstock.plan.plan_file import MOST_OTHERS, OtherPlan
from penstock.plan.predict import closing_s, interval_s, predicted_timeline, prolonged_s
from penstock.topology import Control
from penstock.trace import TaskRecord
from penstock.train.config import RunConfig
from penstock.words import counted, milliseconds, within

Records = Sequence[TaskRecord]

TRIAL_STEPS = DROPPED_STEPS + 4
TRIALS_S = 1800.0
"""Seconds of all steps of a comparison, after which no other plan is tried."""
MOST_SHARE = 0.1
"""The largest share of a run's steps that trials may take."""


def turn_ends(times_s: Sequence[float], *, late: bool) -> bool:
    """Tell whether a turn has enough steps; where the time is over, one step that counts is enough."""
    return len(times_s) >= (DROPPED_STEPS + 1 if late else TRIAL_STEPS)


def worth_while(planned: Planned, steps: int) -> bool:
    """Tell whether there are plans to compare, in a run that is long enough to gain from the fastest."""
    tried = 1 + len(planned.rivals)
    return tried > 1 and tried * TRIAL_STEPS <= MOST_SHARE * steps


class Trials:
    """Runs some plans in turns of `TRIAL_STEPS`; the first of them is in use already.

    After `TRIALS_S` the turn that is running ends as soon as it can, and is the last. That time is the sum of
    what all ranks know of steps, so all ranks end after the same one.
    """

    settles: Final = True
    """Whether the plan that is kept is still to be ordered by measured durations."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned
        self._entries = (
            Rival(choice=planned.choice, plan=planned.plan, predicted_s=planned.predicted_s),
            *planned.rivals,
        )
        self._times: list[float] = []
        self._medians: list[float] = []
        self._spent_s = 0.0

    @property
    def done(self) -> bool:
        return len(self._medians) == len(self._entries) or (bool(self._medians) and self._late)

    @property
    def _late(self) -> bool:
        return self._spent_s > TRIALS_S

    def note(self, slowest_s: float, records: Records) -> bool:
        """Record the seconds of a step on the slowest rank; return whether the next plan's turn has come."""
        del records  # whole steps decide
        self._times.append(slowest_s)
        self._spent_s += slowest_s
        if not turn_ends(self._times, late=self._late):
            return False
        self._medians.append(median(self._times[DROPPED_STEPS:]))
        self._times.clear()
        return True

    def learned(self, planned: Planned, control: Control) -> Planned:
        """Return the plan that is kept: it has the misses of all already."""
        del control
        return planned

    @property
    def turn(self) -> Planned:
        """Plan to run from the next step on; after all trials the fastest plan, with the misses of all."""
        place = self._best if self.done else len(self._medians)
        entry, number = self._entries[place], self._planned.number + place
        turn = replace(self._planned, choice=entry.choice, plan=entry.plan, rivals=())
        turn = replace(turn, number=number, plans=self._planned.plans + len(self._entries) - 1)
        if not self.done:
            return turn
        tried = {each.words: each for each in self._tried}
        trial = tried.pop(entry.choice.words)
        rest = (each for each in self._planned.others if each.words not in (*tried, trial.words))
        return replace(turn, misses=self._misses(), trial=trial, others=(*tried.values(), *rest))

    @property
    def _tried(self) -> list[OtherPlan]:
        """All plans that were tried, with the seconds that their steps took."""
        return [
            OtherPlan(words=entry.choice.words, predicted_s=entry.predicted_s, measured_s=seconds)
            for entry, seconds in zip(self._entries, self._medians, strict=False)
        ]

    def _misses(self) -> dict[str, float]:
        """Return measured over predicted seconds per step, by schedule."""
        return {
            entry.choice.schedule: seconds / entry.predicted_s
            for entry, seconds in zip(self._entries, self._medians, strict=False)
        }

    @property
    def lines(self) -> tuple[str, ...]:
        """Table of the plans with predicted and measured times, and which plan is kept."""
        first, problem = self._planned.number, self._planned.problem
        predicted = [
            within(entry.predicted_s, interval_s(problem, entry.predicted_s)) for entry in self._entries
        ]
        width = max(9, *map(len, predicted))
        tried = zip(self._entries, predicted, self._medians, strict=False)
        rows = (
            f"  {number:>4}  {text:>{width}}  {milliseconds(seconds):>9}  {entry.choice.words}"
            for number, (entry, text, seconds) in enumerate(tried, first)
        )
        most = "at most " if self._late else ""
        return (
            f"trials of {most}{TRIAL_STEPS} steps each, time per whole step (update included):",
            f"  plan  {'predicted':>{width}}  {'measured':>9}",
            *rows,
            f"keeping plan {first + self._best}{self._untried}",
        )

    @property
    def said(self) -> str:
        """The same in a sentence, for the screen."""
        first = self._planned.number
        times = ", ".join(
            f"{milliseconds(seconds)} by plan {number}" for number, seconds in enumerate(self._medians, first)
        )
        most = "at most " if self._late else ""
        kept = f"plan {first + self._best}"
        if self._best:  # the first one was said when it was chosen
            kept += f": {self._entries[self._best].choice.words}"
        return (
            f"tried for {most}{TRIAL_STEPS} steps each: a step takes {times}: keeping {kept}{self._untried}"
        )

    @property
    def _untried(self) -> str:
        left = len(self._entries) - len(self._medians)
        return f"; {counted(left, 'plan')} not tried: these steps took {self._spent_s:.0f} s" if left else ""

    @property
    def _best(self) -> int:
        return min(range(len(self._medians)), key=lambda number: self._medians[number])


# ---- runs a plan that moves and the one before it in turns: steps ------------------------------------------


def worth_trying(config: RunConfig) -> bool:
    """Tell whether a run has trials, and is long enough to gain from the faster of two plans."""
    return config.plan.trials > 1 and MOST_SHARE * config.train.steps >= 2 * TRIAL_STEPS


class TriedMoves:
    """Runs two plans in turns of `TRIAL_STEPS`: `new`, which is in use already, then `before`.

    Both are ordered by measured durations, where schedules are. A turn that takes longer than its half of
    `TRIALS_S` ends as soon as one step counts.
    """

    settles: Final = False

    def __init__(self, before: Planned, new: Planned) -> None:
        self._plans = (new, replace(before, plans=new.plans, lines=new.lines))
        self._times: tuple[list[float], list[float]] = ([], [])
        self._records: tuple[list[Records], list[Records]] = ([], [])
        self._turn = 0

    @property
    def done(self) -> bool:
        return self._turn == len(self._plans)

    def note(self, slowest_s: float, records: Records) -> bool:
        """Record a step: its seconds on the slowest rank, its tasks here. Return whether a turn has ended."""
        times_s = self._times[self._turn]
        times_s.append(slowest_s)
        self._records[self._turn].append(records)
        ends = turn_ends(times_s, late=sum(times_s) > TRIALS_S / len(self._plans))
        self._turn += ends
        return ends

    @property
    def turn(self) -> Planned:
        """Plan to run from the next step on; after both turns the faster one, with the times of both."""
        if not self.done:
            return self._plans[1]
        (kept_s, kept), (left_s, left) = self._ranked
        trial = OtherPlan(words=kept.choice.words, predicted_s=kept.predicted_s, measured_s=kept_s)
        tried = OtherPlan(words=left.choice.words, predicted_s=self._like(kept, left), measured_s=left_s)
        others = [each for each in kept.others if each.words not in (tried.words, trial.words)]
        return replace(kept, trial=trial, others=(tried, *others)[:MOST_OTHERS])

    @property
    def lines(self) -> tuple[str, ...]:
        """Times of both plans, and which plan is kept."""
        times = ", ".join(
            f"{milliseconds(seconds)} by {plan.name}"
            for plan, seconds in zip(self._plans, self._medians, strict=True)
        )
        kept = self._ranked[0][1]
        way = "keeping" if kept is self._plans[0] else "going back to"
        first, second = map(len, self._times)
        steps = f"{first} steps each" if first == second else f"{first} and {second} steps"
        return (f"tried for {steps}: a step takes {times}: {way} {kept.name}",)

    @property
    def said(self) -> str:
        """The same, for the screen."""
        return self.lines[0]

    def learned(self, planned: Planned, control: Control) -> Planned:
        """Return the plan that is kept with what the trial tells of the other; all ranks call it together.

        Moving that won is not remembered: nothing would be tried again, and a lucky turn would speak for it.
        """
        slower, faster = (self._run(each) for _, each in reversed(self._ranked))
        choice = slower.planned.choice
        if planned.choice == self._plans[0].choice and choice.samples == choice.experts == "none":
            return forgotten(planned, slower.planned, faster.planned)
        return learned(planned, slower, faster, control)

    def _run(self, planned: Planned) -> Run:
        """Return a plan's turn, priced by the routing that was observed, whatever the plan moves."""
        turn = self._plans.index(planned)
        steps = self._records[turn][DROPPED_STEPS:]
        problem = replace(planned.problem, evidence=self._evidence)
        return Run(
            planned=replace(planned, problem=problem),
            seconds=self._medians[turn],
            records=[record for step in steps for record in step],
        )

    @property
    def _evidence(self) -> Evidence | None:
        return self._plans[0].problem.observed

    def _like(self, kept: Planned, left: Planned) -> float:
        """Return the seconds predicted for `left` by the routing from which `kept` is predicted."""
        alike = [
            replace(each, problem=replace(each.problem, evidence=self._evidence)).predicted_s
            for each in (kept, left)
        ]
        return kept.predicted_s * alike[1] / alike[0]

    @property
    def _ranked(self) -> Sequence[tuple[float, Planned]]:
        """Both plans with the seconds that their steps took, the faster one first."""
        return sorted(zip(self._medians, self._plans, strict=True), key=lambda each: each[0])

    @property
    def _medians(self) -> Sequence[float]:
        return [median(turn[DROPPED_STEPS:]) for turn in self._times]


# ---- what a run learns from a trial of moving: the price of its t ------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """A plan in a trial. seconds: of a step on the slowest rank. records: of its steps on this rank."""

    planned: Planned
    seconds: float
    records: Sequence[TaskRecord]


def learned(planned: Planned, slower: Run, faster: Run, control: Control) -> Planned:
    """Return the plan with what a trial tells, on all ranks alike: they plan guests by the same prices.

    slower, faster: priced with the same routing.
    """
    everyone = control.gather(list(slower.records), "exchanging durations of the slower plan")
    records = [record for rank in everyone for record in rank]
    moves, trial = decided(control, lambda: _lesson(slower, faster, records), "learning from a trial")
    return planned.learning(moves, (*_of_others(planned, slower.planned, faster.planned), trial))


def forgotten(planned: Planned, one: Planned, other: Planned) -> Planned:
    """Return the plan without an earlier trial between two plans' moves: it would tell the opposite."""
    return replace(planned, lost=_of_others(planned, one, other))


def _of_others(planned: Planned, one: Planned, other: Planned) -> tuple[LostTrial, ...]:
    return tuple(each for each in planned.lost if not each.settles(one.choice, other.choice))


def _lesson(
    slower: Run, faster: Run, records: Sequence[TaskRecord]
) -> tuple[tuple[MoveModel, ...], LostTrial]:
    times = _prolonged(slower.planned, faster.planned, records)
    slower_s, faster_s = (_predicted_again_s(run.planned, times) for run in (slower, faster))
    trial = LostTrial.of(
        slower.planned.choice,
        faster.planned.choice,
        predicted=slower_s / faster_s,
        measured=slower.seconds / faster.seconds,
    )
    file = slower.planned.file
    known = {move.op: move.in_steps for move in (file.moves if file else ())}
    now = known | {op: ratio * known.get(op, 1.0) for op, ratio in times.items()}
    return tuple(MoveModel(op=op, in_steps=factor) for op, factor in now.items()), trial


def _predicted_again_s(planned: Planned, times: Mapping[str, float]) -> float:
    """Return the seconds predicted for the guests that ran, with transfers as measured."""
    iteration_s = prolonged_s(planned.problem, planned.choice, planned.plan, times)
    return iteration_s + closing_s(planned.problem)


def _prolonged(planned: Planned, other: Planned, records: Sequence[TaskRecord]) -> dict[str, float]:
    """Return measured over predicted seconds of transfers that only `planned` has, by op.

    What both plans send a profile has measured, and a trial repeats it under other conditions.
    """
    shared = {task.op for task in other.plan.graph.tasks}
    own = [task for task in planned.plan.graph.tasks if task.axes and task.op not in shared]
    predicted, measured = _predicted_s(planned, own), MeasuredCost.from_records(records, lambda _: 0.0)
    found = {}
    for op in dict.fromkeys(task.op for task in own):
        tasks = [task for task in own if task.op == op]
        took_s, expected_s = sum(map(measured, tasks)), sum(predicted[task] for task in tasks)
        if took_s > 0 and expected_s > 0:
            found[op] = took_s / expected_s
    return found


def _predicted_s(planned: Planned, tasks: Sequence[Task]) -> dict[Task, float]:
    """Return the seconds of transfers on the rank that comes last, as `MeasuredCost` reads them off a run."""
    times = predicted_timeline(planned.problem, planned.choice, planned.plan).times
    return {task: float((times[task].end - times[task].start).min()) for task in tasks}
