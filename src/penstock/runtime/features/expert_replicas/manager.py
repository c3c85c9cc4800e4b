"""The replicas that the ranks of a stack hold from step to step: plans, room for them, and handlers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from penstock.device import on_device
from penstock.features.expert_replicas.encoding import Numbers, Share, numbers_of, share_of
from penstock.features.expert_replicas.planners import Planner, pays
from penstock.features.expert_replicas.problem import ExpertCosts, ExpertProblem, Slack
from penstock.graph import Graph, Phase, Task
from penstock.mesh import Group, Mesh, node_of
from penstock.moe import MoELayer
from penstock.moe.experts import Experts, ModuleExperts, Spread, slots_with_replicas
from penstock.ops import Op
from penstock.placement import PlacementError, Replication
from penstock.routing.replicas import ExactSplit
from penstock.routing.sizes import Ints
from penstock.runtime.features.expert_replicas.replicas import LayerReplicas, Piece, Room, Trip
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.machinery import FeatureStack, Machinery, StackFeature, StepFeature
from penstock.runtime.statistics import Loads
from penstock.runtime.transport import HostCounts, Later, to_host
from penstock.schedule import StepPlan
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS
from penstock.topology import Layout

# ---- which experts ranks hold replicas of next: planned from the loads of one step, and dropped where
# plans do not last
#
# A plan is made from the loads of one step, and runs with those of the next. So every plan is judged by the
# loads of the step after it, whether it ran or not: while it would have been slower than no replicas at all,
# none are in use, and when plans hold again, they are. A new plan is judged by the loads from which it was
# made,
# too: published planners price links by an average.
#
# Shapes: P ranks of the world, Y MoE layers, E experts.


@dataclass(frozen=True, kw_only=True)
class ExpertMoving:
    """How a stack decides which experts are replicas of which ranks.

    Attributes:
        planner: Makes, from the loads of a layer, the replicas of its ranks.
        costs: What rows and weights cost, the same on all ranks.
        slack: By MoE layer, how much of the replicas' transfers the schedule hides; () = what Eq 8 takes for
            it.
        every: The number of steps from one plan to the next; plans are judged after each step.
        exact: Whether rows are split by the loads of their own step.
    """

    planner: Planner
    costs: ExpertCosts
    slack: tuple[Slack, ...] = ()
    every: int = 1
    exact: bool = True

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every = {self.every}: experts are planned after 1 step or more. Use 1")

    @property
    def name(self) -> str:
        """A name that distinguishes this way of planning from others."""
        planner = getattr(self.planner, "__qualname__", type(self.planner).__qualname__)
        return f"{planner} every {self.every}"

    def costs_of(self, moe_layer: int) -> ExpertCosts:
        """Return what rows and weights cost in a layer."""
        return self.costs.hiding(self.slack[moe_layer]) if self.slack else self.costs


@dataclass(frozen=True)
class Plans:
    """What was planned last, by MoE layer, and which plans are in use.

    Attributes:
        age_steps: Steps since the plans were made; 0 = plan again.
    """

    made: tuple[Replication, ...]
    in_use: tuple[bool, ...]
    age_steps: int = 0

    @staticmethod
    def none(replications: Sequence[Replication]) -> Plans:
        """Return the plans before the first step, with the replicas of that time."""
        return Plans(tuple(replications), (True,) * len(replications))

    def after(self, loads_YPE: Sequence[Ints], moving: ExpertMoving) -> Plans:
        """Return the replicas after a step with these loads, [P, E] of each layer."""
        return self.joined([self.share(loads_YPE, moving)], moving)

    def share(
        self, loads_YPE: Sequence[Ints], moving: ExpertMoving, place: int = 0, places: int = 1
    ) -> Share:
        """Return what one of `places` ranks finds for its layers, which are those of `layers_of`."""
        assert len(loads_YPE) == len(self.made), (
            f"{len(loads_YPE)} layers have loads, {len(self.made)} replicas"
        )
        found = []
        for layer in self.layers_of(place, places):
            made = before = self.made[layer]
            problem = ExpertProblem(
                placement=before.placement,
                replica_slots=before.replica_slots,
                loads=loads_YPE[layer],
                costs=moving.costs_of(layer),
                exact=moving.exact,
            )
            in_use = _harmless(before, problem)
            if not self.age_steps:
                made = moving.planner(problem)
                in_use = in_use and _harmless(made, problem)
            found.append((made, in_use))
        return tuple(found)

    def joined(self, shares: Sequence[Share], moving: ExpertMoving) -> Plans:
        """Return the plans joined from what all ranks have found, by place."""
        places = len(shares)
        found = [shares[y % places][y // places] for y in range(len(self.made))]
        made, in_use = tuple(plan for plan, _ in found), tuple(used for _, used in found)
        return Plans(made, in_use, (self.age_steps + 1) % moving.every)

    def layers_of(self, place: int, places: int) -> range:
        """Return the MoE layers, counted from 0, that one of `places` ranks plans."""
        return range(place, len(self.made), places)

    @property
    def hash64(self) -> int:
        """A hash of all plans and of the present replications, of 8 bytes."""
        found = hashlib.blake2b(digest_size=8)
        for replication in (*self.made, *self.replications):
            found.update(replication.digest.encode())
        return int.from_bytes(found.digest(), signed=True)

    @property
    def replications(self) -> tuple[Replication, ...]:
        """The replications of the next step."""
        pairs = zip(self.made, self.in_use, strict=True)
        return tuple(
            plan if in_use else Replication.none(plan.placement, plan.replica_slots) for plan, in_use in pairs
        )


def _harmless(plan: Replication, problem: ExpertProblem) -> bool:
    """Return whether a plan makes the layer no slower than no replicas would, by rank and link."""
    return plan.is_empty or pays(problem, plan)


def loads_of_group(loads_PYE: Loads, mesh: Mesh, rank: int) -> list[Ints]:
    """Return the rows that start on the ranks of this rank's expert group, by layer: [ranks, E].

    Ranks that share their experts count as one rank.
    """
    members, ranks = list(mesh.members(rank, Group.EXPERT_SHARDS)), mesh.size(Group.EXPERT)
    mine = loads_PYE[members].reshape(ranks, -1, *loads_PYE.shape[1:]).sum(axis=1, dtype=np.int64)
    return [mine[:, y] for y in range(mine.shape[1])]


# ---- replicas from step to step, and the room for them ----------------------------------------------------


Layers = Sequence[MoELayer | None]
Replications = tuple[Replication | None, ...]
"""By layer; None for a dense layer."""
MOST_FREE = 1
"""Rooms kept for the next step; several steps that run at once make their own."""


@dataclass(frozen=True)
class LayerReplication:
    """One layer's replication, and what follows from it on this rank. Either `split` or `spread` is set."""

    replication: Replication
    trip: Trip
    spread: Spread | None
    split: ExactSplit | None


