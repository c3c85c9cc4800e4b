"""`VirtualStack`: runs step plans as `PipelinedStack` does, on devices whose computation is a sleep.

stack.prepare(number)   # work out what every task does; not part of a step
stack.step(number)      # forward and backward tasks, transfers of real bytes
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.cost import ClusterConfig, RoutedCost, Workload
from penstock.decision import GradientBytes
from penstock.runtime.checks.agree import check_agreement
from penstock.runtime.executor import Execution
from penstock.runtime.program import Programs
from penstock.runtime.stack import Machinery
from penstock.schedule import StepPlan
from penstock.step import StepShape
from penstock.trace import TaskRecord
from penstock.virtual.handlers import Buffers, RankStep, VirtualHandlers, virtual_handlers
from penstock.workloads import Counts, Routing


@dataclass(frozen=True)
class _Prepared:
    """Step `number` under `plan`."""

    plan: StepPlan
    number: int
    handlers: VirtualHandlers


class VirtualStack:
    """One virtual device: real lanes, executor and transport; nothing is computed. `plan` may be exchanged.

    workload: its gradients are those that are moved. cluster: the rates of the devices that are imitated.
    routing: must be the same on all ranks.
    """

    def __init__(
        self,
        base_shape: StepShape,
        workload: Workload,
        cluster: ClusterConfig,
        routing: Routing,
        machinery: Machinery,
        make_plan: Callable[[StepShape, GradientBytes], StepPlan],
    ) -> None:
        assert machinery.device.type == "cpu", "a sleep of the host holds up no stream of a GPU"
        self.base_shape, self.workload, self.cluster = base_shape, workload, cluster
        self.routing, self.machinery = routing, machinery
        self.execution: Execution | None = None
        self._prepared: _Prepared | None = None
        self._counts: tuple[int, Counts] | None = None
        self._buffers = Buffers(workload, sum(base_shape.moe_layers))
        self._programs = Programs(virtual_handlers(), machinery.layout.mesh.silent)
        self.plan = self.adopt(make_plan(base_shape, self.bucket_sizes))

    @property
    def bucket_sizes(self) -> GradientBytes:
        """Bytes of every layer's gradients, as `Gradients.sizes_bytes`."""
        return self.workload.gradient_bytes

    def adopt(self, plan: StepPlan) -> StepPlan:
        """Use `plan` from the next step on. Raises ScheduleMismatchError if the ranks' orders differ."""
        pieces, batch = plan.shape.microbatches, self.workload.batch
        if batch < pieces:
            raise ValueError(
                f"schedule.microbatches = {pieces}: a batch of {batch} samples per rank cannot be cut into "
                f"{pieces} pieces, attention needs whole samples. Use {batch} or fewer."
            )
        plan.schedule.check(plan.graph)
        check_agreement(plan, self.machinery.control)
        self.machinery.transports.open((task.lane, task.axes) for task in plan.graph.tasks if task.axes)
        self.plan = plan
        return plan

    def cost(self, number: int) -> RoutedCost:
        """What every task of step `number` costs on every rank under the plan of now, for the simulator."""
        if self._counts is None or self._counts[0] != number:
            self._counts = number, self.routing.counts(number)
        return RoutedCost(self.plan.shape, self.workload, self.cluster, self._counts[1])

    def prepare(self, number: int) -> None:
        """Draw the routing of step `number` and work out its sizes and durations, before the step is timed.

        Takes some milliseconds up to a tenth of a second with the sizes; `step` does it otherwise.
        """
        self._ready(number)

    def step(self, number: int) -> None:
        """One iteration with the routing of step `number`, counted from 0: forward half, backward half.

        Returns when this rank has done all of its tasks. Raises TaskError naming the task that failed.
        """
        handlers = self._ready(number).handlers
        rank, lanes = self.machinery.layout.rank, self.machinery.lanes
        program = self._programs.of(self.plan, training=True)
        self.execution = Execution(self.plan, program, lanes, handlers, rank)
        self.execution.run()
        self.execution.run()

    def records(self, step: int = 0) -> list[TaskRecord]:
        """When every task of the last step ran on this rank; `step` is written into the records."""
        return self.execution.records(step) if self.execution else []

    def close(self) -> None:
        """End the lanes' threads."""
        self.machinery.lanes.close()

    def _ready(self, number: int) -> _Prepared:
        found = self._prepared
        if found is None or found.plan is not self.plan or found.number != number:
            cost = self.cost(number)
            step = RankStep.build(cost, self.plan.graph, self.machinery.layout.rank)
            self._buffers.grow(step, cost)
            handlers = VirtualHandlers(step, cost, self.machinery.transports, self._buffers)
            found = self._prepared = _Prepared(self.plan, number, handlers)
        return found
