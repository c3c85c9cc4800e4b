"""Where samples and guests are in the steps of virtual devices, as real ranks would find it. No torch.

Nothing is exchanged: every rank knows the routing of all, works out the same homes and hostings, and takes
as long for it as it took to find them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

from penstock.cost import ClusterConfig, StepCost, Workload
from penstock.cost.placed import Placed, SampleMover, expert_costs, planned_hostings, rank_loads
from penstock.decision import PlacementConfig
from penstock.placement import Hosting
from penstock.placing import ExpertCosts, ExpertProblem, pays
from penstock.step import StepShape
from penstock.workloads import Counts, Routing


@dataclass(frozen=True, eq=False)
class Movement:
    """What moves in the steps of one plan, and who decides on it.

    cluster: what planners of guests take links and experts to cost.
    """

    shape: StepShape
    workload: Workload
    routing: Routing
    placement: PlacementConfig
    cluster: ClusterConfig

    @property
    def is_none(self) -> bool:
        """Whether everything stays where it is."""
        return not self.shape.moves

    def placed(self, number: int) -> Placed | None:
        """Samples and experts of step `number`; None where nothing moves."""
        if self.is_none:
            return None
        counts_DBYE, hostings = self.routing.counts(number), self.hostings(number)
        if not self.shape.moves_samples:
            return Placed.still(counts_DBYE, hostings)
        return self._mover.placed(counts_DBYE, hostings)

    def hostings(self, number: int) -> tuple[Hosting, ...]:
        """By MoE layer, what was planned from the step before; none in the first one, and none where the
        plan of the step before that had become slower than no guests at all."""
        if not self.shape.guest_slots:
            return ()
        empty = Hosting.none(self.workload.placement, self.shape.guest_slots)
        if number == 0:
            return (empty,) * sum(self.shape.moe_layers)
        now, before = self._plan(number - 1), self._plan(number - 2) if number > 1 else ()
        lasted = [
            before[y].is_empty or pays(self._problem(loads_PE), before[y]) if before else True
            for y, loads_PE in enumerate(self._loads(number - 1))
        ]
        return tuple(plan if holds else empty for plan, holds in zip(now, lasted, strict=True))

    def host_s(self) -> tuple[float, float]:
        """Processor seconds of this machine to find homes for a microbatch in one layer, and to plan guests
        of all layers; 0 for what does not move. The processor's, because virtual ranks share it."""
        layers = max(1, sum(self.shape.moe_layers))
        homes_s = plan_s = 0.0
        if self.shape.moves_samples:
            counts_DBYE = self.routing.counts(0)
            self._mover.placed(counts_DBYE)  # what is made once does not count
            start_s = time.thread_time()
            self._mover.placed(counts_DBYE)
            homes_s = (time.thread_time() - start_s) / (layers * self.shape.microbatches)
        if self.shape.guest_slots:
            start_s = time.thread_time()
            self._made(0)
            plan_s = time.thread_time() - start_s
        return homes_s, plan_s

    def _plan(self, number: int) -> tuple[Hosting, ...]:
        """From the loads of step `number`. Two steps are remembered, for the next one asks for them again."""
        if number not in self._planned:
            self._planned[number] = self._made(number)
            for old in [each for each in self._planned if each < number - 1]:
                del self._planned[old]
        return self._planned[number]

    def _made(self, number: int) -> tuple[Hosting, ...]:
        slots, where = self.shape.guest_slots, self.workload.placement
        return planned_hostings(self._loads(number), self.placement.experts, slots, where, self._costs)

    def _loads(self, number: int) -> Counts:
        return rank_loads(self.routing.counts(number), self.shape, self.workload)

    def _problem(self, loads_PE: Counts) -> ExpertProblem:
        return ExpertProblem(
            placement=self.workload.placement,
            guest_slots=self.shape.guest_slots,
            loads=loads_PE,
            costs=self._costs,
        )

    @cached_property
    def _planned(self) -> dict[int, tuple[Hosting, ...]]:
        return {}

    @cached_property
    def _costs(self) -> ExpertCosts:
        return expert_costs(StepCost(self.shape, self.workload, self.cluster))

    @cached_property
    def _mover(self) -> SampleMover:
        how = self.placement
        predicts = how.prediction != "none"
        return SampleMover(work=self.workload, shape=self.shape, solver=how.solver, predicts=predicts)
