"""Refines a plan while training: its order by measured durations, its size of all-reduce chunks by a tuner.

Every sample of FlowMoE's tuner is some steps with one size. Rank 0 asks the tuner and makes the plan; all
ranks switch after the same step. The time of a step is that of the slowest rank, which every rank receives
anyway, so ranks communicate only at the end of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median

from penstock.autotune.planned import Order, Planned
from penstock.cost import MeasuredCost
from penstock.cost.measured import Kind
from penstock.decision import Decision
from penstock.ops.core import kind_of
from penstock.plan import Problem
from penstock.plan.plan_config import DROPPED_STEPS, PlanConfig
from penstock.plan.tuner import Sample, SizeRange, Tuner, build_tuner
from penstock.runtime import PipelinedStack
from penstock.schedule import SCHEDULES, StepPlan, plan_step
from penstock.step import StepShape
from penstock.timing import Cost, iteration_s
from penstock.topology import Control
from penstock.trace import TaskRecord
from penstock.words import counted, mib, milliseconds


def refine(
    stack: PipelinedStack, planned: Planned, records: Sequence[TaskRecord]
) -> tuple[Planned, dict[Kind, float]]:
    """Let a stack run the same graph, ordered by the same rule with measured durations.

    Results do not change, only waiting does.

    Args:
        records: This rank's records; all ranks exchange theirs, so that all use the same order.

    Returns:
        The plan in its new order, and the measured seconds by kind of task.
    """
    choice, even = planned.choice, planned.seeing(None).problem  # ranks order it by themselves
    everyone = stack.machinery.control.gather(list(records), "exchanging measured durations")
    mesh = stack.machinery.layout.mesh
    cost = MeasuredCost.from_records(chain(*everyone), even.cost(choice, planned.plan.shape), mesh)
    order = SCHEDULES[choice.schedule].order(stack.plan.graph, cost, choice)
    stack.adopt(replace(stack.plan, schedule=order))
    return replace(planned, plan=stack.plan), cost.seconds


PURPOSE = "choosing a size of all-reduce chunks"
TUNING_S = 3600.0
"""Seconds of all steps of a search for a size, after which no other size is tried."""
STARTS = 9
"""Number of sizes that are simulated before the first one is run."""


def sized(problem: Problem, choice: Decision, kinds: dict[Kind, float]) -> StepPlan:
    """Plan the choice, ordered by the measured times of all tasks but those that its size of chunks changes.

    Args:
        kinds: Measured seconds by kind of task; those of reductions hold for another size and do not count.
    """
    return plan_step(choice, problem.uncut(choice), problem.gradients, _costs(problem, choice, kinds))


def best_simulated(problem: Problem, choice: Decision, sizes: SizeRange, kinds: dict[Kind, float]) -> int:
    """Return the size with the shortest simulated step, with which a search had better begin.

    Args:
        kinds: Measured seconds by kind of task, as for `sized`.
    """

    def simulated_s(size_bytes: int) -> float:
        plan = sized(problem, replace(choice, all_reduce_chunk_bytes=size_bytes), kinds)
        cost = _costs(problem, choice, kinds)(plan.shape)
        return iteration_s(plan.schedule, plan.graph, cost, problem.mesh, problem.issuing)

    places = (number / (STARTS - 1) for number in range(STARTS))
    return min(dict.fromkeys([choice.all_reduce_chunk_bytes, *map(sizes.at, places)]), key=simulated_s)


def _costs(problem: Problem, choice: Decision, kinds: dict[Kind, float]) -> Callable[[StepShape], Cost]:
    others = {kind: seconds for kind, seconds in kinds.items() if kind_of(kind[1]) is None}
    return lambda cut: MeasuredCost(others, problem.cost(choice, cut))


class Tuning:
    """One search for the best size, beginning with the most promising one by simulation.

    `turn` is called by all ranks together: at the beginning, and whenever `note` says that a sample is
    complete. It returns the plan to run from then on. After `TUNING_S`, the sum of what all ranks know of
    steps, a sample ends as soon as one step counts, and is the last.

    Args:
        kinds: Measured seconds by kind of task.

    Attributes:
        best: The best sample; None until the search has ended.
    """

    def __init__(
        self, config: PlanConfig, planned: Planned, kinds: dict[Kind, float], control: Control, seed: int
    ) -> None:
        assert config.tuner is not None, "plan.tuner is set"
        self._config, self._planned, self._kinds, self._control = config, planned, kinds, control
        self._problem = planned.seeing(None).problem  # quick, since the other ranks wait
        self._times: list[float] = []
        self._spent_s = 0.0
        self._tuner: Tuner | None = None
        if control.rank == 0:
            reduced = planned.problem.gradients.of_form(planned.choice.form)
            sizes = SizeRange.of(tuple(chain(*reduced.by_kind.values())))
            self._tuner = build_tuner(
                config.tuner,
                start_bytes=best_simulated(self._problem, planned.choice, sizes, kinds),
                sizes=sizes,
                samples=config.samples,
                seed=seed,
            )
        self._samples: list[Sample] = []
        self._size_bytes = 0
        self.best: Sample | None = None

    def note(self, slowest_s: float) -> bool:
        """Record the seconds of a step on the slowest rank; return whether its sample is complete."""
        self._times.append(slowest_s)
        self._spent_s += slowest_s
        return len(self._times) >= (DROPPED_STEPS + 1 if self._late else self._config.sample_steps)

    @property
    def _late(self) -> bool:
        return self._spent_s > TUNING_S

    def turn(self) -> Planned:
        """Return the plan to run from the next step on; after the last sample the plan of the best size."""
        if self._times:
            seconds = median(self._times[DROPPED_STEPS:])
            self._samples.append(Sample(size_bytes=self._size_bytes, seconds=seconds))
            self._times.clear()
        order, self.best = self._control.decided(self._decide, PURPOSE)
        self._size_bytes = order.choice.all_reduce_chunk_bytes
        return replace(self._planned, choice=order.choice, plan=order.plan)

    @property
    def line(self) -> str:
        """Result of the search in words."""
        assert self.best is not None, "all samples are there"
        first = self._samples[0]
        return (
            f"all-reduce pieces of {mib(self.best.size_bytes)}: the fastest of {len(self._samples)} sizes "
            f"tried ({self._config.tuner}), {milliseconds(self.best.seconds)} per step; "
            f"the first size, {mib(first.size_bytes)}, took {milliseconds(first.seconds)}{self._untried}"
        )

    @property
    def _untried(self) -> str:
        left = self._config.samples - len(self._samples)
        return f"; {counted(left, 'size')} not tried: these steps took {self._spent_s:.0f} s" if left else ""

    def _decide(self) -> tuple[Order, Sample | None]:
        """Choose the next plan, on rank 0 only; with the best sample once no more follow."""
        assert self._tuner is not None, "rank 0 has the tuner"
        if self._samples:
            self._tuner.tell(self._samples[-1].size_bytes, self._samples[-1].seconds)
        enough = len(self._samples) == self._config.samples or (bool(self._samples) and self._late)
        best = self._tuner.best if enough else None
        size_bytes = self._tuner.ask() if best is None else best.size_bytes
        choice = replace(self._planned.choice, all_reduce_chunk_bytes=size_bytes)
        return Order.of(choice, sized(self._problem, choice, self._kinds)), best
