"""`Problem`: the step for which a plan is sought, and the cost of any choice for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np

from penstock.config import ConfigError, Table
from penstock.cost import ClusterConfig, RoutedCost, StepCost, UnevenRanks, Workload, slowed
from penstock.cost.placed import Evidence, rank_loads, received_rows
from penstock.decision import Decision, GradientBytes, Movable, PlacementConfig
from penstock.decision.record import FIELDS
from penstock.features.build import build_graph
from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.prices import (
    expert_costs,
    planned_replications,
    replica_planning_s,
    splits_exactly,
)
from penstock.features.expert_replicas.problem import Slack
from penstock.features.field import NOTHING_MOVES
from penstock.features.sample_placement.prices import SampleMover
from penstock.graph import Lane, Phase, ScheduleError, Task
from penstock.mesh import Group, Mesh
from penstock.ops import Op
from penstock.ops.core import ByKind
from penstock.placement import Replication
from penstock.routing.rows import Placed
from penstock.routing.sizes import Floats
from penstock.schedule import StepPlan, cut, plan_step
from penstock.schedule.catalogue import SHIPPED
from penstock.schedule.system import least_chunk_bytes
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS, Recompute
from penstock.timing import Cost, Issuing, LowerBound, Timeline, lower_bound, simulate

USUAL = PlacementConfig()
OPEN: Final = Table()
ANY = Decision()
ALL_AS_LONG: Final[Mapping[str, float]] = {}

QUICK: Final = "critical_path"
"""The rule of orders by which replicas are planned, since a search would take too long."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One step of a model on a cluster.

    Attributes:
        shape: The shape of the uncut step, with any dispatch.
        dispatches: The dispatches that the ranks can run.
        comm_dtypes: The formats in which rows may travel, "none" = as the workload says.
        slowness: How many times longer every rank's computation takes than the cluster says; empty = no
            rank's does.
        load: The tokens that every rank's experts get, as a multiple of even routing; empty = even.
        recompute: What may be recomputed, the fastest choice first.
        movable: Samples and experts, as far as they may move.
        placement: How their destinations are decided.
        evidence: How steps are routed; None = evenly.
        observed: How steps were routed, as far as memory counts: a search prices even routing, with which
            moves gain nothing, but its plans must hold the rows that come.
        forced: The decisions that are set, by name; every choice has them (see `space.forced`).
        passes: The forward and backward passes whose gradients add up to those of one update.
        ends: Tells whether the time is over; then no replicas are planned that need not be (see `placed`).
    """

    shape: StepShape
    workload: Workload
    cluster: ClusterConfig
    dispatches: tuple[str, ...] = ("flat",)
    comm_dtypes: tuple[str, ...] = ("none",)
    slowness: tuple[float, ...] = ()
    load: tuple[float, ...] = ()
    recompute: tuple[Recompute, ...] = ("none",)
    movable: Movable = NOTHING_MOVES
    placement: PlacementConfig = USUAL
    evidence: Evidence | None = None
    observed: Evidence | None = None
    forced: Table = OPEN
    passes: int = 1
    ends: Callable[[], bool] = field(default=lambda: False, compare=False)
    _known_loads: dict[object, Floats] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_placed: dict[object, Placed] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_works: dict[object, Workload] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_uncut: dict[object, StepShape] = field(default_factory=dict, init=False, repr=False, compare=False)
    _last_cost: dict[object, Cost] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_prices: dict[Decision, dict[object, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Seconds of tasks, by all that prices them beside the cut: see `StepCost.shared`."""

    @property
    def has_nodes(self) -> bool:
        """Whether there are several nodes."""
        return self.workload.world_nodes > 1

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks that are priced: of a sample, those that stand for all (see `Evidence`)."""
        return self.workload.mesh if self.evidence is None else self.evidence.part_of(self.workload).mesh

    @property
    def batch(self) -> int:
        """Samples per rank."""
        return self.workload.batch

    @property
    def gradients(self) -> GradientBytes:
        """Bytes of every layer's gradients."""
        return self.workload.gradient_bytes

    @cached_property
    def least_chunk_bytes(self) -> int:
        """Least bytes of an all-reduce chunk; smaller chunks would be too many tasks (see pieces_of)."""
        forms = (self.gradients.of_form(form) for form in FORM_TOKENS)
        return max(least_chunk_bytes(sizes) for form in forms for sizes in form.by_kind.values())

    @cached_property
    def layer_kinds(self) -> list[tuple[object, ...]]:
        """For every layer, what distinguishes it: whether it has experts, and the sizes of its gradients."""
        by_form = (sizes for _, sizes in self.gradients.partial_by_form)
        return list(zip(self.shape.moe_layers, *self.gradients.by_kind.values(), *by_form, strict=True))

    @cached_property
    def impossible(self) -> Mapping[tuple[str, str], str]:
        """Why a schedule cannot cut this step with a dispatch: one of your own may not know every layout."""
        few = self.only(tuple(map(self.layer_kinds.index, dict.fromkeys(self.layer_kinds))))
        found: dict[tuple[str, str], str] = {}
        offered = FIELDS["schedule"].values(self, Decision(dispatch=self.dispatches[0]))
        for name in (each for each in offered if each not in SHIPPED):
            for dispatch in self.dispatches:
                try:
                    build_graph(few.cut(Decision(schedule=name, dispatch=dispatch)))
                except (ConfigError, ScheduleError) as error:
                    found[name, dispatch] = str(error)
        return found

    def refusal(self, schedule: str) -> str:
        """Return why a schedule cannot cut this step, whatever the dispatch; "" if it can with one."""
        reasons = [self.impossible.get((schedule, dispatch), "") for dispatch in self.dispatches]
        return reasons[0] if all(reasons) else ""

    @property
    def paces(self) -> tuple[float, ...]:
        """A number by rank: ranks with equal numbers are assumed to wait alike. Empty: all ranks do."""
        load = self.load if self.evidence is None else self._known_load
        if self.slowness and load:
            return tuple(slow * each for slow, each in zip(self.slowness, load, strict=True))
        return self.slowness or load

    @cached_property
    def _known_load(self) -> tuple[float, ...]:
        """By rank, the rows of its experts over the mean, summed over all layers, where nothing moves."""
        assert self.evidence is not None, "else nothing is known"
        work = self.evidence.part_of(self.workload)
        loads_YPE = rank_loads(self.evidence.now_DBYE, self.shape, work)
        received_E = self.evidence.by_layer(loads_YPE).sum(axis=(0, 1))
        rows = [received_E[list(work.placement.held(place))].sum() for place in range(work.ep_size)]
        mean = max(1.0, sum(rows) / len(rows))
        places = (work.mesh.place(rank, Group.EXPERT) for rank in range(work.world_size))
        return tuple(float(rows[place] / mean) for place in places)

    def expert_loads(self, choice: Decision, cut: StepShape) -> Floats:
        """Return the rows that every rank's experts and replicas get over the mean, by MoE layer, [Y, P].

        One rank stands for all where routing is even, or where every expert has its slots.
        """
        work, layers, evidence = self.workload_of(choice), sum(cut.moe_layers), self.evidence or self.observed
        if evidence is None or work.fixed_slots:
            dropless = work.capacity_factor is None and not work.slots_per_sample
            return np.tile(np.array((dropless and self.load) or (1.0,)), (layers, 1))
        placed = self.placed(choice, cut)
        key = self._priced_by(choice), work.cut(cut) if placed is None else cut
        if key not in self._known_loads:
            sampled_YP = received_rows(evidence.now_DBYE, placed, cut, evidence.part_of(work))
            received_YP = evidence.by_layer(sampled_YP)
            mean_Y1 = np.maximum(1.0, received_YP.mean(axis=1, keepdims=True))
            self._known_loads[key] = received_YP / mean_Y1
        return self._known_loads[key]

    def with_imbalance(self, ratio: float) -> Problem:
        """Return the problem with one popular rank per expert group: its experts get `ratio` times the mean.

        The other ranks share what is left.

        Raises:
            ConfigError: For a ratio that no rank can get.
        """
        size, shards = self.workload.ep_size, self.workload.etp_size
        if not 1 <= ratio <= size:
            why = f"the busiest of {size} ranks gets 1 to {size} times the mean"
            raise ConfigError("--imbalance", ratio, why, "Use 1 for even routing.")
        if ratio == 1:
            return self
        others = (size - ratio) / (size - 1)
        group = (*(ratio,) * shards, *(others,) * (size - 1) * shards)
        return replace(self, load=group * self.mesh.size(Group.EXPERT_DATA))

    def workload_of(self, choice: Decision) -> Workload:
        """Return the workload by a choice: one object for all choices whose rows travel alike."""
        key = choice.dispatch, choice.comm_dtype
        if key not in self._known_works:
            work = replace(self.workload, dispatch=choice.dispatch)
            self._known_works[key] = work if key[1] == "none" else work.compressed(choice.comm_dtype)
        return self._known_works[key]

    def cost(self, choice: Decision, cut: StepShape) -> Cost:
        """Return the seconds of every task of a step with this cut, per rank where ranks differ.

        The last cost is kept: ordering, simulating and bounding a choice price the same tasks.
        """
        key = self._priced_by(choice), cut
        if key not in self._last_cost:
            self._last_cost.clear()
            shared = self._known_prices.setdefault(choice.affecting("cost"), {})
            made: Cost
            made = even = StepCost(cut, self.workload_of(choice), self.cluster, shared)
            if self.evidence is not None:
                made = self.routed_cost(choice, cut)
            elif self.load:
                made = UnevenRanks(even, self.load)
            self._last_cost[key] = slowed(made, self.slowness) if self.slowness else made
        return self._last_cost[key]

    def routed_cost(self, choice: Decision, cut: StepShape) -> RoutedCost:
        """Return the cost of a step whose routing is known, on ranks that are equally fast."""
        assert self.evidence is not None, "without it nothing is known of routing"
        work, placed = self.workload_of(choice), self.placed(choice, cut)
        now_DBYE, columns = self.evidence.now_DBYE, self.evidence.columns
        return RoutedCost(cut, work, self.cluster, now_DBYE, placed=placed, columns=columns)

    def placed(self, choice: Decision, cut: StepShape) -> Placed | None:
        """Return where the samples and replicas of the known steps would be; None = nothing moves."""
        evidence = self.evidence or self.observed
        if evidence is None or choice.samples == choice.experts == "none":
            return None
        key = self._priced_by(choice), cut
        if key not in self._known_placed:
            whole = self.workload_of(choice)
            work = evidence.part_of(whole)
            replications: tuple[Replication, ...] = ()
            planning_s = 0.0
            if choice.num_replica_slots:
                # Those of one group of ranks that share the experts: each plans for itself.
                loads_YPE = rank_loads(evidence.before_DBYE, cut, work)
                # The same replicas whatever contention a bound assumes, or it would be one of another step.
                even = StepCost(cut, whole, self.cluster.contended(1.0))
                # The slack is what a quick order leaves.
                quick = replace(choice, priority=QUICK)
                plan = plan_step(quick, self.uncut(choice), self.gradients, lambda _: even)
                even_costs = expert_costs(whole, even.cluster)
                costs = [even_costs.hiding(slack) for slack in replica_slack(plan, even, self.mesh)]
                if evidence.columns:  # by the first layer that each stands for
                    costs = [costs[evidence.columns.index(column)] for column in range(evidence.known_layers)]
                exact = splits_exactly(choice, work)
                ends = self.ends if "none" in self.movable.experts else lambda: False
                replications = planned_replications(
                    loads_YPE, choice.experts, choice.num_replica_slots, work.placement, costs, exact, ends
                )
                planning_s = replica_planning_s(whole, choice.experts, sum(cut.moe_layers))
            if choice.samples == "none":
                placed = Placed.still(evidence.now_DBYE, replications)
            else:
                solver, predicts = self.placement.solver, self.placement.prediction != "none"
                mover = SampleMover(work=work, shape=cut, solver=solver, predicts=predicts)
                placed = mover.placed(evidence.now_DBYE, replications)
            self._known_placed[key] = replace(placed, planning_s=planning_s)
        return self._known_placed[key]

    def _priced_by(self, choice: Decision) -> Decision:
        """Return what of a choice prices tasks beside the cut: replicas by a quick order's slack."""
        evidence = self.evidence or self.observed
        if evidence is None or not choice.num_replica_slots:
            return choice.affecting("cost")
        return choice.deciding("priority", QUICK)

    @property
    def issuing(self) -> Issuing | None:
        """What handing out tasks takes of one thread, which reads no counts where all sizes are known."""
        issuing = self.cluster.issuing
        return issuing and replace(issuing, reads_counts=not self.workload.fixed_slots)

    def plan(self, choice: Decision) -> StepPlan:
        """Return the graph and the frozen order of a choice."""
        return plan_step(choice, self.uncut(choice), self.gradients, lambda cut: self.cost(choice, cut))

    def cut(self, choice: Decision) -> StepShape:
        """Return the shape of a choice, without its graph."""
        return cut(choice, self.uncut(choice), self.gradients)

    def simulate(self, choice: Decision, plan: StepPlan) -> Timeline:
        cost = self.cost(choice, plan.shape)
        return simulate(plan.schedule, plan.graph, cost, self.mesh, self.issuing)

    def bound(self, choice: Decision, plan: StepPlan, times: Mapping[str, float] = ALL_AS_LONG) -> LowerBound:
        """Return the time that no order of the same tasks beats.

        Args:
            times: By op, how many times as long its tasks take; 1 for all others.
        """
        cost = self.cost(choice, plan.shape)
        if not times:  # a search asks for every choice
            return lower_bound(plan.graph, cost, self.mesh)
        return lower_bound(plan.graph, lambda task: cost(task) * times.get(task.op, 1.0), self.mesh)

    def uncut(self, choice: Decision) -> StepShape:
        """Return the shape with the legs of the choice's dispatch, and with the counts that these need."""
        if choice.dispatch == self.workload.dispatch:
            return self.shape
        key = choice.dispatch, choice.comm_dtype
        if key not in self._known_uncut:
            self._known_uncut[key] = replace(
                self.shape,
                dispatch=DISPATCHES[choice.dispatch].hops,
                exchange_counts=not self.workload_of(choice).fixed_slots,
            )
        return self._known_uncut[key]

    def only(self, layers: tuple[int, ...]) -> Problem:
        """Return the same step for a model that has only these layers."""
        work, shape = self.workload, self.shape
        moe_layers = [sum(shape.moe_layers[:layer]) for layer in layers if shape.moe_layers[layer]]
        held = work.held
        if held is not None:  # weights are taken to be spread as trained ones are
            others = self.gradients.replicated, self.gradients.partial
            experts = held.trained_experts * len(moe_layers) // max(1, sum(shape.moe_layers))
            trained = held.trained_experts + sum(map(sum, others))
            own = experts + sum(sizes[layer] for sizes in others for layer in layers)
            weights = held.weights * own // max(1, trained)
            held = replace(held, weights=weights, trained_experts=experts)
        return replace(
            self,
            evidence=None if self.evidence is None else self.evidence.of_layers(moe_layers),
            observed=None if self.observed is None else self.observed.of_layers(moe_layers),
            shape=replace(
                shape,
                moe_layers=tuple(shape.moe_layers[layer] for layer in layers),
                pieces=ByKind({}),
                all_reduce_parts=(),
            ),
            workload=replace(
                work,
                all_reduce_bytes=tuple(work.all_reduce_bytes[layer] for layer in layers),
                expert_all_reduce_bytes=tuple(work.expert_all_reduce_bytes[layer] for layer in layers),
                partial_all_reduce_bytes=tuple(self.gradients.partial[layer] for layer in layers),
                partial_by_form=tuple(
                    (form, tuple(sizes[layer] for layer in layers)) for form, sizes in work.partial_by_form
                ),
                held=held,
            ),
        )


