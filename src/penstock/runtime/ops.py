"""Handlers of the core's own ops: transfers of rows, computation of blocks and experts, sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from penstock.graph import Cut, Name, Phase, Task
from penstock.moe import ChunkRoute
from penstock.moe.products import AutogradWeights, WeightGradients
from penstock.moe.routers import RouterSums
from penstock.ops import Op
from penstock.ops.core import COMBINE_OF, DISPATCH_OF, GRADIENT_KINDS, KindName
from penstock.routing.routes import Routes
from penstock.runtime.batch import SampleMetadata
from penstock.runtime.fingerprints import VALUES
from penstock.runtime.handlers import (
    NOTHING,
    AnySegment,
    Inputs,
    Layer,
    LossGradients,
    Outputs,
    StepContext,
    handles,
)
from penstock.runtime.statistics import HeadSums, SampleLoads, StepStatistics
from penstock.runtime.transport import HostCounts, Later, exchange_counts, send_home, send_out

# ---- transfers: handlers that move rows. The transpose of a leg is the same leg the other way -------------
#
# Rows that leave for another rank or come from one are a tuple with one tensor per slice; between two legs
# they are one tensor, rank by rank.


F, B = Phase.FORWARD, Phase.BACKWARD
Rows = Tensor | tuple[Tensor, ...]


@handles(Op.COUNTS, F)
def counts(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return route: how many rows go where."""
    maker, transport = context.counting(task.layer), context.transport(task)
    return {"route": exchange_counts(inputs.one("counts"), maker, transport, context.degrees, task.axes)}


def _leg(context: StepContext, task: Task, inputs: Inputs, rows: Rows, *, outward: bool) -> Outputs:
    """Move rows along a leg towards the experts, or along the same leg home."""
    routes, cut = routes_of(inputs), task.cut
    if isinstance(rows, tuple):
        rows = held(rows, cut)
    assert task.chunk is not None, task
    legs = routes.cuts[cut.chunks][task.chunk]
    if not legs:  # every expert is on this rank
        return {"rows": rows}
    slices = routes.slices[cut.first : cut.stop]
    number = context.maker(task.layer).leg_of[task.op]
    sent, received = [s.rows_sent for s in slices], [s.rows_received for s in slices]
    first, last = (0, len(legs) - 1) if outward else (len(legs) - 1, 0)
    if number == first:
        assert isinstance(rows, tuple), task
        if outward and routes.home:
            rows = tuple(by_position(each, s.sent, routes.home) for each, s in zip(rows, slices, strict=True))
        rows = to_ranks(rows, sent if outward else received)
    assert isinstance(rows, Tensor), task
    transport = context.transports.of(task.lane, legs[number].axes)
    moved = (send_out if outward else send_home)(rows, legs[number], transport)
    if number != last:
        return {"rows": moved}
    came = to_slices(moved, received if outward else sent)
    if routes.home and not outward:
        came = tuple(as_at_home(each, s.sent, routes.home) for each, s in zip(came, slices, strict=True))
    return {"rows": came}


