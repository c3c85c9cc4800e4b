"""Handlers of samples that move: counting, new homes, and everything that follows a sample.

Shapes: B samples of a microbatch on this rank, L tokens per sample (this rank's part where ranks share them),
M hidden size, T = B * L tokens, k choices, E experts, P members of a group.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock.apportion import Counts
from penstock.device import device_of, on_device
from penstock.features.sample_placement.assign import (
    ConditionalTable,
    Nearness,
    assign,
    prepare,
    sample_problem,
)
from penstock.features.sample_placement.feature import Prediction
from penstock.graph import Phase, Task
from penstock.moe import ChunkRoute, MoELayer, Product, Tokens
from penstock.moe.config import MoEConfig
from penstock.moe.experts import ResidualRows, given_back
from penstock.moe.layer import RoutedTokens
from penstock.moe.permute.slots import BoundedPermutation
from penstock.moe.permute.sort import SortPermutation
from penstock.moe.routers import count_choices
from penstock.ops import Op
from penstock.placement import PlacementError, Replication
from penstock.routing.samples import (
    Crossing,
    ExchangeGroup,
    Plane,
    RowOrder,
    SampleHomes,
    SampleTable,
    exchange_group_of,
    settle,
)
from penstock.runtime.batch import Sizes, shared_sizes
from penstock.runtime.handlers import (
    Inputs,
    Layer,
    Outputs,
    ResidualTransport,
    StepContext,
    handles,
    in_dtype,
)
from penstock.runtime.machinery import FeatureStack, StackFeature, StepFeature
from penstock.runtime.ops import BESIDE_ROWS, added, microbatch
from penstock.runtime.parts import BlockParts, ModelParts
from penstock.runtime.transport import Later, to_host
from penstock.schedule import StepPlan
from penstock.step import StepShape
from penstock.topology import Layout

# ---- how samples get their homes while a stack runs: which placer decides, and its view of the layout -----


class Placer(Protocol):
    """Decides which device every sample lives on from the next combine on; alike on all members."""

    def prepare(self) -> None:
        """Load what the placer needs, so that the first step does not wait for it."""
        ...

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        """Return the device of every sample, [I]; every device keeps as many of each chunk as it had.

        Args:
            following: Where experts of the next MoE layer are; None after the last.
            moved_rows: The data that follows a sample beside its experts' outputs, measured in rows.
        """
        ...


@dataclass(frozen=True)
class NetMoE:
    """Minimises rows across nodes, then devices, in this combine and the next dispatch.

    Attributes:
        solver: By name.
    """

    solver: str = "network_simplex"

    def prepare(self) -> None:
        prepare(self.solver)

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        homes, expects = table.device_I.copy(), following is not None and table.expected_IE.shape[1] > 0
        for plane in table.exchange_group.planes:
            near = _nearness(following, plane) if following is not None and expects else None
            local_D = np.full(table.exchange_group.devices, -1)
            local_D[list(plane.devices)] = np.arange(len(plane.devices))
            for chunk in range(table.chunks):
                here = np.flatnonzero((table.chunk_I == chunk) & (local_D[table.device_I] >= 0))
                if here.size:
                    problem = sample_problem(
                        counts=table.rows_IKPN[here].sum(axis=1).reshape(len(here), -1),
                        homes=local_D[homes[here]],
                        moved_rows=np.full(len(here), moved_rows),
                        node_of_device=np.array(plane.node_D),
                        predictions=None if near is None else table.expected_IE[here],
                        following=near,
                    )
                    homes[here] = np.array(plane.devices)[assign(problem, self.solver)]
        return homes


@lru_cache(maxsize=64)
def _nearness(replication: Replication, plane: Plane) -> Nearness:
    """Return how near devices and nodes are to experts. Cached: it changes with the replication only."""
    return Nearness.of_devices(replication, np.array(plane.device_P), np.array(plane.node_D))


@dataclass(frozen=True)
class SampleMoving:
    """How a stack moves samples.

    Attributes:
        placer: Decides on homes.
        prediction: The source of what samples are expected to want of the next MoE layer: what its gate says
            of their tokens in this layer, what samples like them wanted in past steps, or nothing.
    """

    placer: Placer = NetMoE()
    prediction: Prediction = "next_gate"


@dataclass(frozen=True, kw_only=True)
class Visit:
    """The samples of a microbatch in an MoE layer.

    Attributes:
        here, following: Where its experts and those of the next MoE layer are; None after the last.
        training: Whether something is learnt.
    """

    layer: int
    microbatch: int
    here: Replication
    following: Replication | None
    training: bool


class Habits:
    """Which experts of the next MoE layer follow on which of this one, learnt while samples pass both.

    Every layer is reported in turn, alike on all members; old observations fade slowly. Shapes: I samples, E
    experts.
    """

    def __init__(self) -> None:
        self._tables: dict[int, ConditionalTable] = {}
        self._passed: dict[int, tuple[int, Counts]] = {}

    def expected(self, counts_IE: Counts, visit: Visit) -> Counts:
        """Return the rows of every sample by expert of the next layer."""
        layer, before_IE = self._passed.pop(visit.microbatch, (visit.layer, counts_IE))
        if layer < visit.layer and visit.training:
            self.table(layer, before_IE.shape[1]).learn(before_IE, counts_IE)
        return self.table(visit.layer, counts_IE.shape[1]).predict(counts_IE)

    def left(self, counts_IE: Counts, visit: Visit) -> None:
        """Note that samples have left the layer.

        Args:
            counts_IE: In their order in the next layer.
        """
        self._passed[visit.microbatch] = visit.layer, counts_IE

    def table(self, layer: int, num_experts: int) -> ConditionalTable:
        """Return what is known of a layer; an empty table at first."""
        return self._tables.setdefault(layer, ConditionalTable(num_experts))


@dataclass(frozen=True)
class Relocation(StepFeature):
    """How samples move on one rank, in the steps of a plan.

    Attributes:
        exchange_group: Ranks that exchange counts.
        member: This rank's number there.
        packs: Whether rows bring their residual stream.
    """

    how: SampleMoving
    exchange_group: ExchangeGroup
    member: int
    habits: Habits
    packs: bool

    @staticmethod
    def on(layout: Layout, how: SampleMoving, habits: Habits, *, packs: bool) -> Relocation:
        """Return how samples of this rank's group move."""
        how.placer.prepare()
        member = layout.mesh.place(layout.rank, layout.mesh.all_experts)
        group = exchange_group_of(layout.mesh, layout.rank, layout.node_size)
        return Relocation(how, group, member, habits, packs)

    def prepare(self, context: StepContext) -> None:
        context.features[Relocation] = self
        if self.packs:
            context.residual_transport = PackedResidual(context.wire_dtype)

    def homes(self, table: SampleTable, visit: Visit, moved_rows: int) -> Counts:
        """Return the device of every sample.

        Args:
            moved_rows: See Placer.
        """
        if self.how.prediction != "conditional":
            return self.how.placer.homes(table, visit.following, moved_rows)
        counts_IE = table.by_expert(visit.here.by_position, visit.here.placement.num_experts)
        expected_IE = self.habits.expected(counts_IE, visit)
        if visit.following is not None:
            table = replace(table, expected_IE=expected_IE)
        device_I = self.how.placer.homes(table, visit.following, moved_rows)
        self.habits.left(counts_IE[np.lexsort((table.place_I(device_I), device_I))], visit)
        return device_I


