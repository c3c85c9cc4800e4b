"""Handlers of expert computation.

Every slice is a segment of its own, so that a backward chunk may be a different run of slices than a forward
chunk.

Shapes: R rows of a slice, M hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from penstock.graph import Phase, Task
from penstock.moe import ChunkRoute
from penstock.moe.products import AutogradWeights, WeightGradients
from penstock.ops import Op
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.ops.blocks import present
from penstock.runtime.ops.transfers import routes_of
from penstock.runtime.parts import Layer
from penstock.runtime.segment import AnySegment

Left = TypeVar("Left")


@dataclass(frozen=True)
class SavedSlice:
    """The values that the backward of X needs of one slice of X.F."""

    segment: AnySegment
    weights: WeightGradients | AutogradWeights


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
    return out_RM, SavedSlice(segment, weights)


@handles(Op.EXPERTS, Phase.BACKWARD, Phase.INPUT)
def experts_backward(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return rows: gradients of the experts' inputs, by slice; left: weight gradients still to be made."""
    del context
    saved = take_slices(task, inputs.all("saved"))
    pairs = zip(saved, inputs.one("d_rows"), strict=True)
    rows = tuple(present(left.segment.backward([grad_RM])[0], task) for left, grad_RM in pairs)
    return {"rows": rows, "left": tuple(left.weights for left in saved)}


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
