"""What the simulator promises, from costs measured apart from the run that it predicts.

Computation beside traffic is slower than alone: the kernel moves the bytes on the same cores. Traffic beside
computation is a little slower, too. So both are measured both ways, and a task costs what its share of
company says, which in turn depends on the simulated timeline: a fixed point, found by simulating again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from penstock.cost import StepCost
from penstock.graph import Phase, Task
from penstock.mesh import Mesh, Seconds
from penstock.plan.predict import Shares, settle
from penstock.schedule import StepPlan
from penstock.simulate import simulate
from penstock.trace import TaskRecord


@dataclass(frozen=True)
class ComputeTimes:
    """Durations of the compute tasks of a step, measured on all ranks at once: task -> [rounds, ranks]."""

    seconds: Mapping[Task, npt.NDArray[np.float64]]

    @staticmethod
    def from_records(records: Iterable[TaskRecord]) -> ComputeTimes:
        """Records of all ranks and rounds; every task must have run in each."""
        found: dict[Task, dict[tuple[int, int], float]] = defaultdict(dict)
        for record in records:
            if record.lane.computes:
                found[record.task][record.step, record.rank] = record.duration_s
        return ComputeTimes({task: _table(durations) for task, durations in found.items()})

    def typical(self) -> dict[tuple[int, str, Phase], float]:
        """Median by kind: tasks of one layer, op and phase differ in microbatch and chunk only."""
        kinds: dict[tuple[int, str, Phase], list[npt.NDArray[np.float64]]] = defaultdict(list)
        for task, seconds in self.seconds.items():
            kinds[task.layer, task.op, task.phase].append(seconds)
        return {kind: float(np.median(np.stack(tables))) for kind, tables in kinds.items()}


def _table(durations: Mapping[tuple[int, int], float]) -> npt.NDArray[np.float64]:
    rounds, ranks = (sorted({key[axis] for key in durations}) for axis in (0, 1))
    return np.array([[durations[number, rank] for rank in ranks] for number in rounds])


class PredictedCost:
    """Transfers from fitted links; computation as measured alone and beside traffic.

    slowed: what a transfer beside computation takes, over what it takes alone.
    """

    def __init__(self, transfers: StepCost, alone: ComputeTimes, beside: ComputeTimes, slowed: float) -> None:
        self.transfers, self.slowed, self._beside = transfers, slowed, beside
        self._typical_alone, self._typical_beside = alone.typical(), beside.typical()
        self.rounds = len(next(iter(beside.seconds.values())))

    def __call__(self, task: Task) -> float:
        """Seconds of a task in full company: what an order should be made for."""
        return self.seconds(task, 1.0)

    def seconds(self, task: Task, share: float) -> float:
        """Seconds of a task that has company for `share` of its time."""
        if not task.lane.computes:
            return self.transfers(task) * (1 + share * (self.slowed - 1))
        kind = (task.layer, task.op, task.phase)
        alone_s, beside_s = self._typical_alone[kind], self._typical_beside[kind]
        return alone_s + share * (beside_s - alone_s)

    def drawn(self, task: Task, share: float, number: int) -> float | Seconds:
        """The same with the ups and downs that the ranks showed in measured round `number`, [ranks]."""
        seconds = self.seconds(task, share)
        if not task.lane.computes:
            return seconds
        typical_s = self._typical_beside[task.layer, task.op, task.phase]
        scattered: Seconds = seconds * (1 + share * (self._beside.seconds[task][number] / typical_s - 1))
        return scattered


def predict(plan: StepPlan, cost: PredictedCost, ranks: Mesh) -> float:
    """Iteration in seconds: the mean over draws, since every collective waits for the slowest rank."""
    shares = settle(plan, cost.seconds)
    draws = (partial(_drawn, cost, shares, number) for number in range(cost.rounds))
    return float(np.mean([simulate(plan.schedule, plan.graph, drawn, ranks).iteration_s for drawn in draws]))


def _drawn(cost: PredictedCost, shares: Shares, number: int, task: Task) -> float | Seconds:
    return cost.drawn(task, shares[task], number)