# ---- rows bring the residual stream of samples that move, so that nothing else of a token follows its
# sample
#
# Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens, R rows.


class PackedResidual(ResidualTransport):
    """Rows bring the residual stream (see `penstock.moe.experts`); `wire_dtype` is that of gated tokens."""

    separate_bytes = 0

    def route(
        self, layer: Layer, residual_BLM: Tensor, x_TM: Tensor, tokens: Tokens, slices: int
    ) -> RoutedTokens:
        carried = ResidualRows(residual_BLM.flatten(0, 1))
        return layer.experts.route(in_dtype(x_TM, self.wire_dtype), tokens, slices, carried)

    def compute(self, layer: Layer, rows: Tensor, route: ChunkRoute, product: Product) -> Tensor:
        moe = layer.experts
        through = partial(moe.expert_rows, route=route, product=product)
        return given_back(rows, row_norm(layer.block), through, residual=moe.experts.shard.rank == 0)


def row_norm(block: BlockParts) -> nn.Module:
    """Return the norm that experts read.

    Raises:
        ValueError: Where rows cannot carry the residual stream.
    """
    norm = block.row_norm
    if norm is None:
        raise ValueError(
            "rows carry the residual stream of samples that move (placement.samples) in a step planned for "
            "blocks that have only a LayerNorm or an RMSNorm before their experts and a sum after them, and "
            "one has more: dropout, hooks, or a norm or methods of its own. Build the stack with them, which "
            "plans another step, or let samples stay (placement.samples=none)"
        )
    return norm


