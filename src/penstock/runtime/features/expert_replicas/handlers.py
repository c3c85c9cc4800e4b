"""Handlers that bring experts to their replicas and gradients of replicas home, and plan the next
replicas."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from penstock.device import on_device
from penstock.features.expert_replicas.encoding import Numbers
from penstock.graph import Phase, Task
from penstock.ops import Op
from penstock.placement import PlacementError
from penstock.runtime.features.expert_replicas.manager import NextReplicas, ReplicaManager, StepReplicas
from penstock.runtime.features.expert_replicas.replicas import Piece
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.transport.legs import Later, to_host


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
    return {"replications": context.of(ReplicaManager).plan(inputs.one("loads"))}


@handles(Op.COMPARE_REPLICAS, Phase.BACKWARD)
def gather_plans(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Gather what all ranks that exchange rows have found. Raises PlacementError if premises differ."""
    numbers: Numbers = inputs.one("replications")
    transport, device = context.transports.of(task.lane, task.axes), context.marks.device
    manager, size = context.of(ReplicaManager), transport.size(task.axes)
    premise = manager.premise
    mine = on_device([[premise, len(numbers)]], device)
    premises, lengths = zip(*transport.all_gather(mine, [1] * size, task.axes).tolist(), strict=True)
    if different := [place for place, theirs in enumerate(premises) if theirs != premise]:
        raise PlacementError(
            f"ranks would plan different replicas for the next step: of this group those at places "
            f"{different} hold others than it does, or plan in another way, so versions or settings differ "
            "between ranks. Start all ranks with the same ones"
        )
    here = on_device(numbers, device, torch.from_numpy(numbers).dtype)
    everyone = to_host(transport.all_gather(here, lengths, task.axes))
    ends = [*accumulate(lengths)]
    context.of(NextReplicas).plans = Later.after(
        everyone,
        lambda told: manager.joined(np.split(told.astype(np.int32, copy=False), ends)[:-1]),
    )
    return NOTHING


def _piece(context: StepContext, task: Task) -> Piece:
    assert task.piece is not None, task
    return Piece(task.piece, task.cut.parts, context.transports.of(task.lane, task.axes), task.axes)
