"""Handlers of expert computation.

Every slice is a segment of its own, so that a backward chunk may be another run of slices than the forward
one.

Shapes: R rows of a slice, M hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.graph import Phase, Task
from penstock.moe import ChunkRoute
from penstock.moe.experts.weight_gradients import AutogradWeights, WeightGradients
from penstock.ops import Op
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.ops.blocks import present
from penstock.runtime.ops.transfers import routes_of
from penstock.runtime.parts import BlockParts
from penstock.runtime.segment import AnySegment


@dataclass(frozen=True)
class SavedSlice:
    """What the backward of X needs of one slice of X.F."""

    segment: AnySegment
    weights: WeightGradients | AutogradWeights


@handles(Op.EXPERTS, Phase.FORWARD)
def experts(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """rows: a tensor [R, M] per slice of the chunk."""
    block = context.parts.parts[task.layer]
    routes = routes_of(inputs).at_experts[task.cut.first : task.cut.stop]
    pairs = zip(inputs.one("rows"), routes, strict=True)
    made = [_slice(context, block, rows_RM, route) for rows_RM, route in pairs]
    saved = {s: left for s, (_, left) in zip(task.cut.held, made, strict=True)}
    return {"rows": tuple(out for out, _ in made), "saved": saved}


def _slice(
    context: StepContext, block: BlockParts, rows_RM: Tensor, route: ChunkRoute
) -> tuple[Tensor, SavedSlice]:
    segment, weights = context.segment(), context.weights()
    (rows_RM,) = segment.enter(rows_RM)
    with context.autocast():
        (out_RM,) = segment.leave(context.carriage.compute(block, rows_RM, route, weights.product))
    return out_RM, SavedSlice(segment, weights)


@handles(Op.EXPERTS, Phase.BACKWARD, Phase.INPUT)
def experts_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """rows: gradients of what the experts received, by slice. left: weight gradients still to be made."""
    del context
    saved = _take_slices(task, inputs.all("saved"))
    pairs = zip(saved, inputs.one("d_rows"), strict=True)
    rows = tuple(present(left.segment.backward([grad_RM])[0], task) for left, grad_RM in pairs)
    return {"rows": rows, "left": tuple(left.weights for left in saved)}


def _take_slices(task: Task, saved: tuple[dict[int, SavedSlice], ...]) -> list[SavedSlice]:
    """What X.F left of the slices of a backward chunk.

    Taken out, or a forward chunk that several of them share would hold all until the last has run.
    """
    holder: Mapping[int, dict[int, SavedSlice]] = {s: left for left in saved for s in left}
    return [holder[s].pop(s) for s in task.cut.held]


@handles(Op.EXPERTS, Phase.WEIGHT)
def experts_weights(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """What the input gradients put off: nothing but the update needs it."""
    del context, task
    for weights in inputs.one("left"):
        weights.compute()
    return NOTHING
