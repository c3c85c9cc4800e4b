"""What the simulator is told: links and computation, each measured apart from the runs that it predicts."""

from __future__ import annotations

from dataclasses import replace

from penstock.bench.contender import Entry, TransportName, run_step
from penstock.bench.links import fit_links
from penstock.bench.load import Load
from penstock.bench.predict import ComputeTimes, PredictedCost, predict
from penstock.bench.scheduled import Scheduled, Stacks
from penstock.cost import StepCost
from penstock.schedule import SCHEDULES, StepPlan
from penstock.simulate import Ranks
from penstock.trace import TaskRecord
from penstock.train.assemble import first_plan, workload

ROUNDS = 3
SLACK = 1.25


class Calibration:
    """Fitted links of one transport; makes entries whose order and prediction rest on measured costs."""

    def __init__(self, stacks: Stacks) -> None:
        self.stacks, self.control = stacks, stacks.machinery.control
        transport = stacks.machinery.transport
        self.cluster = fit_links(transport, self.control, stacks.run_config.cluster)

    def entry(self, name: str, transport: TransportName = "penstock") -> Entry:
        """The schedule `name`, its order frozen from measured costs."""
        first = self._first_plan(name)
        cost = self._cost(first)
        plan = StepPlan(first.graph, SCHEDULES[name].order(first.graph, cost))
        stack = self.stacks.real if transport == "penstock" else self.stacks.shipped
        contender = Scheduled(stack, stack.adopt(plan), self.stacks.batch)
        simulated_s = self._predict(plan, cost) if transport == "penstock" else None
        return Entry(name=name, transport=transport, contender=contender, plan=plan, simulated_s=simulated_s)

    def _predict(self, plan: StepPlan, cost: PredictedCost) -> float:
        layout = self.stacks.layout
        return predict(plan, cost, Ranks(layout.world_size, layout.ep_size))

    def _first_plan(self, name: str) -> StepPlan:
        stacks, stack = self.stacks, self.stacks.real
        schedule = replace(stacks.run_config.schedule, name=name)
        config = replace(stacks.run_config, schedule=schedule)
        return first_plan(config, stacks.layout, stack.base_shape, *stack.buckets.sizes_bytes)

    def _cost(self, plan: StepPlan) -> PredictedCost:
        stacks = self.stacks
        sizes = workload(stacks.run_config, stacks.layout, *stacks.real.buckets.sizes_bytes)
        alone = Entry(
            name="alone",
            transport="penstock",
            contender=Scheduled(stacks.silent, stacks.silent.adopt(plan), stacks.batch),
            plan=plan,
        )
        alone_s = self._times(alone)
        load = Load(stacks.machinery.transport, self.control)
        load.start(enough_for_s=SLACK * (ROUNDS + 1) * max(self.control.gather(self._last_s, "timing")))
        beside_s = self._times(alone)
        return PredictedCost(
            StepCost(plan.graph.shape, sizes, self.cluster), alone_s, beside_s, load.finish()
        )

    def _times(self, entry: Entry) -> ComputeTimes:
        """The compute tasks of all ranks, running at once, without transfers of their own."""
        records: list[TaskRecord] = []
        for number in range(ROUNDS + 1):
            self._last_s = run_step(entry, number, self.control).iteration_s
            if number > 0:  # the first step allocates
                records += [replace(r, step=number) for r in entry.contender.records()]
        everyone = self.control.gather(records, "exchanging measured durations")
        return ComputeTimes.from_records(r for rank in everyone for r in rank)
