"""Runs real steps at the end of a profile: what tasks and transfers take there, and what stays unexplained.

Every round runs the sample by some real schedules over the network, and the same steps without a network. A
compute task is compared with itself in the silent step of the same plan and round, a transfer with the line
of its collective, and a whole step with its simulation from both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.cost import ClusterConfig, ClusterFile, StepCost, Workload
from penstock.cost.contention import MOST_SCATTER, SOLO, Contention, Sighting, fit_contention, fit_steps
from penstock.cost.measured import scattered
from penstock.decision import Decision
from penstock.features.dispatch import DISPATCHES
from penstock.graph import Task
from penstock.mesh import Seconds
from penstock.plan import Problem
from penstock.plan.predict import alone, shares_of, simulated_s
from penstock.schedule import StepPlan
from penstock.timing import Cost
from penstock.topology import Control
from penstock.trace import TaskRecord

MOST_PLANS = 4
TRANSFER, COMPUTE = "transfers", "computation"

Run = Callable[[StepPlan], tuple[float, list[TaskRecord]]]
"""Runs a step, together with all ranks: its seconds, and when its tasks ran here."""

Kind = tuple[str, str]
"""Op and phase of computation; collective and lane of transfers."""


@dataclass(frozen=True)
class RanStep:
    """One step on this rank.

    Attributes:
        iteration_s: Seconds of the whole step.
        spans_T2: Seconds at which every task of the plan's graph started and ended.
    """

    iteration_s: float
    spans_T2: Seconds

    @staticmethod
    def of(iteration_s: float, records: Iterable[TaskRecord], plan: StepPlan) -> RanStep:
        spans = {record.task: (record.start_s, record.end_s) for record in records}
        return RanStep(iteration_s, np.array([spans[task] for task in plan.graph.tasks]))


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The steps of one plan on all ranks.

    Attributes:
        spans_KRT2: Seconds at which tasks started and ended, [rank, round, task, end].
        quiet_KRT: Durations of the same tasks in steps without a network, seconds.
        iterations_R: Seconds of every round's step on the slowest rank.
    """

    plan: StepPlan
    choice: Decision
    spans_KRT2: Seconds
    quiet_KRT: Seconds
    iterations_R: Seconds

    def durations(self) -> Seconds:
        """Return the seconds of every task, [rank, round, task]."""
        durations_KRT: Seconds = self.spans_KRT2[..., 1] - self.spans_KRT2[..., 0]
        return durations_KRT

    def shares(self) -> Seconds:
        """Return the contention of every task, see `shares_of`, [rank, round, task]."""
        tasks = self.plan.graph.tasks
        shares_KRT = np.empty(self.spans_KRT2.shape[:3])
        for place in np.ndindex(*shares_KRT.shape[:2]):
            spans = ((float(start), float(end)) for start, end in self.spans_KRT2[place])
            by_task = shares_of(dict(zip(tasks, spans, strict=True)))
            shares_KRT[place] = [by_task[task] for task in tasks]
        return shares_KRT


def worth_running(plans: Sequence[tuple[str, StepPlan]]) -> list[int]:
    """Return the places of the plans that show most: the first, and per schedule that with the most tasks.

    Args:
        plans: The plans, each with the name of its schedule.
    """
    largest: dict[str, int] = {}
    for place, (name, plan) in enumerate(plans):
        best = largest.get(name)
        if best is None or len(plan.graph.tasks) > len(plans[best][1].graph.tasks):
            largest[name] = place
    return list(dict.fromkeys([0, *largest.values()]))[:MOST_PLANS]