@dataclass
class StepReplicas(StepFeature):
    """The replicas of one step, by layer; None in a dense one.

    Attributes:
        next_plans: The replicas of the next step, once ranks have compared them; None before.
    """

    manager: ExpertReplicas
    layers: Layers
    replicas: tuple[LayerReplicas | None, ...]
    replications: Replications = ()
    next_plans: Later[Plans] | Plans | None = None

    def prepare(self, context: StepContext) -> None:
        context.features[StepReplicas] = self
        context.replications, context.split = self.replications, self.split

    def over(self) -> None:
        self.manager.take_back(self)

    def end(self, context: StepContext, graph: Graph) -> None:
        del context, graph
        if self.next_plans is not None:
            self.manager.follow(Later.of(self.next_plans))

    def split(self, layer: int) -> ExactSplit | None:
        """Return how rows are split when all ranks' counts are known; None where AT says where they go."""
        found = self.replicas[layer] if self.replicas else None
        return None if found is None else found.split

    def of(self, layer: int) -> LayerReplicas:
        """Return the replicas of an MoE layer."""
        found = self.replicas[layer]
        assert found is not None, f"layer {layer} has no replicas"
        return found

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let layers route to replicas and compute them, as long as the context lasts."""
        try:
            for layer, replicas in zip(self.layers, self.replicas, strict=True):
                if layer is not None and replicas is not None:
                    layer.use_replicas(replicas.expert_slots)
            yield
        finally:
            for layer in self.layers:
                if layer is not None:
                    layer.use_replicas(None)


class ExpertReplicas(StackFeature):
    """Lends every step the replicas that its ranks hold at that time, and plans those that they hold next.

    Attributes:
        moving: How replicas are planned; None: the replication stays until `use` is called.
        plans: The replications of MoE layers, including planned ones that are not used as they would not pay.
    """

    def __init__(self, layout: Layout, device: torch.device, moving: ExpertMoving | None = None) -> None:
        self._layout, self._device, self.moving = layout, device, moving
        self._in_use: tuple[LayerReplication | None, ...] = ()
        self._splits: tuple[bool, ...] = ()
        self._free: list[tuple[Room | None, ...]] = []
        self.plans = Plans.none(())

    @property
    def replications(self) -> Replications:
        """The replications from the next forward pass on; () where the plan has no replica slots."""
        return tuple(
            None if layer_replication is None else layer_replication.replication
            for layer_replication in self._in_use
        )

    def copy(self) -> ExpertReplicas:
        """Return the same replications, for a copy of the layers."""
        found = ExpertReplicas(self._layout, self._device, self.moving)
        found._in_use, found._splits, found.plans = self._in_use, self._splits, self.plans
        found.active = self.active
        return found

    def check(self, plan: StepPlan, stack: FeatureStack) -> None:
        check_replicas(stack.moe_layers, plan.shape, stack.machinery)

    def adopt(self, plan: StepPlan, stack: FeatureStack) -> None:
        self.open(stack.moe_layers, plan.shape)
        self.active = plan.shape.replica_slots > 0

    def check_layers(self, stack: FeatureStack) -> None:
        check_takes_replicas(stack.moe_layers, stack.plan.shape, stack.machinery.layout)

    def step(self, stack: FeatureStack) -> StepReplicas:
        return self.lend(stack.moe_layers)

    def open(self, layers: Layers, shape: StepShape) -> None:
        """Make as many slots per layer as the shape says, empty unless as many are in use already."""
        before, self._splits = self._splits, tuple(splits_exactly(layer, shape) for layer in layers)
        if shape.replica_slots == next((h.replica_slots for h in self.replications if h is not None), 0):
            if self._in_use and self._splits != before:
                # Not replicas of layers that no longer wait for the loads by which their rows would be
                # split: these would compute rows of their own ranks only.
                pairs = zip(self.replications, self._splits, strict=True)
                kept = (
                    at
                    if at is None or exact or at.limit is None
                    else Replication.none(at.placement, at.replica_slots)
                    for at, exact in pairs
                )
                self.use(tuple(kept))
            return
        self._free.clear()
        if shape.replica_slots:
            slots = shape.replica_slots
            self.use(tuple(None if at is None else Replication.none(at.placement, slots) for at in layers))
        else:
            self._in_use, self.plans = (), Plans.none(())

    def use(self, replications: Replications) -> None:
        """Use these replications from the next forward pass on."""
        layout, in_use = self._layout, list[LayerReplication | None]()
        for at, exact in zip(replications, self._splits, strict=True):
            if at is None:
                in_use.append(None)
                continue
            trip = Trip.of(at, layout.ep_rank)
            if exact and at.limit is not None:
                nodes = tuple(node_of(rank, layout.ep_node_size) for rank in range(layout.ep_size))
                in_use.append(LayerReplication(at, trip, None, ExactSplit.of(at, nodes)))
            else:
                spread = Spread(at.splits[layout.ep_rank], self._device)
                in_use.append(LayerReplication(at, trip, spread, None))
        self._in_use = tuple(in_use)
        self.plans = Plans.none([replication for replication in replications if replication is not None])

    def plan(self, loads_PYE: Tensor) -> Numbers:
        """Return the replications after a step with these loads of all ranks: this rank's share of the
        layers.

        Costs a copy from a GPU.
        """
        if self.moving is None:
            return numbers_of((), ())
        layout, (place, places) = self._layout, self._planners
        loads_YPE = loads_of_group(loads_PYE.cpu().numpy(), layout.mesh, layout.rank)
        share = self.plans.share(loads_YPE, self.moving, place, places)
        return numbers_of(share, self._known_of(place))

    def joined(self, told: Sequence[Numbers]) -> Plans:
        """Return the plans joined from what all ranks that exchange rows have found, by place."""
        if self.moving is None:
            return self.plans
        shares = [share_of(numbers, self._known_of(place)) for place, numbers in enumerate(told)]
        return self.plans.joined(shares, self.moving)

    @property
    def premise(self) -> int:
        """A hash, of 8 bytes, of what ranks must agree on before each plans its layers."""
        how = "nobody" if self.moving is None else self.moving.name
        found = hashlib.blake2b(f"{self.plans.hash64} {self.plans.age_steps} {how}".encode(), digest_size=8)
        return int.from_bytes(found.digest(), signed=True)

    @property
    def _planners(self) -> tuple[int, int]:
        """This rank's place among those that exchange rows, and their number."""
        mesh = self._layout.mesh
        return mesh.place(self._layout.rank, mesh.all_experts), mesh.size(mesh.all_experts)

    def _known_of(self, place: int) -> list[Replication]:
        """Return the earlier plans of the layers that one of these ranks plans."""
        return [self.plans.made[y] for y in self.plans.layers_of(place, self._planners[1])]

    def follow(self, plans: Plans) -> None:
        """Use what was planned, the same on all ranks, from the next forward pass on."""
        if plans is self.plans or not self._in_use:
            return
        found = iter(plans.replications)
        self.use(
            tuple(None if layer_replication is None else next(found) for layer_replication in self._in_use)
        )
        self.plans = plans

    def lend(self, layers: Layers) -> StepReplicas:
        """Return the replicas for one step.

        Raises:
            ValueError: For an expert with a gradient hook.
        """
        if not self._in_use:
            return StepReplicas(self, (), ())
        free = self._free.pop() if self._free else (None,) * len(layers)
        replicas: list[LayerReplicas | None] = []
        for layer, planned, room in zip(layers, self._in_use, free, strict=True):
            if layer is None or planned is None:
                replicas.append(None)
                continue
            own, replication = layer.experts, planned.replication
            check_no_hooks(own)
            if room is None or not room.fits(own, replication.replica_slots):
                room = Room.like(own, replication.replica_slots)  # noqa: PLW2901
            expert_slots = slots_with_replicas(
                own, room.replicas, layer.permutation, replication, planned.spread
            )
            replicas.append(LayerReplicas(planned.trip, room, expert_slots, planned.split))
        return StepReplicas(self, layers, tuple(replicas), self.replications)

    def take_back(self, step_replicas: StepReplicas) -> None:
        """Take back the rooms of a step that is over, so that another may have them."""
        if not step_replicas.replicas or len(self._free) >= MOST_FREE:
            return
        for replicas in step_replicas.replicas:
            if replicas is not None:
                replicas.forget()
        self._free.append(tuple(r.room if r else None for r in step_replicas.replicas))