@handles((*COMBINE_OF, *DISPATCH_OF), F)
def move(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: after a leg of dispatch or combine."""
    return _leg(context, task, inputs, inputs.one("rows"), outward=task.op in COMBINE_OF)


@handles((*COMBINE_OF, *DISPATCH_OF), B)
def move_back(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: their gradients after the transpose of the leg."""
    return _leg(context, task, inputs, inputs.one("d_rows"), outward=task.op not in COMBINE_OF)


def held(rows: tuple[Tensor, ...], cut: Cut) -> tuple[Tensor, ...]:
    """Return the slices that a task has, from exactly those slices or from all."""
    return rows[cut.first : cut.stop] if len(rows) == cut.slices else rows


def routes_of(inputs: Inputs) -> Routes:
    """Return the routes of a microbatch: known where sizes are fixed, else in transit to the host."""
    routes: Later[Routes] | Routes = inputs.one("route")
    return Later.of(routes)


# ---- rows of several slices in one transfer ---------------------------------------------------------------
#
# At home and at the experts rows lie slice by slice, so that either phase can take its own runs of slices. In
# transit they lie rank by rank, since a rank gets what is meant for it in one piece. A block is one slice's
# rows for one rank. A chunk that is one slice lies the same either way, and nothing is copied.
#
# Where rows are split among several homes of their expert when counts are known, they lie at home by expert,
# and leave by position.
#
# Shapes: K slices of a chunk, P ranks.


Sizes = Sequence[Sequence[int]]
"""Rows of every block, [K][P]."""


def to_ranks(slices: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Return the slices' rows rank by rank, inside a rank slice by slice."""
    if len(slices) == 1:
        return slices[0]
    blocks = [rows.split(list(row)) for rows, row in zip(slices, sizes, strict=True)]
    return torch.cat([blocks[k][p] for p in range(len(sizes[0])) for k in range(len(sizes))])


def to_slices(rows: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """Return rows slice by slice: the inverse of `to_ranks`."""
    if len(sizes) == 1:
        return (rows,)
    blocks = rows.split([size for by_slice in zip(*sizes, strict=True) for size in by_slice])
    return tuple(torch.cat(blocks[k :: len(sizes)]) for k in range(len(sizes)))


def joined(slices: Sequence[Tensor]) -> Tensor:
    """Return one tensor of all slices, slice by slice."""
    return slices[0] if len(slices) == 1 else torch.cat(list(slices))


def by_position(rows: Tensor, sent: Sequence[Sequence[int]], home: Sequence[int]) -> Tensor:
    """Return a slice's rows, which lie in the order `home`, by position.

    Args:
        sent: The rows of the slice by rank and by slot there.
    """
    return _turned(rows, _filled(sent, home), _filled(sent, sorted(home)))


def as_at_home(rows: Tensor, sent: Sequence[Sequence[int]], home: Sequence[int]) -> Tensor:
    """Return a slice's rows in the order `home`: the inverse of `by_position`."""
    return _turned(rows, _filled(sent, sorted(home)), _filled(sent, home))


def _filled(sent: Sequence[Sequence[int]], positions: Sequence[int]) -> dict[int, int]:
    """Return the sizes of the blocks that have rows, in the order of `positions`."""
    sizes = [size for of_rank in sent for size in of_rank]
    return {position: sizes[position] for position in positions if sizes[position]}


def _turned(rows: Tensor, lie: dict[int, int], wanted: dict[int, int]) -> Tensor:
    """Return blocks in another order; without a copy where they lie in it already."""
    if list(lie) == list(wanted):
        return rows
    blocks = dict(zip(lie, rows.split(list(lie.values())), strict=True))
    return torch.cat([blocks[position] for position in wanted])


# ---- handlers of a block's computation, except its experts: each runs one segment of the model ------------
#
# Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens, E experts, R rows in expert order.


BESIDE_ROWS = ("residual", "weights", "shared")
"""Inputs of unpermute that outputs are added to, multiplied by and joined by, unless rows brought them."""


@dataclass(frozen=True)
class SavedRoute:
    """The forward values that the backward of a task with a gate needs."""

    segment: AnySegment
    chosen_BE: Tensor


Compute = Callable[..., Sequence[Tensor]]
"""Computes outputs of a task, from the context, the task, its inputs, and those that have entered."""


def computes(op: str, entered: Sequence[str], left: Sequence[str]) -> Callable[[Compute], Compute]:
    """Register what makes the outputs `left` of the inputs `entered`, as one segment, and its backward."""

    def register(compute: Compute) -> Compute:
        def forward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
            segment = context.segment()
            tensors = segment.enter(*map(inputs.one, entered))
            with context.autocast():
                outputs = segment.leave(*compute(context, task, inputs, *tensors))
            return {**dict(zip(left, outputs, strict=True)), "saved": segment}

        def backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
            del context
            return segment_gradients(entered, left, task, inputs)

        handles(op, F)(forward)
        handles(op, B)(backward)
        return compute

    return register


def segment_gradients(entered: Sequence[str], left: Sequence[str], task: Task, inputs: Inputs) -> Outputs:
    """Return gradients of what has entered a segment, by those of what has left it."""
    segment: AnySegment = inputs.one("saved")
    grads = segment.backward([added(inputs.all(f"d_{name}")) for name in left])
    return {role: present(grad, task) for role, grad in zip(entered, grads, strict=True)}


@computes(Op.EMBED, (), ("hidden",))
def embed(context: StepContext, task: Task, inputs: Inputs) -> Sequence[Tensor]:
    """Return hidden: [B, L, M]."""
    tokens_BL = context.batch.tokens[microbatch(task)]
    return (context.parts.embed(tokens_BL, context.metadata_of(task, inputs).keys),)


@handles(Op.ATTENTION, F)
def attention(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return, in a dense block, hidden: [B, L, M]; in an MoE block, all outputs of `route`."""
    layer, metadata = context.layers[task.layer], context.metadata_of(task, inputs)
    segment = context.segment()
    (h_BLM,) = segment.enter(inputs.one("hidden"))
    with context.autocast():
        residual_BLM, x_TM = layer.block.attend(h_BLM, metadata.keys)
        if layer.moe is not None:
            return route(context, task, metadata, segment, residual_BLM, x_TM)
        (out_BLM,) = segment.leave(layer.block.add(residual_BLM, layer.block.dense(x_TM), metadata.keys))
    return {"hidden": out_BLM, "saved": segment}


def route(
    context: StepContext,
    task: Task,
    known: SampleMetadata,
    segment: AnySegment,
    residual_BLM: Tensor,
    x_TM: Tensor,
) -> Outputs:
    """Choose experts for the tokens of a segment, and end it.

    Args:
        known: The samples of the tokens.

    Returns:
        The outputs by name: rows, a tensor [R, M] per slice; order, how they were permuted; routers, the
        gate's sums; positions, what every token chose, [T, k], where tokens choose; counts, the rows for
        every rank where they are exchanged, or their bounds; route, the sizes where they are fixed.
    """
    layer = context.layers[task.layer]
    routed = context.residual_transport.route(layer, residual_BLM, x_TM, known.info, task.cut.slices)
    sums, plan = routed.sums, routed.plan
    handed_out = [] if sums.logits_TE is None else [sums.logits_TE]
    residual_BLM, rows_RM, weights, probability_BE, z, x_TM, *handed_out = segment.leave(
        residual_BLM, routed.rows_RM, routed.weights, sums.probability_BE, sums.z, routed.x_TM, *handed_out
    )
    for logits_TE in handed_out:
        context.ending.take(task, logits_TE)
    maker = context.maker(task.layer)
    slots = sum(plan.slots) if plan.slots is not None and routed.positions_Tk is not None else None
    chosen_BE, ids_B = sums.chosen_BE, known.keys.sample_ids_B
    if not context.counts_once(task):  # another rank has the same tokens and counts them
        slots = None
        chosen_BE, probability_BE, z = map(torch.zeros_like, (chosen_BE, probability_BE, z))
    counted = RouterSums(chosen_BE, probability_BE, z, ids_B=ids_B, slots=slots, wanted_N=plan.wanted_N)
    return {
        "residual": residual_BLM,
        "rows": rows_RM.split_with_sizes(plan.chunk_rows),
        "weights": weights,
        "order": plan,
        "tokens": x_TM,
        "positions": routed.positions_Tk,
        "counts": plan.counts_CN if plan.bounds_CN is None else plan.bounds_CN,
        "route": None
        if plan.slots is None
        else maker.even(plan.slots, layer.experts.num_local_experts, context.degrees),
        "choices": sums.chosen_BE,
        "routers": counted,
        "saved": SavedRoute(segment, sums.chosen_BE),
    }


@handles(Op.ATTENTION, B)
def attention_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: the gradient of what entered the block, [B, L, M]."""
    saved: SavedRoute | AnySegment = inputs.one("saved")
    if isinstance(saved, SavedRoute):
        (grad_BLM,) = saved.segment.backward(route_gradients(context, task, saved, inputs))
    else:
        (grad_BLM,) = saved.backward([added(inputs.all("d_hidden"))])
    return {"hidden": present(grad_BLM, task)}


def route_gradients(
    context: StepContext, task: Task, saved: SavedRoute, inputs: Inputs
) -> list[Tensor | None]:
    """Return gradients of all outputs of `route`, in their order; None for an output without a gradient."""
    statistics: StepStatistics = inputs.one("d_routers")
    y = context.layers[task.layer].before
    judged_BE = inputs.maybe("d_choices")
    judged_BE = saved.chosen_BE if judged_BE is None else judged_BE
    slope_BE = context.balance.slope(judged_BE, statistics.chosen_YE, y, statistics.tokens)
    residual = inputs.all("d_residual")
    return [
        added(residual) if residual else None,
        joined([rows for chunk in inputs.all("d_rows") for rows in chunk]),
        inputs.maybe("d_weights"),
        context.balance_slope * slope_BE,
        context.z_slope,
        inputs.maybe("d_tokens"),
        *context.ending.router_gradients(task),
    ]


@computes(Op.SHARED, ("tokens",), ("shared",))
def shared(context: StepContext, task: Task, inputs: Inputs, x_TM: Tensor) -> Sequence[Tensor]:
    """Return shared: the output of the shared experts, [T, M]."""
    del inputs
    moe = context.layers[task.layer].experts
    assert moe.shared is not None, task
    return (moe.shared(x_TM),)


@handles(Op.UNPERMUTE, F)
def unpermute(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: what leaves the block, [B, L, M]."""
    layer, metadata = context.layers[task.layer], context.metadata_of(task, inputs)
    slices = [rows for chunk in inputs.all("rows") for rows in chunk]
    given = {"rows": joined(slices), **{r: inputs.one(r) for r in BESIDE_ROWS if r in inputs}}
    segment = context.segment()
    entered = dict(zip(given, segment.enter(*given.values()), strict=True))
    plan, beside = Later.of(inputs.one("order")), map(entered.get, BESIDE_ROWS)
    residual_BLM, weights, shared_TM = beside
    with context.autocast():
        out_TM = layer.experts.unpermute(entered["rows"], weights, plan, shared_TM)
        if residual_BLM is None:  # rows have it
            out_BLM = out_TM.view(*metadata.labels_BL.shape, out_TM.shape[1])
        else:
            out_BLM = layer.block.add(residual_BLM, out_TM, metadata.keys)
        (h_BLM,) = segment.leave(out_BLM)
    return {"hidden": h_BLM, "saved": (segment, tuple(given), [rows.shape[0] for rows in slices])}


@handles(Op.UNPERMUTE, B)
def unpermute_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return gradients of all that entered U: rows by slice, and the inputs beside them.

    That of weights is None where they travelled with the rows.
    """
    del context
    segment, roles, sizes = inputs.one("saved")
    grads = dict(zip(roles, segment.backward([added(inputs.all("d_hidden"))]), strict=True))
    return {**grads, "rows": present(grads["rows"], task).split_with_sizes(sizes)}


class TokenLoss:
    """The mean cross-entropy of all ranks' tokens, which the step computes itself and returns."""

    tells_at_once = False
    averaged = None

    def forward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return the sums of a microbatch's token losses."""
        metadata = context.metadata_of(task, inputs)
        segment = context.segment()
        (h_BLM,) = segment.enter(inputs.one("hidden"))
        with context.autocast():
            (loss,) = segment.leave(context.parts.head(h_BLM, metadata.labels_BL))
        sums = HeadSums(loss, (metadata.labels_BL >= 0).sum(), metadata.num_tokens())
        return {"loss": sums, "saved": (segment, loss.dtype)}

    def backward(self, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
        """Return the gradient of what entered the head."""
        segment, loss_dtype = inputs.one("saved")
        slope = (context.slopes.loss / self._divisor(inputs.one("d_loss"))).to(loss_dtype)
        (grad_BLM,) = segment.backward([slope])
        return {"hidden": present(grad_BLM, task)}

    def take(self, task: Task, logits_TE: Tensor) -> None:
        """Never called: routers hand out nothing."""

    def router_gradients(self, task: Task) -> list[Tensor]:
        """Return nothing."""
        del task
        return []

    def outputs(self, context: StepContext, statistics: StepStatistics) -> tuple[Tensor, ...]:
        """Return what the step returns: copies, or step and outputs would keep each other alive."""
        del context
        return (statistics.loss.clone(),)

    def slopes(self, *grads: Tensor) -> LossGradients:
        """Return the gradients that the tasks start from, for those of the outputs."""
        return LossGradients(loss=grads[0], balance=grads[0], alike=grads[0])

    def _divisor(self, statistics: StepStatistics) -> Tensor:
        return statistics.valid


@handles(Op.HEAD, F)
def head(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return loss: sums of a microbatch."""
    return context.ending.forward(context, task, inputs)


@handles(Op.HEAD, B)
def head_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hidden: the gradient of what entered the head, [B, L, M]."""
    return context.ending.backward(context, task, inputs)


def microbatch(task: Task) -> int:
    """Return the number of a task's microbatch."""
    assert task.microbatch is not None, task
    return task.microbatch


def present(grad: Tensor | None, task: Task) -> Tensor:
    """Return a gradient that every input of a segment must have."""
    assert grad is not None, f"{task}: every input of a segment must reach its outputs"
    return grad


def added(grads: Sequence[Tensor]) -> Tensor:
    """Return the sum of several gradients of one output, in the order of their tasks."""
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return total


# ---- handlers of expert computation -----------------------------------------------------------------------
#
# Every slice is a segment of its own, so that a backward chunk may be a different run of slices than a
# forward chunk.
#
# Shapes: R rows of a slice, M hidden size.


Left = TypeVar("Left")


SavedSlice = tuple[AnySegment, WeightGradients | AutogradWeights]
"""What the backward of X needs of one slice of X.F."""


@handles(Op.EXPERTS, Phase.FORWARD)
def experts(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: a tensor [R, M] per slice of the chunk."""
    layer = context.layers[task.layer]
    routes = routes_of(inputs).at_experts[task.cut.first : task.cut.stop]
    pairs = zip(inputs.one("rows"), routes, strict=True)
    made = [compute_slice(context, layer, rows_RM, route) for rows_RM, route in pairs]
    saved = {s: left for s, (_, left) in zip(task.cut.held, made, strict=True)}
    return {"rows": tuple(out for out, _ in made), "saved": saved}


def compute_slice(
    context: StepContext, layer: Layer, rows_RM: Tensor, route: ChunkRoute
) -> tuple[Tensor, SavedSlice]:
    """Return experts' outputs for the rows of a slice, and what its backward needs."""
    segment, weights = context.segment(), context.weights()
    (rows_RM,) = segment.enter(rows_RM)
    with context.autocast():
        (out_RM,) = segment.leave(context.residual_transport.compute(layer, rows_RM, route, weights.product))
    return out_RM, (segment, weights)


@handles(Op.EXPERTS, Phase.BACKWARD, Phase.INPUT)
def experts_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: gradients of the experts' inputs, by slice; left: weight gradients still to be made."""
    del context
    saved = take_slices(task, inputs.all("saved"))
    pairs = zip(saved, inputs.one("d_rows"), strict=True)
    rows = tuple(present(segment.backward([grad_RM])[0], task) for (segment, _), grad_RM in pairs)
    return {"rows": rows, "left": tuple(weights for _, weights in saved)}


def take_slices(task: Task, saved: tuple[dict[int, Left], ...]) -> list[Left]:
    """Take out what X.F left of the slices of a backward chunk.

    If it were not taken out, a forward chunk that several backward chunks share would hold everything until
    the last has run.
    """
    holder: Mapping[int, dict[int, Left]] = {s: left for left in saved for s in left}
    return [holder[s].pop(s) for s in task.cut.held]


@handles(Op.EXPERTS, Phase.WEIGHT)
def experts_weights(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Compute the weight gradients that the input gradients deferred: only the update needs them."""
    del context, task
    for weights in inputs.one("left"):
        weights.compute()
    return NOTHING


# ---- handlers that meet all ranks: sums of loss, statistics and gradients, and the loads of experts -------


@handles(Op.STATISTICS, Phase.FORWARD)
def statistics(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return loss, routers, statistics: the sums, which stand for the gradients of what was summed.

    The input `choices` has those by which balance is judged, where no rank has all choices of a sample.
    """
    layers: dict[int, list[RouterSums]] = {}
    judged = dict(zip(map(_piece, task.inputs.get("choices", ())), inputs.all("choices"), strict=True))
    for name, sums in zip(task.inputs["routers"], inputs.all("routers"), strict=True):
        judged_sums = replace(sums, judged_BE=judged.get(_piece(name))) if judged else sums
        layers.setdefault(name.layer, []).append(judged_sums)
    packed = context.codec.pack(inputs.all("loss"), list(layers.values()))
    if context.fingerprint is not None:  # here, since by now parameters that were updated are gathered
        context.marks[VALUES] = context.fingerprint()
    everything = torch.cat([packed, context.marks])
    context.transport(task).all_reduce(everything, task.axes)
    context.bounds.tell(layers, context.transport(task), task.axes)
    context.total = context.codec.unpack(everything[: len(packed)])
    context.marks_total = HostCounts(everything[len(packed) :])
    return dict.fromkeys(("loss", "routers", "statistics"), context.total)


def _piece(name: Name) -> tuple[int, int | None]:
    """Return the layer and microbatch of a task."""
    return name.layer, name.microbatch


def all_reduce(kind: KindName, context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Sum one piece of a layer's gradients of one kind over the task's ranks, in place."""
    del inputs  # the gradients are in the bucket; the edges say that they are complete
    assert task.piece is not None, task
    for flat in context.buckets.by_kind[kind][task.layer]:
        context.transport(task).all_reduce(flat.piece(task.piece, task.cut.parts), task.axes)
    return NOTHING


for _kind in GRADIENT_KINDS:
    handles(GRADIENT_KINDS[_kind].reduce, B)(partial(all_reduce, _kind))


# ---- the handler that gathers the loads of experts. Shapes: P ranks, Y MoE layers, E experts --------------


@handles(Op.LOADS, Phase.BACKWARD)
def gather_loads(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return loads: int32 [P, Y, E], how often tokens of each rank chose each expert in this step.

    Drops are not taken off. Of ranks that have the same tokens the first one counts them.
    """
    chosen: dict[int, list[Tensor]] = {}
    samples: dict[int, list[SampleLoads]] = {}
    for name, sums in zip(task.inputs["routers"], inputs.all("routers"), strict=True):
        assert sums.ids_B is not None, "a step knows its samples"
        chosen.setdefault(name.layer, []).append(sums.chosen_E)
        samples.setdefault(name.layer, []).append(SampleLoads(sums.ids_B, sums.chosen_BE))
    context.sample_loads = list(samples.values())
    chosen_YE = torch.stack([torch.stack(layer).sum(dim=0).int() for layer in chosen.values()])
    transport = context.transport(task)
    once = [1] * transport.size(task.axes)
    context.loads_PYE = transport.all_gather(chosen_YE.unsqueeze(0), once, task.axes)
    return {"loads": context.loads_PYE}
