"""What the simulator is told: links and computation, each measured apart from the runs that it predicts."""

from __future__ import annotations

from dataclasses import replace

from penstock.autopilot.run_problem import hierarchical_among
from penstock.bench.contender import Entry, run_step
from penstock.bench.predict import ComputeTimes, PredictedCost, predict
from penstock.bench.scheduled import Scheduled, Stacks
from penstock.bench.tune import variants
from penstock.cost import StepCost
from penstock.decision import Decision, ScheduleConfig
from penstock.graph import Task
from penstock.runtime.links import fit_links
from penstock.runtime.transport.load import Load
from penstock.schedule import SCHEDULES, StepPlan
from penstock.trace import TaskRecord
from penstock.train.assemble import first_plan, workload

ROUNDS = 2
SLACK = 1.25


class Calibration:
    """Fitted links of one transport; makes entries whose order and prediction rest on measured costs."""

    def __init__(self, stacks: Stacks) -> None:
        self.stacks, self.control = stacks, stacks.machinery.control
        self.cluster = fit_links(
            stacks.machinery.transports,
            stacks.layout,
            self.control,
            stacks.run_config.cluster,
            hierarchical_among(stacks.run_config.moe, stacks.layout),
        )
        self._measured: dict[tuple[Task, ...], tuple[ComputeTimes, ComputeTimes, float]] = {}

    def entry(self, name: str) -> Entry:
        """The schedule `name` in an order frozen from measured costs, in the variant that promises most."""
        tried = {first.shape: first for first in map(self._first_plan, self._variants(name))}
        entries = [self._ordered(name, first) for first in tried.values()]
        best = min(entries, key=lambda entry: entry.simulated_s or 0.0)
        assert best.plan is not None, "a schedule has a plan"
        self.stacks.real.adopt(best.plan)
        return best

    def _variants(self, name: str) -> tuple[ScheduleConfig, ...]:
        return variants(self.stacks.config, name)

    def _ordered(self, name: str, first: StepPlan) -> Entry:
        stacks, layout = self.stacks, self.stacks.layout
        sizes = workload(stacks.run_config, layout, *stacks.real.buckets.sizes_bytes)
        cost = PredictedCost(StepCost(first.shape, sizes, self.cluster), *self._computation(first))
        plan = replace(first, schedule=SCHEDULES[name].order(first.graph, cost, Decision(schedule=name)))
        simulated_s = predict(plan, cost, layout.mesh)
        contender = Scheduled(stacks.real, plan, stacks.batch)
        return Entry(name=name, transport="penstock", contender=contender, plan=plan, simulated_s=simulated_s)

    def _first_plan(self, schedule: ScheduleConfig) -> StepPlan:
        stacks, stack = self.stacks, self.stacks.real
        config = replace(stacks.run_config, schedule=schedule)
        return first_plan(config, stacks.layout, stack.base_shape, *stack.buckets.sizes_bytes)

    def _computation(self, plan: StepPlan) -> tuple[ComputeTimes, ComputeTimes, float]:
        """Compute tasks alone and beside traffic, and how much slower traffic is beside them.

        Measured once for all plans whose compute tasks are the same.
        """
        tasks = tuple(task for task in plan.graph.tasks if task.lane.computes)
        if tasks not in self._measured:
            stacks = self.stacks
            contender = Scheduled(stacks.silent, stacks.silent.adopt(plan), stacks.batch)
            entry = Entry(name="alone", transport="penstock", contender=contender, plan=plan)
            alone = self._times(entry)
            load = Load(stacks.machinery.transports.inter, self.control)
            load.start(enough_for_s=SLACK * (ROUNDS + 1) * max(self.control.gather(self._last_s, "timing")))
            beside = self._times(entry)
            self._measured[tasks] = alone, beside, load.finish()
        return self._measured[tasks]

    def _times(self, entry: Entry) -> ComputeTimes:
        """The compute tasks of all ranks, running at once, without transfers of their own."""
        records: list[TaskRecord] = []
        for number in range(ROUNDS + 1):
            self._last_s = run_step(entry, number, self.control).iteration_s
            if number > 0:  # the first step allocates
                records += [replace(r, step=number) for r in entry.contender.records()]
        everyone = self.control.gather(records, "exchanging measured durations")
        return ComputeTimes.from_records(r for rank in everyone for r in rank)
