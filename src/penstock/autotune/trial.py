"""Runs the most promising plans for some steps each: the best prediction is still a prediction.

Where ranks share cores, for example, or task durations vary a lot, a plan of fewer pieces may be faster than
predicted, and the cost of replicas during computation is hard to predict at all. These steps train like any
others. Every rank receives the same times, so all ranks choose the same plan after the same step without
communicating.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from penstock.autotune.planned import Planned
from penstock.cost import MeasuredCost
from penstock.cost.cluster_file import MoveModel
from penstock.graph import Task
from penstock.plan.plan_config import DROPPED_STEPS
from penstock.plan.plan_file import LostTrial, OtherPlan
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


def worth_while(planned: Planned, steps: int) -> bool:
    """Tell whether there are plans to compare, in a run that is long enough to gain from the fastest."""
    return bool(planned.to_try) and (1 + len(planned.to_try)) * TRIAL_STEPS <= MOST_SHARE * steps


def worth_trying(config: RunConfig) -> bool:
    """Tell whether a run has trials, and is long enough to gain from the faster of two plans."""
    return config.plan.trials > 1 and MOST_SHARE * config.train.steps >= 2 * TRIAL_STEPS


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A plan in a trial.

    Attributes:
        times_s: Seconds of its steps on the slowest rank.
        records: This rank's records of its steps.
    """

    planned: Planned
    times_s: list[float] = field(default_factory=list)
    records: list[Records] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of a step, the first ones left out."""
        return median(self.times_s[DROPPED_STEPS:])

    def tried(self, predicted_s: float) -> OtherPlan:
        """Return what is remembered of the plan."""
        words = self.planned.choice.words
        return OtherPlan(words=words, predicted_s=predicted_s, measured_s=self.seconds)


class Trial(ABC):
    """Runs plans in turns of `TRIAL_STEPS`; the first of them is in use already.

    A turn that takes longer than its share of `TRIALS_S` ends as soon as one step counts.
    """

    settles = False
    """Whether the plan that is kept is still to be ordered by measured durations."""

    def __init__(self, plans: Sequence[Planned]) -> None:
        self._turns = [Turn(planned=each) for each in plans]
        self._ended: list[Turn] = []

    @property
    def done(self) -> bool:
        return len(self._ended) == len(self._turns)

    @property
    def _late(self) -> bool:
        return sum(self._turns[len(self._ended)].times_s) > TRIALS_S / len(self._turns)

    def note(self, slowest_s: float, records: Records) -> bool:
        """Record a step: its seconds on the slowest rank, its tasks here. Return whether a turn has ended."""
        turn = self._turns[len(self._ended)]
        turn.times_s.append(slowest_s)
        turn.records.append(records)
        if ends := len(turn.times_s) >= (DROPPED_STEPS + 1 if self._late else TRIAL_STEPS):
            self._ended.append(turn)
        return ends

    @property
    def turn(self) -> Planned:
        """Plan to run from the next step on; after all turns the fastest one, with the times of all."""
        return self._kept if self.done else self._turns[len(self._ended)].planned

    @property
    def said(self) -> str:
        """Times of all plans, and which one is kept, in a sentence for the screen."""
        times = ", ".join(f"{milliseconds(each.seconds)} by {each.planned.name}" for each in self._ended)
        return f"tried for {self._length}: a step takes {times}: {self._verdict}"

    @property
    def lines(self) -> tuple[str, ...]:
        """The same, for the plan's file."""
        return (self.said,)

    def learned(self, planned: Planned, control: Control) -> Planned:
        """Return the plan that is kept with what the trial tells of others; all ranks call it together."""
        del control
        return planned

    @property
    @abstractmethod
    def _kept(self) -> Planned:
        """The fastest plan, with the times of all."""

    @property
    @abstractmethod
    def _verdict(self) -> str:
        """Which plan is kept."""

    @property
    def _ranked(self) -> list[Turn]:
        """Turns that have ended, the fastest plan's first."""
        return sorted(self._ended, key=lambda turn: turn.seconds)

    @property
    def _length(self) -> str:
        *others, last = (len(each.times_s) for each in self._ended)
        if set(others) <= {last}:
            return f"{last} steps each"
        return f"{', '.join(map(str, others))} and {last} steps"


class Trials(Trial):
    """Compares the plans that a search found.

    After `TRIALS_S` the turn that is running ends as soon as it can, and is the last. That time is the sum of
    what all ranks know of steps, so all ranks end after the same one.
    """

    settles = True

    def __init__(self, planned: Planned) -> None:
        first, plans = replace(planned, to_try=()), planned.plans + len(planned.to_try)
        to_try = [
            replace(first, choice=order.choice, plan=order.plan, number=number, plans=plans)
            for number, (order, _) in enumerate(planned.to_try, planned.number + 1)
        ]
        super().__init__([replace(first, plans=plans), *to_try])
        self._predicted_s = [planned.predicted_s, *(seconds for _, seconds in planned.to_try)]

    @property
    def done(self) -> bool:
        return len(self._ended) == len(self._turns) or (bool(self._ended) and self._late)

    @property
    def _spent_s(self) -> float:
        return sum(sum(turn.times_s) for turn in self._turns)

    @property
    def _late(self) -> bool:
        return self._spent_s > TRIALS_S

    @property
    def _kept(self) -> Planned:
        pairs = list(zip(self._ended, self._predicted_s, strict=False))
        tried = {turn.planned.number: turn.tried(predicted_s) for turn, predicted_s in pairs}
        kept = self._ranked[0].planned
        misses = {turn.planned.choice.schedule: turn.seconds / predicted_s for turn, predicted_s in pairs}
        won = tried.pop(kept.number)
        return replace(kept, learnt=replace(kept.learnt.of_trial(won, tried.values()), misses=misses))

    @property
    def lines(self) -> tuple[str, ...]:
        problem = self._turns[0].planned.problem
        predicted = [within(seconds, interval_s(problem, seconds)) for seconds in self._predicted_s]
        width = max(9, *map(len, predicted))
        rows = (
            f"  {turn.planned.number:>4}  {text:>{width}}  {milliseconds(turn.seconds):>9}  "
            f"{turn.planned.choice.words}"
            for turn, text in zip(self._ended, predicted, strict=False)
        )
        return (
            f"trials of {self._length}, time per whole step (update included):",
            f"  plan  {'predicted':>{width}}  {'measured':>9}",
            *rows,
            f"keeping {self._ranked[0].planned.name}{self._untried}",
        )

    @property
    def said(self) -> str:
        """The same with a line before it for every plan but the first, which was described when chosen."""
        described = [turn.planned for turn in self._ended[1:]]
        return "\n".join([*(f"Plan {each.number:<4}{each.choice.words}" for each in described), super().said])

    @property
    def _verdict(self) -> str:
        return f"keeping {self._ranked[0].planned.name}{self._untried}"

    @property
    def _untried(self) -> str:
        left = len(self._turns) - len(self._ended)
        return f"; {counted(left, 'plan')} not tried: these steps took {self._spent_s:.0f} s" if left else ""


