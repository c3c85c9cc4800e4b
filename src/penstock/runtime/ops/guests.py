"""Handlers that bring experts to their hosts, and the gradients of guests home to owners."""

from __future__ import annotations

from penstock.graph import Phase, Task
from penstock.ops import Op
from penstock.runtime.guests import Piece
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles


@handles(Op.GUEST_PARAMETERS, Phase.FORWARD)
def bring(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """A piece of the parameters of all guests of a layer. The edge from it says that they are here."""
    del inputs
    context.lodging.of(task.layer).bring(_piece(context, task))
    return {"guests": None}


@handles(Op.GUEST_GRADIENTS, Phase.BACKWARD)
def take_home(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """A piece of the gradients of all guests of a layer, added to what their owners have."""
    del inputs  # the gradients are the guests' own; the edges say that they are complete
    context.lodging.of(task.layer).take_home(_piece(context, task))
    return NOTHING


def _piece(context: StepContext, task: Task) -> Piece:
    assert task.piece is not None, task
    return Piece(task.piece, task.cut.parts, context.transports.of(task.lane, task.axes), task.axes)