def check_packs(parts: ModelParts, autocast_dtype: torch.dtype | None) -> None:
    """Raise ValueError where rows cannot carry the residual stream, or it would be rounded on the way."""
    if autocast_dtype is not None:
        dtype = str(autocast_dtype).removeprefix("torch.")
        raise ValueError(
            "rows carry the residual stream of samples that move (placement.samples) in a step planned for "
            f"exact rows, and this stack computes under autocast in {dtype}, which would round it. Make the "
            "plan for this precision (train.precision), or let samples stay (placement.samples=none)"
        )
    for block in _with_experts(parts):
        row_norm(block)


def _with_experts(parts: ModelParts) -> list[BlockParts]:
    return [block for block in parts.parts if block.moe is not None]


# ---- samples that move, in a stack and in its steps --------------------------------------------------------


class SamplePlacement(StackFeature):
    """Samples that move in a stack.

    Attributes:
        moving: How they get their homes, from the plan that is adopted next.
        relocation: The same on this rank, under the present plan; None where samples stay.
    """

    def __init__(self, moving: SampleMoving | None = None) -> None:
        self.moving, self._habits = moving or SampleMoving(), Habits()
        self.relocation: Relocation | None = None
        self._next: Relocation | None = None

    def copy(self) -> SamplePlacement:
        return copy.deepcopy(self)

    def shape(self, shape: StepShape, stack: FeatureStack) -> StepShape:
        packs = all(block.row_norm is not None for block in _with_experts(stack.parts))
        return replace(shape, carries_residual=stack.machinery.autocast_dtype is None and packs)

    def check(self, plan: StepPlan, stack: FeatureStack) -> None:
        self._next = None
        if plan.shape.moves_samples and any(plan.shape.moe_layers):
            check_samples_may_move(stack.moe_layers, stack.moe)
            packs = plan.shape.packed_residual
            if packs:
                check_packs(stack.parts, stack.machinery.autocast_dtype)
            # A placer may lack what it needs, and says so here.
            self._next = Relocation.on(stack.machinery.layout, self.moving, self._habits, packs=packs)

    def adopt(self, plan: StepPlan, stack: FeatureStack) -> None:
        del plan, stack  # what was checked is adopted
        self.relocation, self._next = self._next, None
        self.active = self.relocation is not None

    def check_dtype(self, autocast_dtype: torch.dtype | None, stack: FeatureStack) -> None:
        if stack.plan.shape.packed_residual:
            check_packs(stack.parts, autocast_dtype)

    def sizes(self, stack: FeatureStack) -> Sizes | None:
        machinery = stack.machinery
        if self.relocation is None:
            return None
        return partial(shared_sizes, machinery.layout, machinery.control)

    def step(self, stack: FeatureStack) -> StepFeature | None:
        del stack
        return self.relocation


def check_samples_may_move(layers: Sequence[MoELayer | None], moe: MoEConfig) -> None:
    """Raise ValueError where a step would give another result if its samples were on other ranks."""
    for number, layer in enumerate(layers):
        if layer is None:
            continue
        if isinstance(layer.permutation, BoundedPermutation):
            raise ValueError(
                f"samples cannot move (placement.samples): layer {number} bounds the rows of its experts by "
                "those of earlier steps (moe.bound_factor), when ranks had other samples. Set "
                "moe.bound_factor=none or placement.samples=none"
            )
        if not isinstance(layer.permutation, SortPermutation):
            why = "where a fixed number of slots decides by the samples that share a rank who is dropped"
            if layer.permutation.row_counts:
                why = "where one row serves several experts and cannot be told apart by sample"
            raise ValueError(
                f"samples cannot move (placement.samples): layer {number} orders rows by "
                f"{type(layer.permutation).__name__}, {why}. Route dropless with the sort permutation "
                "(moe.capacity_factor=none, moe.one_copy_per_rank=false, moe.dispatch other than node_once), "
                "or set placement.samples=none"
            )
    if moe.aux_loss_group == "microbatch":
        raise ValueError(
            "samples cannot move (placement.samples): moe.aux_loss_group = microbatch judges balance by the "
            "samples that share a rank. Use global or sequence, or set placement.samples=none"
        )


# ---- counting, new homes, and everything that follows a sample --------------------------------------------


F, B = Phase.FORWARD, Phase.BACKWARD


def _asked(context: StepContext, layer: int) -> MoELayer | None:
    """Return the next MoE layer, if its gate is asked what samples will want there; else None."""
    following = context.following(layer)
    asks = context.of(Relocation).how.prediction == "next_gate" and following is not None
    return context.layers[following].moe if asks and following is not None else None