def splits_exactly(layer: MoELayer | None, shape: StepShape) -> bool:
    """Return whether rows of this layer may wait for the counts of all ranks before their targets are known.

    They may not where they move with samples, which are placed by then, nor where a row is for several
    experts, or ranks share rows before they leave.
    """
    if layer is None or shape.moves_samples:
        return False
    return shape.expert_form in ("gather", "s1") and not layer.permutation.row_counts


def check_no_hooks(experts: Experts) -> None:
    """Raise ValueError for a hook on an expert that may be a replica elsewhere, or on its gradient."""
    for module in _modules_of(experts):
        for each in module.modules():
            after = each._forward_hooks or each._backward_hooks
            if after or each._forward_pre_hooks or each._backward_pre_hooks:
                raise ValueError(
                    f"an expert of {type(experts).__name__} has hooks, which would not see rows that other "
                    "ranks compute. Remove them, or set placement.experts=none"
                )
    for name, parameter in experts.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"experts.{name} has a gradient hook, which would not see the gradients of rows that other "
                "ranks compute. Remove it, or set placement.experts=none"
            )


def _modules_of(experts: Experts) -> Sequence[nn.Module]:
    """Return the experts that are modules of their own."""
    return list(experts.expert_modules) if isinstance(experts, ModuleExperts) else []