class RealSteps:
    """Runs steps over the network by some plans, and notes them beside those without a network."""

    def __init__(
        self, plans: Sequence[tuple[StepPlan, Decision]], run: Run, run_quietly: Run | None, control: Control
    ) -> None:
        """Take the plans to run.

        Args:
            run: Runs one step of a plan over the network.
            run_quietly: Runs one without a network; None where computation is slept, and takes as long with a
                network.
        """
        self._plans, self._run, self._run_quietly, self._control = plans, run, run_quietly, control
        self._noted: list[list[tuple[RanStep, RanStep]]] = [[] for _ in plans]

    def round(self, late: Callable[[], bool], *, counts: bool = True) -> None:
        """Run one step of every plan, and one without a network; all ranks together.

        Args:
            late: Returns whether time is up, as all ranks agree; no other plan follows then.
            counts: Whether the steps are noted.
        """
        for (plan, _), noted in zip(self._plans, self._noted, strict=True):
            if late():
                return
            quiet = None if self._run_quietly is None else RanStep.of(*self._run_quietly(plan), plan)
            real = RanStep.of(*self._run(plan), plan)
            if counts:
                noted.append((quiet or real, real))

    def gathered(self) -> list[Watched]:
        """Return what was noted on all ranks, of the plans that ran."""
        everyone = self._control.gather(self._noted, "exchanging the times of real steps")
        return [
            _watched(plan, choice, [rank[number] for rank in everyone])
            for number, (plan, choice) in enumerate(self._plans)
            if self._noted[number]
        ]


def _watched(
    plan: StepPlan, choice: Decision, everyone: Sequence[Sequence[tuple[RanStep, RanStep]]]
) -> Watched:
    quiet = np.array([[pair[0].spans_T2 for pair in rank] for rank in everyone])
    real = np.array([[pair[1].iteration_s for pair in rank] for rank in everyone])
    return Watched(
        plan=plan,
        choice=choice,
        spans_KRT2=np.array([[pair[1].spans_T2 for pair in rank] for rank in everyone]),
        quiet_KRT=quiet[..., 1] - quiet[..., 0],
        iterations_R=real.max(axis=0),
    )


# ---- from steps to factors ---------------------------------------------------------------------------------


def with_steps(
    file: ClusterFile, watched: Sequence[Watched], problem_of: Callable[[ClusterFile], Problem]
) -> ClusterFile:
    """Return the file with what real steps tell about its tasks, its transfers, and whole steps.

    Args:
        problem_of: Returns the step that ran, on the cluster of a file.
    """
    problem = alone(problem_of(file))

    def step_cost(each: Watched) -> Cost:
        return problem.cost(each.choice, each.plan.shape)

    # Sightings of compute tasks, against steps without a network, are medians over ranks.
    sightings: dict[Kind, list[Sighting]] = defaultdict(list)
    for each in watched:
        quiet_KT = np.median(each.quiet_KRT, axis=1)
        real_KT, shares_KT = (np.median(x, axis=1) for x in (each.durations(), each.shares()))
        for number, task in _numbered(each.plan, computes=True):
            quiet_K = quiet_KT[:, number]
            if quiet_K.min() > 0:
                sightings[task.op, task.phase].append(
                    Sighting(
                        modelled_s=float(np.median(quiet_K)),
                        ratio=float(np.median(real_KT[:, number] / quiet_K)),
                        share=float(np.median(shares_KT[:, number])),
                    )
                )

    compute = Fits(COMPUTE, sightings)
    transfers = Fits(TRANSFER, transferred(watched, step_cost, problem.workload))
    tasks = []
    for model in file.tasks:
        contention = compute.of((model.op, model.phase))
        alpha_s, scale = contention.solo * model.alpha_s, contention.solo * model.scale
        tasks.append(replace(model, alpha_s=alpha_s, scale=scale, contended=contention.contended))
    doubts = (*compute.doubts, *transfers.doubts)
    file = replace(with_transfers(file, transfers), tasks=tuple(tasks), doubts=doubts)
    now = problem_of(file)
    expected = [simulated_s(now, each.choice, each.plan) for each in watched]
    return with_whole_steps(file, watched, expected)


def with_transfers(file: ClusterFile, found: Fits) -> ClusterFile:
    """Return the file with what real steps tell about its links."""
    links = []
    for link in file.links:
        contention = found.of(_kind(link.collective, link.lane))
        links.append(replace(link, in_steps=contention.solo, contended=contention.contended))
    return replace(file, links=tuple(links), contended_transfers=found.usual.contended)