@handles(Op.SAMPLE_COUNTS, F)
def sample_counts(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return counts: rows of every sample by position, then by expert of the next layer, int32."""
    positions_Tk: Tensor = inputs.one("positions")
    samples = len(context.batch.tokens[microbatch(task)])
    here = count_choices(positions_Tk, samples, inputs.one("counts").shape[1])
    following = _asked(context, task.layer)
    if following is None:
        expected = here.new_zeros(samples, 0)
    else:
        experts_Tk = following.expected(inputs.one("tokens"), Tokens(samples=samples))
        valid_BL = context.metadata_of(task, inputs).valid_BL
        if valid_BL is not None:
            experts_Tk = experts_Tk.masked_fill(~valid_BL.reshape(-1, 1), -1)
        expected = count_choices(experts_Tk, samples, following.num_experts)
    return {"counts": torch.cat([here, expected], dim=1).int()}


@handles(Op.SAMPLE_LOADS, F)
def sample_loads(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return route: how many rows go where, from where samples are now; loads: a table of all samples."""
    counts: Tensor = inputs.one("counts")
    maker, samples_P = context.maker(task.layer), context.batch.companions[microbatch(task)]
    following = _asked(context, task.layer)
    made = partial(
        SampleTable.of,
        samples_B=samples_P,
        exchange_group=context.of(Relocation).exchange_group,
        ranks=maker.place.ep_size,
        positions=counts.shape[1] - (0 if following is None else following.num_experts),
        chunks=task.cut.slices,
    )
    everyone = to_host(context.transport(task).all_gather(counts, samples_P, task.axes))
    loads = Later.after(everyone, made)
    route = Later.after(loads, lambda table: maker.from_table(table.sent(table.device_I), context.degrees))
    return {"route": route, "loads": loads}


@handles(Op.SAMPLE_PLACES, F)
def sample_places(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return homes: those of all samples, and what follows from them here. Numbers on the host only."""
    loads: SampleTable = Later.of(inputs.one("loads"))
    placing, following = context.of(Relocation), context.following(task.layer)
    visit = Visit(
        layer=task.layer,
        microbatch=microbatch(task),
        here=context.replication(task.layer),
        following=None if following is None else context.replication(following),
        training=context.training,
    )
    length = context.batch.tokens[microbatch(task)].shape[1]
    # How many rows in transit to experts weigh as much as what follows one token beside them.
    moe, sent_bytes = context.layers[task.layer].experts, (context.wire_dtype or torch.float32).itemsize
    width = 1024  # stands for any hidden size: scales are a small part of a row
    beside_bytes = context.residual_transport.separate_bytes + (0 if moe.shared is None else sent_bytes)
    weight = width * beside_bytes / context.moe.row_bytes(width, sent_bytes)
    device_I = placing.homes(loads, visit, round(length * weight))
    maker = context.maker(task.layer)
    return {"homes": settle(loads, device_I, placing.member, maker, context.degrees)}


@handles(Op.SAMPLE_HOMES, F)
def sample_homes(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return homes, and their routes for combine.

    Raises:
        PlacementError: Unless all members found the same.
    """
    homes: SampleHomes = inputs.one("homes")
    transport = context.transport(task)
    mine = on_device([homes.digest], context.batch.tokens[0].device)
    once = [1] * transport.size(task.axes)
    gathered = transport.all_gather(mine, once, task.axes)
    if device_of(gathered).is_gpu:  # the device stops before combine reads them, and no host waits for it
        device_of(gathered).check(
            (gathered == mine).all(), f"homes of samples of layer {task.layer} differ by rank"
        )
        return {"homes": homes, "route": homes.routes}
    everyone: list[int] = gathered.tolist()
    if differing := [member for member, digest in enumerate(everyone) if digest != everyone[0]]:
        raise PlacementError(
            f"members {', '.join(map(str, differing))} of the group along {' x '.join(task.axes)} found "
            f"other homes for samples of layer {task.layer} than member 0: combine would send rows to ranks "
            "that do not expect them. Run the same versions of numpy and POT on all ranks"
        )
    return {"homes": homes, "route": homes.routes}


# ---- samples -----------------------------------------------------------------------------------------------


def carry(context: StepContext, task: Task, way: Crossing | None, columns: Sequence[Tensor]) -> list[Tensor]:
    """Move tensors by sample, [B, ...], along a crossing, by one all-to-all of bytes for all of them.

    Returns:
        Those of the samples that are here afterwards.
    """
    if way is None:
        return list(columns)
    device = columns[0].device
    leaving, arriving, stayed, staying = (
        on_device(numbers, device) for numbers in (way.leaving, way.arriving, way.kept_from, way.kept_to)
    )
    rows = [each.index_select(0, leaving) for each in columns]
    flat = [each.reshape(len(each), each.shape[1:].numel()).view(torch.uint8) for each in rows]
    packed = torch.cat(flat, dim=1)
    came = context.transport(task).all_to_all(packed, way.sent, way.received, task.axes)
    found = []
    sizes_bytes = [each.shape[1:].numel() * each.element_size() for each in columns]
    for each, part in zip(columns, came.split(sizes_bytes, dim=1), strict=True):
        found.append(out := torch.empty_like(each))
        out.index_copy_(0, staying, each.index_select(0, stayed))
        # As one row: of samples without bytes (a rank may have none of their tokens) torch views no matrix.
        numbers = part.clone(memory_format=torch.contiguous_format).view(-1).view(each.dtype)
        out.index_copy_(0, arriving, numbers.view(len(part), *each.shape[1:]))
    return found


@handles(Op.SAMPLE_MOVE, F)
def sample_move(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return, for the samples that are here now, order, metadata, and those of residual, weights and shared
    that are not in their rows."""
    known = context.moved_metadata(task, inputs)
    by_token = {role: inputs.one(role) for role in (*BESIDE_ROWS, "positions") if role in inputs}
    marks = {"valid": known.valid_BL, "documents": known.keys.documents_BL}
    given = {name: each for name, each in marks.items() if each is not None}
    facts = (known.keys.sample_ids_B, known.labels_BL, *given.values())
    homes: SampleHomes = inputs.one("homes")
    columns = [*_by_sample(context, task, inputs, by_token), *facts]
    taken = carry(context, task, homes.crossing, columns)
    ids_B, labels_BL, *others = taken[len(by_token) :]
    came_marks = dict(zip(given, others, strict=True))
    came = replace(
        known,
        labels_BL=labels_BL,
        keys=replace(known.keys, sample_ids_B=ids_B, documents_BL=came_marks.get("documents")),
        valid_BL=came_marks.get("valid"),
    )
    moved = _by_token(by_token, taken)
    moe, positions_Tk = context.layers[task.layer].experts, moved.pop("positions")
    # Sorting is computation, which must not keep this lane from sending: the task that reads it does it.
    order = Later(lambda: moe.arrange(positions_Tk, came.info, task.cut.slices), (positions_Tk, came))
    return {**moved, "order": order, "metadata": came}


@handles(Op.SAMPLE_MOVE, B)
def sample_move_back(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return gradients of moved residual, weights and shared, on the ranks where these were computed."""
    grads = {role: inputs.all(f"d_{role}") for role in BESIDE_ROWS}
    given = {role: added(found) for role, found in grads.items() if found}
    way = inputs.one("homes").crossing
    columns = _by_sample(context, task, inputs, given)
    return _by_token(given, carry(context, task, None if way is None else way.back, columns))


def _by_sample(
    context: StepContext, task: Task, inputs: Inputs, tensors: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return tensors [T, N] as [B, L, N]."""
    samples, length = context.metadata_of(task, inputs).labels_BL.shape  # a device keeps their number
    return [each.reshape(samples, length, each.shape[-1]) for each in tensors.values()]


def _by_token(like: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return tensors by token and role, as many as `like` has: the inverse of `_by_sample`."""
    pairs = zip(like, tensors[: len(like)], strict=True)
    return {role: each if role == "residual" else each.flatten(0, 1) for role, each in pairs}


# ---- rows at their experts ---------------------------------------------------------------------------------


@handles(Op.ROW_ORDER, F)
def row_order(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: a tensor [R, M] per slice of the chunk, home by home."""
    del context
    homes: SampleHomes = inputs.one("homes")
    rows = zip(task.cut.held, inputs.one("rows"), strict=True)
    saved = {s: homes.rows[s] for s in task.cut.held}
    return {"rows": tuple(_taken(rows_RM, homes.rows[s], back=False) for s, rows_RM in rows), "saved": saved}


@handles(Op.ROW_ORDER, B)
def row_order_back(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: gradients by slice, in the order in which experts had the rows."""
    del context
    orders = {s: order for saved in inputs.all("saved") for s, order in saved.items()}
    rows = zip(task.cut.held, inputs.one("d_rows"), strict=True)
    return {"rows": tuple(_taken(rows_RM, orders[s], back=True) for s, rows_RM in rows)}


def _taken(rows_RM: Tensor, order: RowOrder | None, *, back: bool) -> Tensor:
    if order is None:
        return rows_RM
    return rows_RM.index_select(0, on_device(order.back if back else order.forward, rows_RM.device))
