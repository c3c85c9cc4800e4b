"""Handlers that bring experts to their hosts, gradients of guests home, and plan the next step's guests."""

from __future__ import annotations

import torch

from penstock.graph import Phase, Task
from penstock.ops import Op
from penstock.placement import PlacementError
from penstock.runtime.guests import Piece
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.moving import Plans


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


@handles(Op.PLAN_GUESTS, Phase.BACKWARD)
def plan(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """hostings: what this rank has found for the next step."""
    del task
    return {"hostings": context.host.plan(inputs.one("loads"))}


@handles(Op.COMPARE_GUESTS, Phase.BACKWARD)
def compare(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """All ranks that exchange rows must have found the same: an error says who has not."""
    plans: Plans = inputs.one("hostings")
    transport = context.transports.of(task.lane, task.axes)
    mine = torch.tensor([plans.hash64], device=context.marks.device)
    everyone = transport.all_gather(mine, [1] * transport.size(task.axes), task.axes).tolist()
    if different := [place for place, theirs in enumerate(everyone) if theirs != plans.hash64]:
        raise PlacementError(
            f"ranks have planned different guests for the next step: in the group of this rank those at "
            f"places {different} have others than it has. Plans are made from the same loads, so versions or "
            "settings differ between ranks. Start all ranks with the same ones"
        )
    context.plans = plans
    return NOTHING


def _piece(context: StepContext, task: Task) -> Piece:
    assert task.piece is not None, task
    return Piece(task.piece, task.cut.parts, context.transports.of(task.lane, task.axes), task.axes)