class Fits:
    """Factors by kind of task. A kind whose factors cannot be fitted has those of its whole side."""

    def __init__(self, side: str, seen: Mapping[Kind, Sequence[Sighting]]) -> None:
        everything = [each for kind in seen.values() for each in kind]
        self.doubts: list[str] = []
        between = "." if side == COMPUTE else " "  # as tables name a task, and a collective on its lane
        self.usual = self._trusted(f"all {side}", fit_contention(everything)) or Contention()
        self._found = {
            kind: self._trusted(between.join(kind), fit_contention(sightings, self.usual.contended))
            or self.usual
            for kind, sightings in seen.items()
        }

    def of(self, kind: Kind) -> Contention:
        """Return the factors of a kind; those of all kinds for one that never ran."""
        return self._found.get(kind, self.usual)

    def _trusted(self, what: str, found: Contention | None) -> Contention | None:
        if found is None or not found.words:
            return found
        self.doubts.append(scattered(what, found.words))
        return None


def transferred(
    watched: Sequence[Watched], cost_of: Callable[[Watched], Cost], work: Workload
) -> dict[Kind, list[Sighting]]:
    """Compare every transfer with its line, on the rank that came last in the slowest group.

    The other ranks of the group wait for that one, and see more than the transfer; the line, too, is that of
    the slowest group. Returns sightings by kind of transfer.

    Args:
        cost_of: Returns the seconds of the tasks that ran, without contention.
        work: The sizes of the steps, for what their tasks are.
    """
    sightings: dict[Kind, list[Sighting]] = defaultdict(list)
    for steps in watched:
        cost, sizes = cost_of(steps), StepCost(steps.plan.shape, work, ClusterConfig())
        durations_KRT, shares_KRT = steps.durations(), steps.shares()
        for number, task in _numbered(steps.plan, computes=False):
            modelled_s, collective = float(np.max(cost(task))), sizes.work(task).collective
            if not collective or modelled_s <= 0:
                continue
            rounds, mesh = range(durations_KRT.shape[1]), work.mesh
            last_R = [mesh.last_to_come(durations_KRT[:, each, number], task.axes) for each in rounds]
            sightings[_kind(collective, str(task.lane))].append(
                Sighting(
                    modelled_s=modelled_s,
                    ratio=float(np.median(durations_KRT[last_R, rounds, number])) / modelled_s,
                    share=float(np.median(shares_KRT[last_R, rounds, number])),
                )
            )
    return sightings


def _numbered(plan: StepPlan, *, computes: bool) -> Iterator[tuple[int, Task]]:
    return ((n, task) for n, task in enumerate(plan.graph.tasks) if task.lane.computes is computes)


def _kind(collective: str, lane: str) -> Kind:
    """Return a transfer's kind: legs of dispatches, and an uneven exchange, are all-to-alls."""
    is_exchange = collective in DISPATCHES or collective in ("leg", "uneven_all_to_all")
    return "all_to_all" if is_exchange else collective, lane


def with_whole_steps(
    file: ClusterFile, watched: Sequence[Watched], expected_s: Sequence[float]
) -> ClusterFile:
    """Return the file with what whole steps tell beyond their tasks, replacing what earlier ones told.

    Args:
        expected_s: Seconds that this file predicts for every plan.
    """
    pairs = zip(watched, expected_s, strict=True)
    steps = fit_steps([[float(seconds) / one_s for seconds in each.iterations_R] for each, one_s in pairs])
    why = ""  # steps do not correct predictions
    if not SOLO[0] <= steps.ratio <= SOLO[1]:
        why = f"real steps took {steps.ratio:.2f} times as long as predicted, too far off to correct it"
    elif steps.high / steps.ratio - 1 > 2 * MOST_SCATTER:
        width = 100 * (steps.high / steps.ratio - 1)
        why = f"real steps scatter by {width:.0f} %, so predictions have no interval"
    return replace(file, doubts=(*file.doubts, why), steps=None) if why else replace(file, steps=steps)
