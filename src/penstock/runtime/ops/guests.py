"""Handlers that bring experts to hosts and gradients of guests home, and plan the next guests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from penstock.apportion import Counts
from penstock.device import on_device
from penstock.graph import Phase, Task
from penstock.ops import Op
from penstock.placement import PlacementError
from penstock.placing.told import Numbers
from penstock.runtime.guests import Piece
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.moving import Plans
from penstock.runtime.transport.legs import Later, to_host


@handles(Op.GUEST_PARAMETERS, Phase.FORWARD)
def bring(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Bring a piece of the parameters of all guests of a layer. The edge from it says that they are here."""
    del inputs
    context.lodging.of(task.layer).bring(_piece(context, task))
    return {"guests": None}


@handles(Op.GUEST_GRADIENTS, Phase.BACKWARD)
def take_home(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Add a piece of the gradients of all guests of a layer to what their owners have."""
    del inputs  # the gradients are the guests' own; the edges say that they are complete
    context.lodging.of(task.layer).take_home(_piece(context, task))
    return NOTHING


@handles(Op.PLAN_GUESTS, Phase.BACKWARD)
def plan(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return hostings: what this rank has found for the next step, of its share of the layers."""
    del task
    return {"hostings": context.host.plan(inputs.one("loads"))}


@handles(Op.COMPARE_GUESTS, Phase.BACKWARD)
def gather_plans(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Gather what all ranks that exchange rows have found. Raises PlacementError if premises differ."""
    numbers: Numbers = inputs.one("hostings")
    transport, device = context.transports.of(task.lane, task.axes), context.marks.device
    size, premise = transport.size(task.axes), context.host.premise
    mine = on_device([[premise, len(numbers)]], device)
    premises, lengths = zip(*transport.all_gather(mine, [1] * size, task.axes).tolist(), strict=True)
    if different := [place for place, theirs in enumerate(premises) if theirs != premise]:
        raise PlacementError(
            f"ranks would plan different guests for the next step: in the group of this rank those at places "
            f"{different} host others than it does, or plan in another way, so versions or settings differ "
            "between ranks. Start all ranks with the same ones"
        )
    here = on_device(numbers, device, torch.from_numpy(numbers).dtype)
    everyone = to_host(transport.all_gather(here, lengths, task.axes))
    ends = [*accumulate(lengths)]
    context.plans = Later.after(everyone, lambda told: _joined(context, told, ends))
    return NOTHING


def _joined(context: StepContext, told: Counts, ends: Sequence[int]) -> Plans:
    """Return the plans that follow from what ranks have found. ends: of every rank's numbers, by place."""
    return context.host.joined(np.split(told.astype(np.int32, copy=False), ends)[:-1])


def _piece(context: StepContext, task: Task) -> Piece:
    assert task.piece is not None, task
    return Piece(task.piece, task.cut.parts, context.transports.of(task.lane, task.axes), task.axes)
