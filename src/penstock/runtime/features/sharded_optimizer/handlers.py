"""Handlers of an optimiser of which every rank owns a share."""

from __future__ import annotations

from penstock.graph import Phase, Task
from penstock.ops import Op
from penstock.ops.gradients import GRADIENT_KINDS
from penstock.runtime.features.sharded_optimizer.updates import Updates
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles


def scatter(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Sum a piece of a layer's gradients; this rank has its share of the sum."""
    del inputs  # the gradients are in the bucket; the edges say that they are complete
    context.of(Updates).scatter(task, context.transports.of(task.lane, task.axes))
    return NOTHING


@handles(Op.NORM, Phase.BACKWARD)
def norm(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Take the norm of all gradients, in a backward pass after which parameters change."""
    del inputs
    if context.of(Updates).in_backward:
        assert context.total is not None, "backward follows forward"
        transport = context.transports.of(task.lane, task.axes)
        context.of(Updates).judge(task, transport, context.total.loss)
    return NOTHING


def update(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Run AdamW on this rank's share of a piece. Without a norm to wait for, only the loss may refuse it."""
    if context.of(Updates).in_backward:
        assert context.total is not None, "backward follows forward"
        context.of(Updates).update(task, None if "scale" in inputs else context.total.loss)
    return NOTHING


def gather(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Gather a piece of stale parameters. Returns parameters: None; the edge says they are current."""
    del inputs
    updates = context.maybe(Updates)
    if updates is not None and updates.waits(task):
        updates.gather(task, context.transports.of(task.lane, task.axes))
    return {"parameters": None}


def gather_at_once(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Gather a piece of parameters from their owners, in a backward pass after which parameters change."""
    del inputs
    if context.of(Updates).in_backward:
        context.of(Updates).gather(task, context.transports.of(task.lane, task.axes))
    return NOTHING


for kind in GRADIENT_KINDS.values():
    handles(kind.scatter, Phase.BACKWARD)(scatter)
    handles(kind.update, Phase.BACKWARD)(update)
    handles(kind.gather, Phase.FORWARD)(gather)
    handles(kind.gather, Phase.BACKWARD)(gather_at_once)