# ---- checks that ranks can hold replicas of others' experts in a stack, and agree on which rank holds
# which replica


def check_replicas(layers: Layers, shape: StepShape, machinery: Machinery) -> None:
    """Raise ValueError, on all ranks, if their experts differ, where the plan has replica slots.

    Costs an exchange of some bytes per parameter.
    """
    if shape.moves and not machinery.transports.sends:
        raise ValueError(
            "samples or experts move in this plan, and nothing is sent between the ranks of this stack: each "
            "would plan by what it alone has. Measure without a network by a plan in which nothing moves"
        )
    if not shape.replica_slots:
        return
    check_takes_replicas(layers, shape, machinery.layout)
    moe = [layer for layer in layers if layer is not None]
    words = []
    for experts in (layer.experts for layer in moe):
        kinds = [f"{name} {list(p.shape)} {p.dtype}" for name, p in experts.named_parameters()]
        kinds += map(repr, _modules_of(experts)[:1])
        words.append(f"{type(experts).__name__} ({', '.join(kinds)})")
    everyone = machinery.control.gather(words, "comparing experts")
    for rank, found in enumerate(everyone):
        for theirs, first in zip(found, everyone[0], strict=True):
            if theirs != first:
                raise ValueError(
                    f"rank {rank} has experts of {theirs}, rank 0 of {first}: experts that differ cannot "
                    "take each other's place. Build them alike, or set placement.experts=none"
                )


