"""The predicted time of a step: the simulated iteration, with the influence of tasks on each other.

Computation beside traffic is slower than alone: the kernel moves the bytes on the same cores. Traffic beside
computation is a little slower, too. A task's cost therefore depends on its share of contention, which in turn
depends on the simulated timeline: a fixed point, found by repeated simulation. And the times of ranks
scatter: a collective waits for the slowest, so a step with scattered tasks is longer than one with their
means. Last, real steps at the end of the profile say how much longer a step takes than simulated, and within
which interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.cost import ClusterFile, ProfiledCluster
from penstock.decision import Decision
from penstock.features.sharded_optimizer.feature import GATHERS, UPDATE_COPIES, UPDATES
from penstock.graph import Phase, Task
from penstock.mesh import Mesh, Seconds
from penstock.ops import Op, Work
from penstock.plan.memory import trained_bytes
from penstock.plan.problem import ALL_AS_LONG, Problem
from penstock.schedule import StepPlan
from penstock.timing import Cost, LowerBound, Timeline, iteration_s, simulate

PASSES = 3
DRAWS = 4
DRAWN_RANKS = 256
"""With so many ranks that draws times ranks would exceed this number, fewer draws are made."""

LEAST_FACTOR = 0.1
"""The least time of a task as a part of its mean, however much tasks scatter."""

Shares = Mapping[Task, Any]
"""The part of a task's time in which the other side, computation or transfers, is busy on the same rank: one
number for all ranks, or one for each."""

ContendedCost = Callable[[Task, Any], Any]
"""Seconds of a task that has contention for the given share of its time."""


def predict_s(problem: Problem, choice: Decision, plan: StepPlan) -> float:
    """Return the seconds of an iteration. Deterministic: random draws have a fixed seed."""
    return step_ratio(problem) * simulated_s(problem, choice, plan)


def predicted_timeline(problem: Problem, choice: Decision, plan: StepPlan) -> Timeline:
    """Return when every task is expected to run: as long as `predict_s` says, but without scatter."""
    cost, issuing = task_cost(problem, choice, plan), problem.issuing
    timeline = simulate(plan.schedule, plan.graph, cost, problem.mesh, issuing)
    return timeline.stretched(predict_s(problem, choice, plan) / timeline.iteration_s)


def prolonged_s(problem: Problem, choice: Decision, plan: StepPlan, times: Mapping[str, float]) -> float:
    """Return the seconds of an iteration in which tasks of some ops take `times` as long as predicted.

    Replicas stay those that the problem's prices ask for.

    Args:
        times: By op, how many times as long its tasks take; 1 for all others.
    """
    cost = task_cost(problem, choice, plan)
    costs = cost, lambda task: cost(task) * times.get(task.op, 1.0)
    issuing = problem.issuing
    before_s, now_s = (iteration_s(plan.schedule, plan.graph, each, problem.mesh, issuing) for each in costs)
    return predict_s(problem, choice, plan) * now_s / before_s


def adding_s(problem: Problem, choice: Decision, plan: StepPlan) -> float:
    """Return the seconds of a pass whose gradients are only added to those of others: it updates nothing,
    and its parameters were gathered before, if they stay."""
    times = adding(problem)
    return prolonged_s(problem, choice, plan, times) if times else predict_s(problem, choice, plan)


def adding(problem: Problem) -> dict[str, float]:
    """Return, by op, how many times as long its tasks take in a pass as in `adding_s`; 1 for all others."""
    if problem.shape.updating is None:
        return {}
    once = () if problem.workload.state.fully_sharded else GATHERS
    return dict.fromkeys((*UPDATES, *once, Op.NORM), 0.0)


def task_cost(problem: Problem, choice: Decision, plan: StepPlan) -> Cost:
    """Return the cost of every task in the predicted timeline: at its own share of contention."""
    shape, uncontended = plan.shape, alone(problem)
    if uncontended is problem:
        return problem.cost(choice, shape)
    apart = uncontended.cost(choice, shape)
    beside = replace(problem, cluster=problem.cluster.contended(1.0)).cost(choice, shape)

    def cost(task: Task, share: float) -> Any:
        solo_s = apart(task)
        return solo_s + share * (beside(task) - solo_s)

    return _at(cost, settle(plan, cost, problem.mesh, problem.paces))


def _measured(problem: Problem) -> ClusterFile | None:
    """Return what was measured of the cluster; None where only rates are known."""
    return problem.cluster.file if isinstance(problem.cluster, ProfiledCluster) else None


def step_ratio(problem: Problem) -> float:
    """Return how many times as long as simulated the measured steps took; 1 where none were measured."""
    file = _measured(problem)
    return 1.0 if file is None or file.steps is None else file.steps.ratio


def bound(
    problem: Problem, choice: Decision, plan: StepPlan, times: Mapping[str, float] = ALL_AS_LONG
) -> LowerBound:
    """Return the lower bound for any order of these tasks: costs without contention, times `step_ratio`.

    Args:
        times: By op, how many times as long its tasks take; 1 for all others.
    """
    return alone(problem).bound(choice, plan, times).times(step_ratio(problem))


def interval_s(problem: Problem, predicted_s: float) -> tuple[float, float] | None:
    """Return the range in which a step of this prediction is expected; None without measured steps."""
    file = _measured(problem)
    return None if file is None or file.steps is None else file.steps.around(predicted_s)


def simulated_s(problem: Problem, choice: Decision, plan: StepPlan) -> float:
    """Return the seconds of an iteration by tasks and links alone, without `step_ratio`."""
    cost, ranks, issuing = task_cost(problem, choice, plan), problem.mesh, problem.issuing
    seeds, jitter = range(_draws(problem)), _jitter(problem)
    costs = [_drawn(cost, jitter, ranks.world_size, seed) for seed in seeds] or [cost]
    return float(np.mean([iteration_s(plan.schedule, plan.graph, each, ranks, issuing) for each in costs]))


def closing_s(problem: Problem) -> float:
    """Return the seconds from gradients to new parameters: norm, clipping and AdamW on the slowest rank.

    They follow an iteration that leaves whole gradients; a step that updates has them among its tasks.
    """
    if problem.shape.updating is not None:
        return 0.0
    work = Work(copied_bytes=UPDATE_COPIES * sum(trained_bytes(problem).values()))
    seconds: float = alone(problem).cluster.task_s(Op.UPDATE, Phase.BACKWARD, work)
    return seconds * max(problem.slowness, default=1.0)


def timelines(problem: Problem) -> int:
    """Return how many timelines `predict_s` simulates for one plan."""
    return (_draws(problem) or 1) + (0 if alone(problem) is problem else PASSES)


def _draws(problem: Problem) -> int:
    """Return how many times scattered tasks are drawn; 0 where tasks do not scatter."""
    return max(1, min(DRAWS, DRAWN_RANKS // problem.mesh.world_size)) if _jitter(problem) else 0


def _jitter(problem: Problem) -> float:
    return 0.0 if (file := _measured(problem)) is None else file.jitter


def alone(problem: Problem) -> Problem:
    """Return the problem with no task slowed by contention: its costs are below those of every prediction."""
    if not isinstance(problem.cluster, ProfiledCluster) or not problem.cluster.has_contention:
        return problem
    return replace(problem, cluster=problem.cluster.contended(0.0))


def settle(plan: StepPlan, cost: ContendedCost, ranks: Mesh, paces: tuple[float, ...] = ()) -> Shares:
    """Return every task's share of contention in the timeline that results from durations with these shares.

    Args:
        paces: The pace of every rank, see Problem; only ranks of one pace have the same contention.
    """
    shares: Shares = dict.fromkeys(plan.graph.tasks, 1.0)
    for _ in range(PASSES):
        timeline = simulate(plan.schedule, plan.graph, _at(cost, shares), ranks)
        if not paces:
            shares = contention(timeline)
            continue
        # The contention on one rank of every pace (to a tenth), as that of all ranks of the pace.
        _, firsts, pace_of = np.unique(np.round(paces, 1), return_index=True, return_inverse=True)
        pace_shares = [contention(timeline, int(rank)) for rank in firsts]
        shares = {task: np.array([each[task] for each in pace_shares])[pace_of] for task in pace_shares[0]}
    return shares


def _at(cost: ContendedCost, shares: Shares) -> Cost:
    return lambda task: cost(task, shares[task])


def contention(timeline: Timeline, rank: int = 0) -> dict[Task, float]:
    """Return, for every task, the share of its time in which the other side was busy on this rank."""
    times = timeline.times
    return shares_of({task: (float(i.start[rank]), float(i.end[rank])) for task, i in times.items()})


def shares_of(spans: Mapping[Task, tuple[float, float]]) -> dict[Task, float]:
    """Return every task's share of contention, from the moments at which each task began and ended."""
    computes = {task: task.lane.computes for task in spans}
    busy = {
        side: _union(span for task, span in spans.items() if computes[task] is side) for side in (True, False)
    }
    shares = {}
    for task, (start, end) in spans.items():
        moments, busy_s = busy[not computes[task]]
        common = np.interp(end, moments, busy_s) - np.interp(start, moments, busy_s)
        shares[task] = float(min(1.0, common / (end - start))) if end > start else 0.0
    return shares


def _union(spans: Iterable[tuple[float, float]]) -> tuple[Seconds, Seconds]:
    """Return moments and the busy seconds of a side before each of them; its lanes may overlap."""
    moments, busy_s = [0.0], [0.0]
    for begin, end in sorted(spans):
        start = max(begin, moments[-1])
        if end > start:
            moments += [start, end]
            busy_s += [busy_s[-1], busy_s[-1] + end - start]
    return np.array(moments), np.array(busy_s)


def _drawn(cost: Cost, jitter: float, ranks: int, seed: int) -> Cost:
    """Return `cost` with every compute task on every rank made shorter or longer by chance."""
    rng = np.random.default_rng(seed)

    def drawn(task: Task) -> Any:
        if not task.lane.computes:
            return cost(task)
        return cost(task) * np.maximum(LEAST_FACTOR, rng.normal(1.0, jitter, ranks))

    return drawn
