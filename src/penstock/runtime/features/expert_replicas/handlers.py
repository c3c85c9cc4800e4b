"""Handlers that bring experts to their replicas and gradients of replicas home, and plan the next
replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from penstock.device import on_device
from penstock.features.expert_replicas.encoding import Numbers
from penstock.graph import Phase, Task
from penstock.moe import MoELayer
from penstock.ops import Op
from penstock.placement import PlacementError
from penstock.runtime.features.expert_replicas.manager import (
    ExpertMoving,
    ReplicaManager,
    StepReplicas,
    check_no_hooks,
)
from penstock.runtime.features.expert_replicas.replicas import Piece
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.machinery import FeatureStack, Machinery, StackFeature, StepFeature
from penstock.runtime.transport import Later, to_host
from penstock.schedule import StepPlan
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS
from penstock.topology import Layout


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
    context.of(StepReplicas).next_plans = Later.after(
        everyone,
        lambda told: manager.joined(np.split(told.astype(np.int32, copy=False), ends)[:-1]),
    )
    return NOTHING


def _piece(context: StepContext, task: Task) -> Piece:
    assert task.piece is not None, task
    return Piece(task.piece, task.cut.parts, context.transport(task), task.axes)


# ---- replicas in a stack -----------------------------------------------------------------------------------


class ExpertReplicas(StackFeature):
    """The replicas that the ranks of a stack hold: `manager` lends them to steps, and plans the next ones."""

    def __init__(self, layout: Layout, device: torch.device, moving: ExpertMoving | None = None) -> None:
        self.manager = ReplicaManager(layout, device, moving)

    def copy(self) -> ExpertReplicas:
        copied = object.__new__(ExpertReplicas)
        copied.manager, copied.active = self.manager.copy(), self.active
        return copied

    def check(self, plan: StepPlan, stack: FeatureStack) -> None:
        check_replicas(stack.moe_layers, plan.shape, stack.machinery)

    def adopt(self, plan: StepPlan, stack: FeatureStack) -> None:
        self.manager.open(stack.moe_layers, plan.shape)
        self.active = plan.shape.replica_slots > 0

    def check_layers(self, stack: FeatureStack) -> None:
        check_takes_replicas(stack.moe_layers, stack.plan.shape, stack.machinery.layout)

    def step(self, stack: FeatureStack) -> StepFeature:
        return self.manager.lend(stack.moe_layers)


# ---- checks that ranks can hold replicas of others' experts in a stack, and agree on which rank holds
# which replica


Layers = Sequence[MoELayer | None]


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
        kinds = (f"{name} {list(p.shape)} {p.dtype}" for name, p in experts.named_parameters())
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