def beside_pieces(problem: Problem, choice: Decision) -> Decision:
    """Return what of a choice memory depends on where replicas do not move, with large pieces of gradients.

    How rows travel counts only where a routing is known.
    """
    others: dict[str, Any] = {
        "all_reduce_chunk_bytes": max(ANY.all_reduce_chunk_bytes, problem.least_chunk_bytes)
    }
    if not (problem.evidence or problem.observed):
        others |= {"dispatch": problem.workload.dispatch, "comm_dtype": ANY.comm_dtype}
    return choice.affecting("memory", **others)


# ---- the time that a schedule leaves its network for replicas: parameters on the way out, gradients home --


REPLICAS = (Op.REPLICA_PARAMETERS, Op.REPLICA_GRADIENTS)

Span = tuple[float, float]


def replica_slack(plan: StepPlan, cost: Cost, mesh: Mesh) -> tuple[Slack, ...]:
    """Return, by MoE layer, the seconds in which the lane between nodes is idle while replicas may travel.

    Replicas take no time in this step: they may travel before the layer's experts begin, and after their
    backward. Each gap counts for one layer: forward for the layer whose experts are next, backward for the
    one whose experts were last.
    """

    def without(task: Task) -> object:
        return 0.0 if task.op in REPLICAS else cost(task)

    times = simulate(plan.schedule, plan.graph, without, mesh).times
    spans = {task: (float(span.start[0]), float(span.end[0])) for task, span in times.items()}
    layers = [layer for layer, is_moe in enumerate(plan.shape.moe_layers) if is_moe]
    experts = {layer: [t for t in spans if t.op == Op.EXPERTS and t.layer == layer] for layer in layers}
    begins_s = [min(spans[t][0] for t in experts[layer] if t.forward) for layer in layers]
    last_s = [
        max(spans[t][1] for t in experts[layer] if not t.forward and t.phase is not Phase.RECOMPUTE)
        for layer in reversed(layers)
    ]
    end_s = max(end for _, end in spans.values())
    busy = [span for task, span in spans.items() if task.lane is Lane.INTER]
    forward = (_idle(busy, gap) for gap in pairwise([0.0, *begins_s]))
    backward = (_idle(busy, gap) for gap in pairwise([*last_s, end_s]))
    return tuple(Slack(*both) for both in zip(forward, reversed([*backward]), strict=True))


def _idle(busy: Sequence[Span], gap: Span) -> float:
    """Return the seconds of a gap in which none of the spans runs; the spans of one lane do not overlap."""
    begin, end = gap
    common_s = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in busy)
    return max(0.0, end - begin - common_s)
