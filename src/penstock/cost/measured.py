"""Costs read off a measured run: the median duration of every kind of task."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from statistics import median

import numpy as np

from penstock.graph import Phase, Task
from penstock.mesh import Mesh, Seconds
from penstock.timing import TaskRecord
from penstock.words import counted

Kind = tuple[int, str, Phase]
"""Tasks of one layer, op and phase are alike: they differ in microbatch and chunk only."""


@dataclass(frozen=True)
class MeasuredCost:
    """Seconds per kind of task; a task of a kind that never ran costs what `fallback` says.

    Attributes:
        by_rank: The seconds on every rank, arrays [ranks], where they are known; those of a collective are
            its group's.
    """

    seconds: dict[Kind, float]
    fallback: Callable[[Task], float]
    by_rank: dict[Kind, Seconds] = field(default_factory=dict)

    def __call__(self, task: Task) -> float:
        kind = (task.layer, task.op, task.phase)
        return self.seconds[kind] if kind in self.seconds else self.fallback(task)

    def on_ranks(self, task: Task) -> float | Seconds:
        """Return seconds on every rank, [ranks]; one number where all take equally long.

        Another rank, or group, may be the slowest one in every layer: the sum over layers of the slowest
        one's seconds is then longer than what any rank computes, or sends.
        """
        measured = self.by_rank.get((task.layer, task.op, task.phase))
        return self(task) if measured is None else measured

    @staticmethod
    def from_records(
        records: Iterable[TaskRecord], fallback: Callable[[Task], float], mesh: Mesh
    ) -> MeasuredCost:
        """Read costs off records: the median over tasks and steps on the slowest rank or group.

        All others wait for it. A collective lasts on a rank as long as that rank waits for the
        last one of its group to arrive; only the last one sees the transfer alone. So the shortest duration
        in every group counts.
        """
        group_of = cache(mesh.group)
        met = [(each, (each.step, each.task, group_of(each.rank, each.task.axes))) for each in records]
        shortest: dict[tuple[int, Task, int], float] = {}
        for record, meeting in met:
            shortest[meeting] = min(shortest.get(meeting, inf), record.duration_s)
        seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for record, meeting in met:
            task = record.task
            seconds[(task.layer, task.op, task.phase), record.rank].append(shortest[meeting])
        by_rank = {kind: np.zeros(mesh.world_size) for kind, _ in seconds}
        for (kind, rank), each in seconds.items():
            by_rank[kind][rank] = median(each)
        return MeasuredCost({kind: float(each.max()) for kind, each in by_rank.items()}, fallback, by_rank)


# ---- what measurements could not tell, in words: in full in a file, in one sentence where a plan is shown -


STOPPED = "measuring was stopped early, so all of these figures are rough"
OVERRAN = "measuring took too long and was ended: what it has not reached is estimated by rates"
"""A machine was so busy that not even the least was measured in the time that it may take."""

IN_A_RUN = "Measure longer (plan.profile_s) or while it is idle; cluster.json lists them (doubts)"


_DIFFERS = re.compile(r"(.+): not corrected by real steps, since it differs by (\d+ %) from step to step")


def scattered(what: str, why: str) -> str:
    """Return the doubt about work of which real steps tell nothing."""
    return f"{what}: not corrected by real steps, since {why}"


def listed(doubts: Sequence[str]) -> tuple[str, ...]:
    """Return all doubts, to show with measurements; work that differs between steps is named in one line."""
    differing = [match for doubt in doubts if (match := _DIFFERS.fullmatch(doubt))]
    if len(differing) < 2:
        return tuple(doubts)
    works = ", ".join(f"{match[1]} ({match[2]})" for match in differing)
    line = f"not corrected by real steps, in which durations scatter: {works}"
    return (line, *(doubt for doubt in doubts if not _DIFFERS.fullmatch(doubt)))


def summary(doubts: Sequence[str], *, intervals: bool, remedy: str = IN_A_RUN) -> tuple[str, ...]:
    """Return one labelled line for all doubts; () if there are none.

    Args:
        intervals: Whether predictions have intervals.
        remedy: The advice for where the plan is shown.
    """
    ended = (f"Caution  {OVERRAN}. {remedy}",) if OVERRAN in doubts else ()
    scattered = [doubt for doubt in doubts if doubt != OVERRAN]
    if not scattered:
        return ended
    rough = "so the prediction is rough" if intervals else "so the prediction is rough and has no interval"
    return (
        *ended,
        f"Caution  {counted(len(scattered), 'measurement')} scattered or contradicted real steps, {rough}: "
        f"another program may have used the machine. {remedy}",
    )
