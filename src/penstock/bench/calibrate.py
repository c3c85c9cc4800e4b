"""What the simulator is told: links and computation, each measured apart from the runs that it predicts."""

from __future__ import annotations

from dataclasses import replace

from penstock.bench.contender import Entry, TransportName, run_step
from penstock.bench.links import fit_links
from penstock.bench.predict import PredictedCost, predict
from penstock.bench.scheduled import Scheduled, Stacks
from penstock.cost import MeasuredCost, StepCost
from penstock.runtime import PipelinedStack
from penstock.schedule import SCHEDULES, StepPlan
from penstock.simulate import Ranks
from penstock.trace import TaskRecord
from penstock.train.assemble import first_plan, workload

SILENT_ROUNDS = 3


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
        return PredictedCost(StepCost(plan.graph.shape, sizes, self.cluster), self._computation(plan))

    def _computation(self, plan: StepPlan) -> MeasuredCost:
        """Medians of the compute tasks of all ranks, running at once, without a network."""
        stack: PipelinedStack = self.stacks.silent
        entry = Entry(
            name="alone",
            transport="penstock",
            contender=Scheduled(stack, stack.adopt(plan), self.stacks.batch),
            plan=plan,
        )
        records: list[TaskRecord] = []
        for number in range(SILENT_ROUNDS + 1):
            run_step(entry, number, self.control)
            if number > 0:  # the first step allocates
                records += stack.records(number)
        everyone = self.control.gather(records, "exchanging measured durations")
        return MeasuredCost.from_records([r for rank in everyone for r in rank], _unknown)


def _unknown(task: object) -> float:
    raise AssertionError(f"{task} did not run in the silent run")
