"""What the simulator promises, from costs measured apart from the run that it predicts."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost import AlphaBeta, ClusterConfig, MeasuredCost, StepCost
from penstock.graph import Lane, Task
from penstock.schedule import StepPlan
from penstock.simulate import Ranks, simulate


@dataclass(frozen=True, kw_only=True)
class FittedCluster(ClusterConfig):
    """Links as they were measured; the argument conventions are those of ClusterConfig."""

    dispatch: AlphaBeta
    reduce: AlphaBeta

    def __post_init__(self) -> None:
        """Measured numbers need no check."""

    def all_to_all(self, ranks: int) -> AlphaBeta:
        del ranks  # measured in the very group that will be used
        return self.dispatch

    def all_reduce(self, ranks: int) -> AlphaBeta:
        del ranks
        return self.reduce


@dataclass(frozen=True)
class PredictedCost:
    """Transfers from fitted links, computation from a run of the same tasks without a network."""

    transfers: StepCost
    computation: MeasuredCost

    def __call__(self, task: Task) -> float:
        return self.computation(task) if task.lane is Lane.COMPUTE else self.transfers(task)


def predict(plan: StepPlan, cost: PredictedCost, ranks: Ranks) -> float:
    """Iteration in seconds."""
    return simulate(plan.schedule, plan.graph, cost, ranks).iteration_s