def check_takes_replicas(layers: Layers, shape: StepShape, layout: Layout) -> None:
    """Raise ValueError, saying why, if a plan of this shape cannot have replicas of experts of these
    layers."""
    if not shape.replica_slots:
        return
    if layout.tp_size > 1 and FORM_TOKENS[shape.expert_form] == "replicated":
        raise ValueError(
            f"expert_form = {shape.expert_form} has the same rows on all ranks that share attention, which "
            "have different places in the expert group and would each send them to other ranks. "
            "Use expert_form=gather, or set placement.experts=none"
        )
    moe = [layer for layer in layers if layer is not None]
    for layer in moe:
        layer.permutation.with_slots(layer.ep_size, layer.placement.slots + shape.replica_slots)
        experts = layer.experts
        # Parts of experts that a replica would lack, or have otherwise than the owner.
        if any(True for _ in experts.buffers()):
            raise ValueError(
                f"{type(experts).__name__} has buffers, which are not brought to ranks that hold a replica: "
                "rows would meet others there. Remove them, or set placement.experts=none"
            )
        check_no_hooks(experts)
        if len(set(map(repr, _modules_of(experts)))) > 1:
            raise ValueError(
                f"the experts of {type(experts).__name__} differ in code, so one cannot take the place of "
                "another. Build them alike, or set placement.experts=none"
            )
        sizes: dict[int, list[int]] = {}
        for name, parameter in experts.named_parameters():
            for _, slot, part in experts.split(name, parameter):
                if not part.is_contiguous():
                    raise ValueError(
                        f"experts.{name} is not contiguous in memory: make it so with contiguous()"
                    )
                sizes.setdefault(slot, []).append(part.numel())
        if len({tuple(found) for found in sizes.values()}) > 1:
            raise ValueError(
                f"the experts of {type(experts).__name__} differ in size or share parameters, so one cannot "
                "take the place of another. Build them alike, or set placement.experts=none"
            )
    seen: set[int] = set()
    for layer in moe:
        mine = {id(parameter) for parameter in layer.experts.parameters()}
        if seen & mine:
            raise ValueError(
                "experts of several layers share a parameter: gradients of replicas would be added while "
                "another layer adds to it. Give every layer its own, or set placement.experts=none"
            )
        seen |= mine


# ---- handlers that bring experts to their replicas, take gradients home, and plan the next replicas --------


@handles(Op.REPLICA_PARAMETERS, Phase.FORWARD)
def bring(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Bring a piece of the parameters of all replicas of a layer. The edge from it says that they are
    here."""
    del inputs
    context.of(StepReplicas).of(task.layer).bring(_piece(context, task))
    return {"replicas": None}


@handles(Op.REPLICA_GRADIENTS, Phase.BACKWARD)
def take_home(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Add a piece of the gradients of all replicas of a layer to what their owners have."""
    del inputs  # the gradients are the replicas' own; the edges say that they are complete
    context.of(StepReplicas).of(task.layer).take_home(_piece(context, task))
    return NOTHING


@handles(Op.PLAN_REPLICAS, Phase.BACKWARD)
def plan(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return replications: what this rank has found for the next step, of its share of the layers."""
    del task
    return {"replications": context.of(StepReplicas).manager.plan(inputs.one("loads"))}


@handles(Op.COMPARE_REPLICAS, Phase.BACKWARD)
def gather_plans(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Gather what all ranks that exchange rows have found.

    Raises:
        PlacementError: If premises differ.
    """
    numbers: Numbers = inputs.one("replications")
    transport, device = context.transport(task), context.marks.device
    manager, size = context.of(StepReplicas).manager, transport.size(task.axes)
    premise = manager.premise
    mine = on_device([[premise, len(numbers)]], device)
    told = HostCounts(transport.all_gather(mine, [1] * size, task.axes)).numbers
    premises, lengths = zip(*told.tolist(), strict=True)
    if different := [place for place, theirs in enumerate(premises) if theirs != premise]:
        raise PlacementError(
            f"ranks would plan different replicas for the next step: of this group those at places "
            f"{different} hold others than it does, or plan in another way, so versions or settings differ "
            "between ranks. Start all ranks with the same ones"
        )
    here = on_device(numbers, device, torch.from_numpy(numbers).dtype)
    everyone = to_host(transport.all_gather(here, lengths, task.axes))
    ends = [*accumulate(lengths)]
    context.of(StepReplicas).next_plans = Later.after(
        everyone,
        lambda told: manager.joined(np.split(told.astype(np.int32, copy=False), ends)[:-1]),
    )
    return NOTHING


def _piece(context: StepContext, task: Task) -> Piece:
    assert task.piece is not None, task
    return Piece(task.piece, task.cut.parts, context.transport(task), task.axes)
