"""What a run learns from a trial of moving: the price of its transfers, and by how much predictions err."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.autotune.deciding import decided
from penstock.autotune.planned import Planned
from penstock.cost import MeasuredCost
from penstock.cost.cluster_file import MoveModel
from penstock.graph import Task
from penstock.plan.lost import LostTrial
from penstock.plan.predict import closing_s, predicted_timeline, prolonged_s
from penstock.topology import Control
from penstock.trace import TaskRecord


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
