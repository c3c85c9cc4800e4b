"""`VirtualStack`: runs step plans as `PipelinedStack` does, on devices whose computation is a sleep.

stack.prepare(number)   # compute what every task does; not part of a step
stack.step(number)      # forward and backward tasks, transfers of real bytes

Of the places of samples and replicas nothing is exchanged: every rank knows the routing of all ranks,
computes the same homes and replications, and takes as long for it as finding them took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from penstock.apportion import Counts
from penstock.cost import ClusterConfig, RoutedCost, StepCost, Workload, routing_sizes
from penstock.cost.placed import rank_loads
from penstock.decision import Decision, GradientBytes, PlacementConfig
from penstock.device import device_of
from penstock.features.dispatch import of_hops
from penstock.features.expert_replicas.planners import PLANNERS
from penstock.features.expert_replicas.prices import expert_costs, planning_share, splits_exactly
from penstock.features.expert_replicas.problem import Slack
from penstock.features.sample_placement.feature import SampleMoves
from penstock.features.sample_placement.prices import SampleMover
from penstock.lab.virtual.handlers import Buffers, RankStep, VirtualHandlers, virtual_handlers
from penstock.ops import Op
from penstock.placement import Replication
from penstock.plan.problem import replica_slack
from penstock.routing.rows import Placed
from penstock.runtime.consistency import check_agreement
from penstock.runtime.executor import Execution, Programs, Times
from penstock.runtime.features.expert_replicas.manager import ExpertMoving, Plans
from penstock.runtime.machinery import Machinery
from penstock.schedule import StepPlan
from penstock.step import StepShape
from penstock.trace import TaskRecord
from penstock.train.assemble import base_shape, first_plan, workload
from penstock.train.config import RunConfig
from penstock.workloads import Routing, RoutingConfig, routing_of


@dataclass(frozen=True, eq=False)
class Movement:
    """Samples and experts that move in the steps of one plan, and the settings that decide on it.

    Attributes:
        cluster: The cost of links and experts for planners of replicas.
        slack: The slack of every MoE layer, see `ExpertMoving`.
    """

    shape: StepShape
    workload: Workload
    routing: Routing
    placement: PlacementConfig
    cluster: ClusterConfig
    slack: tuple[Slack, ...] = ()

    @property
    def is_none(self) -> bool:
        """Whether everything stays in its place."""
        return not self.shape.moves

    def placed(self, number: int) -> Placed | None:
        """Return samples and experts of step `number`; None where nothing moves."""
        return None if self.is_none else self._placed(number, self._plans(number))

    def host_s(self) -> tuple[float, float]:
        """Return this machine's processor seconds to find homes and plan replicas.

        Processor time counts, because virtual ranks share the processor.

        Returns:
            Seconds to find the homes of a microbatch in one layer, and to plan the replicas of a rank's share
                of the layers; 0 for what does not move.
        """
        homes_s = plan_s = 0.0
        if self.shape.moves_samples:
            counts_DBYE = self.routing.counts(0)
            self._mover.placed(counts_DBYE)  # work that is done only once does not count
            homes_s = _processor_s(lambda: self._mover.placed(counts_DBYE))
            homes_s /= max(1, self._layers) * self.shape.microbatches
        if self.shape.replica_slots:
            plan_s = _processor_s(lambda: self._after(0, self._known[0]))
            plan_s *= planning_share(self.workload, self._layers)
        return homes_s, plan_s

    def _plans(self, number: int) -> Plans:
        """Return the plans of ranks before step `number`, from the loads of all steps before it."""
        latest = max(step for step in self._known if step <= number)
        for step in range(latest, number):
            self._known[step + 1] = self._after(step, self._known[step])
        for step in [step for step in self._known if 0 < step < number]:
            del self._known[step]
        return self._known[number]

    def _after(self, number: int, plans: Plans) -> Plans:
        """Return the plans of ranks at the end of step `number`."""
        if not self.shape.replica_slots:
            return plans
        counts_DBYE = self._placed(number, plans).leaving(self.routing.counts(number))
        return plans.after(tuple(rank_loads(counts_DBYE, self.shape, self.workload)), self._moving)

    def _placed(self, number: int, plans: Plans) -> Placed:
        counts_DBYE, replications = self.routing.counts(number), plans.replications
        if not self.shape.moves_samples:
            return Placed.still(counts_DBYE, replications)
        return self._mover.placed(counts_DBYE, replications)

    @property
    def _layers(self) -> int:
        """Number of MoE layers."""
        return sum(self.shape.moe_layers)

    @cached_property
    def _known(self) -> dict[int, Plans]:
        """Plans by step; those of the first step are always kept, since a run may begin again."""
        slots = self.shape.replica_slots
        replications = (Replication.none(self.workload.placement, slots),) * self._layers if slots else ()
        return {0: Plans.none(replications)}

    @cached_property
    def _moving(self) -> ExpertMoving:
        costs = expert_costs(self.workload, self.cluster)
        samples: SampleMoves = "netmoe" if self.shape.moves_samples else "none"
        choice = replace(
            Decision(dispatch=self.workload.dispatch).with_placement(self.placement), samples=samples
        )
        return ExpertMoving(
            planner=PLANNERS[self.placement.experts],
            costs=costs,
            slack=self.slack,
            every=self.placement.every,
            exact=splits_exactly(choice, self.workload),
        )

    @cached_property
    def _mover(self) -> SampleMover:
        how = self.placement
        predicts = how.prediction != "none"
        return SampleMover(work=self.workload, shape=self.shape, solver=how.solver, predicts=predicts)


def _processor_s(work: Callable[[], object]) -> float:
    start_s = time.thread_time()
    work()
    return time.thread_time() - start_s


Slacks = tuple[Slack, ...]


@dataclass(frozen=True, kw_only=True)
class VirtualConfig(RoutingConfig):
    """Virtual devices: compute tasks sleep as long as the cost model says, transfers move real bytes.

    Tokens are routed by a workload.
    """

    @property
    def label(self) -> str:
        """Label of every output of such a run, as in `virtual devices, zipf routing (exponent 1)`."""
        return f"virtual devices, {self.words}"


@dataclass(frozen=True)
class _Prepared:
    """Step `number` under `plan`, with what moves in it."""

    plan: StepPlan
    movement: Movement
    number: int
    handlers: VirtualHandlers


class VirtualStack:
    """One virtual device: real lanes, executor and transport; nothing is computed. `plan` may be exchanged.

    Attributes:
        workload: The sizes of a step, with those of the gradients to move.
        cluster: The rates of the devices that are imitated.
        routing: How tokens are routed; must be the same on all ranks.
        placement: How samples and replicas are placed by plans that move them.
    """

    def __init__(
        self,
        base_shape: StepShape,
        workload: Workload,
        cluster: ClusterConfig,
        routing: Routing,
        machinery: Machinery,
        make_plan: Callable[[StepShape, GradientBytes], StepPlan],
        placement: PlacementConfig,
    ) -> None:
        assert device_of(machinery.device).is_cpu, "a sleep of the host holds up no stream of a GPU"
        self.base_shape, self.workload, self.cluster = base_shape, workload, cluster
        self.routing, self.machinery = routing, machinery
        self.times: Times | None = None
        self._prepared: _Prepared | None = None
        self._counts: tuple[int, Counts] | None = None
        self._buffers = Buffers(workload, sum(base_shape.moe_layers))
        self._programs = Programs(virtual_handlers(), machinery.layout.mesh.silent)
        self._movements: dict[tuple[StepShape, PlacementConfig, Slacks], Movement] = {}
        self._slacks: dict[tuple[StepShape, str], Slacks] = {}
        self._host_s: dict[Movement, Mapping[str, float]] = {}
        self._links = cluster
        self.placement = placement
        self.plan = self.adopt(make_plan(base_shape, self.bucket_sizes))

    @property
    def bucket_sizes(self) -> GradientBytes:
        """Bytes of every layer's gradients, as `Gradients.sizes_bytes`."""
        return self.workload.gradient_bytes

    def adopt(self, plan: StepPlan, placement: PlacementConfig | None = None) -> StepPlan:
        """Use `plan` from the next step on.

        Args:
            placement: How the plan moves samples and replicas; None = as the plan before.

        Raises:
            ScheduleMismatchError: If the ranks' orders differ.
            ValueError: If the batch has fewer samples than the plan has microbatches.
        """
        pieces, batch = plan.shape.microbatches, self.workload.batch
        if batch < pieces:
            raise ValueError(
                f"schedule.microbatches = {pieces}: a batch of {batch} samples per rank cannot be cut into "
                f"{pieces} pieces, attention needs whole samples. Use {batch} or fewer."
            )
        plan.schedule.check(plan.graph)
        check_agreement(plan, self.machinery.control)
        self.machinery.transports.open((task.lane, task.axes) for task in plan.graph.tasks if task.axes)
        self.use(plan, placement or self.placement)
        self._time_host()
        return plan

    def use(self, plan: StepPlan, placement: PlacementConfig) -> None:
        """Use a plan that was adopted before."""
        self.plan, self.placement = plan, placement

    @property
    def links(self) -> ClusterConfig:
        """The cost of links and experts by which replicas are planned: the given cluster's until set."""
        return self._links

    @links.setter
    def links(self, links: ClusterConfig) -> None:
        self._links = links
        self._movements.clear()
        self._slacks.clear()

    @property
    def movement(self) -> Movement:
        """The movement under the present plan."""
        shape, slack = self.plan.shape, self._slack()
        key = shape, self.placement, slack
        if key not in self._movements:
            self._movements[key] = Movement(
                shape, self._workload, self.routing, self.placement, self.links, slack
            )
        return self._movements[key]

    def _slack(self) -> Slacks:
        """Return how much of replicas' transfers the present plan's order hides; () without room for
        replicas."""
        if not self.plan.shape.replica_slots:
            return ()
        key = self.plan.shape, self.plan.digest
        if key not in self._slacks:
            even = StepCost(self.plan.shape, self._workload, self.links)
            self._slacks[key] = replica_slack(self.plan, even, self.machinery.layout.mesh)
        return self._slacks[key]

    @property
    def _workload(self) -> Workload:
        """The workload with the dispatch of the present plan."""
        return replace(self.workload, dispatch=of_hops(self.plan.shape.dispatch).name)

    def _time_host(self) -> None:
        """Time the host's tasks on the slowest rank, so that all ranks know the same durations."""
        movement = self.movement
        if movement.is_none or movement in self._host_s:
            return
        homes_s, plan_s = self.machinery.control.largest(movement.host_s(), "timing the host's tasks")
        self._host_s[movement] = {Op.SAMPLE_PLACES: homes_s, Op.PLAN_REPLICAS: plan_s}

    def cost(self, number: int) -> RoutedCost:
        """Return cost of step `number`'s tasks on every rank under the present plan, for the simulator."""
        if self._counts is None or self._counts[0] != number:
            self._counts = number, self.routing.counts(number)
        counts_DBYE, placed = self._counts[1], self.movement.placed(number)
        if placed is not None:
            planning_s = self._host_s.get(self.movement, {}).get(Op.PLAN_REPLICAS, 0.0)
            placed = replace(placed, planning_s=planning_s)
        return RoutedCost(self.plan.shape, self._workload, self.cluster, counts_DBYE, placed=placed)

    def prepare(self, number: int) -> None:
        """Draw the routing of step `number` and compute its sizes and durations, before the step is timed.

        Takes some milliseconds up to a tenth of a second with the sizes; otherwise `step` does it.
        """
        self._ready(number)

    def step(self, number: int) -> None:
        """Run one iteration with the routing of step `number`, counted from 0: forward half, backward half.

        Returns when this rank has done all of its tasks.

        Raises:
            TaskError: If a task fails, naming it.
        """
        handlers = self._ready(number).handlers
        rank, lanes = self.machinery.layout.rank, self.machinery.lanes
        program = self._programs.of(self.plan, training=True)
        execution = Execution(self.plan, program, lanes, handlers, rank)
        self.times = execution.times
        execution.run()
        execution.run()

    def records(self, step: int = 0) -> list[TaskRecord]:
        """Return when every task of the last step ran on this rank; `step` is written into the records."""
        return self.times.records(step) if self.times else []

    def close(self) -> None:
        """End the machinery: its threads and connections, also for other stacks that run on it."""
        self.machinery.close()

    def _ready(self, number: int) -> _Prepared:
        prepared = self._prepared
        movement = self.movement
        unchanged = prepared is not None and prepared.plan is self.plan and prepared.movement is movement
        if prepared is None or not unchanged or prepared.number != number:
            cost, host_s = self.cost(number), self._host_s.get(movement, {})
            step = RankStep.build(cost, self.plan.graph, self.machinery.layout.rank, host_s)
            self._buffers.grow(step, cost)
            handlers = VirtualHandlers(step, cost, self.machinery.transports, self._buffers)
            prepared = self._prepared = _Prepared(self.plan, movement, number, handlers)
        return prepared


def build_virtual(config: RunConfig, virtual: VirtualConfig, machinery: Machinery) -> VirtualStack:
    """Build this rank's device with its first plan. [cluster] says how fast the imitated devices compute.

    Every rank must call it at the same point.

    Raises:
        ConfigError: If recorded routing does not fit the model.
    """
    layout = machinery.layout
    shape = base_shape(config, layout)
    work = workload(config, layout)
    return VirtualStack(
        shape,
        work,
        config.cluster,
        routing_of(virtual, routing_sizes(work, sum(shape.moe_layers))),
        machinery,
        partial(first_plan, config, layout),
        config.placement,
    )
