"""Places of samples and replicas in the steps of virtual devices, as real ranks would find them.

Nothing is exchanged: every rank knows the routing of all ranks, computes the same homes and replications, and
takes as long for it as finding them took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.cost import ClusterConfig, StepCost, Workload
from penstock.cost.placed import rank_loads
from penstock.decision import Decision, PlacementConfig
from penstock.features.expert_replicas.planners import find_planner
from penstock.features.expert_replicas.prices import expert_costs, planning_share, splits_exactly
from penstock.features.expert_replicas.problem import Slack
from penstock.features.sample_placement.feature import SampleMoves
from penstock.features.sample_placement.prices import SampleMover
from penstock.placement import Replication
from penstock.routing.rows import Placed
from penstock.runtime.features.expert_replicas.manager import ExpertMoving, Plans
from penstock.step import StepShape
from penstock.workloads import Routing


@dataclass(frozen=True, eq=False)
class Movement:
    """Samples and experts that move in the steps of one plan, and the settings that decide on it.

    cluster: the cost of links and experts for planners of replicas; slack: by MoE layer, see ExpertMoving.
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
        """Return this machine's processor seconds to find homes and plan replicas; 0 for what does not move.

        Homes are those of a microbatch in one layer, replicas those of a rank's share of the layers.
        Processor time counts, because virtual ranks share the processor.
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
        known = max(step for step in self._known if step <= number)
        for step in range(known, number):
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
        costs = expert_costs(StepCost(self.shape, self.workload, self.cluster))
        samples: SampleMoves = "netmoe" if self.shape.moves_samples else "none"
        choice = replace(
            Decision(dispatch=self.workload.dispatch).with_placement(self.placement), samples=samples
        )
        return ExpertMoving(
            planner=find_planner(self.placement.experts),
            costs=costs,
            slack=self.slack,
            every=self.placement.every,
            exact=splits_exactly(choice, self.workload),
        )

    @cached_property
    def _mover(self) -> SampleMover:
        return SampleMover.of(self.placement, self.workload, self.shape)


def _processor_s(work: Callable[[], object]) -> float:
    start_s = time.thread_time()
    work()
    return time.thread_time() - start_s