class TriedMoves(Trial):
    """Compares a plan that moves something else, which is in use already, with the one before it.

    Both are ordered by measured durations, where schedules are.
    """

    def __init__(self, before: Planned, new: Planned) -> None:
        super().__init__([new, replace(before, plans=new.plans, lines=new.lines)])

    @property
    def _kept(self) -> Planned:
        kept, left = self._ranked
        predicted_s, (kept_s, left_s) = (
            kept.planned.predicted_s,
            (self._observed(turn).planned.predicted_s for turn in (kept, left)),
        )
        learnt = kept.planned.learnt.of_trial(
            kept.tried(predicted_s), [left.tried(predicted_s * left_s / kept_s)]
        )
        return replace(kept.planned, learnt=learnt)

    @property
    def _verdict(self) -> str:
        kept = self._ranked[0]
        return f"{'keeping' if kept is self._turns[0] else 'going back to'} {kept.planned.name}"

    def learned(self, planned: Planned, control: Control) -> Planned:
        """Return the plan that is kept with what the trial tells of the other; all ranks call it together.

        They plan replicas by the same prices. Moving that won is not remembered: nothing would be tried
        again, and a lucky turn would speak for it. An earlier trial between the same moves would tell the
        opposite.
        """
        faster, slower = map(self._observed, self._ranked)
        choices = slower.planned.choice, faster.planned.choice
        lost = tuple(each for each in planned.learnt.lost if not each.settles(*choices))
        still = choices[0].samples == choices[0].experts == "none"
        if planned.choice == self._turns[0].planned.choice and still:
            return planned.learning((), lost)
        own = [record for step in slower.records[DROPPED_STEPS:] for record in step]
        everyone = control.gather(own, "exchanging durations of the slower plan")
        records = [record for rank in everyone for record in rank]
        moves, trial = control.decided(lambda: _correction(slower, faster, records), "learning from a trial")
        return planned.learning(moves, (*lost, trial))

    def _observed(self, turn: Turn) -> Turn:
        """Return a turn whose plan is priced by the routing that was observed, whatever it moves."""
        evidence = self._turns[0].planned.problem.observed
        return replace(
            turn, planned=replace(turn.planned, problem=replace(turn.planned.problem, evidence=evidence))
        )


def _correction(
    slower: Turn, faster: Turn, records: Sequence[TaskRecord]
) -> tuple[tuple[MoveModel, ...], LostTrial]:
    """Return the price of the slower plan's own transfers, and by how much predictions err even so."""
    times = _prolonged(slower.planned, faster.planned, records)
    slower_s, faster_s = (
        prolonged_s(planned.problem, planned.choice, planned.plan, times) + closing_s(planned.problem)
        for planned in (slower.planned, faster.planned)
    )
    trial = LostTrial.of(
        slower.planned.choice,
        faster.planned.choice,
        predicted=slower_s / faster_s,
        measured=slower.seconds / faster.seconds,
    )
    file = slower.planned.file
    before = {move.op: move.in_steps for move in (file.moves if file else ())}
    now = before | {op: ratio * before.get(op, 1.0) for op, ratio in times.items()}
    return tuple(MoveModel(op=op, in_steps=factor) for op, factor in now.items()), trial


def _prolonged(planned: Planned, other: Planned, records: Sequence[TaskRecord]) -> Mapping[str, float]:
    """Return measured over predicted seconds of transfers that only `planned` has, by op.

    What both plans send a profile has measured, and a trial repeats it under other conditions. `MeasuredCost`
    reads both alike.
    """
    shared = {task.op for task in other.plan.graph.tasks}
    own: dict[str, list[Task]] = {}
    for task in planned.plan.graph.tasks:
        if task.axes and task.op not in shared:
            own.setdefault(task.op, []).append(task)
    if not own:
        return {}
    timeline, ratios = predicted_timeline(planned.problem, planned.choice, planned.plan), {}
    measured, predicted = (
        MeasuredCost.from_records(each, lambda _: 0.0, mesh)
        for each, mesh in ((records, planned.problem.workload.mesh), (timeline.records(), timeline.mesh))
    )
    for op, tasks in own.items():
        took_s, expected_s = sum(map(measured, tasks)), sum(map(predicted, tasks))
        if took_s > 0 and expected_s > 0:
            ratios[op] = took_s / expected_s
    return ratios
