"""Handlers that meet all ranks: sums of loss, statistics and gradients, and the loads of experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.graph import Name, Phase, Task
from penstock.moe.choices import RouterSums
from penstock.ops import Op
from penstock.ops.gradients import GRADIENT_KINDS, kind_of_task
from penstock.runtime.fingerprints import VALUES
from penstock.runtime.handlers import NOTHING, Inputs, Outputs, StepContext, handles
from penstock.runtime.loads import SampleLoads
from penstock.runtime.transport.legs import HostCounts


@handles(Op.STATISTICS, Phase.FORWARD)
def statistics(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return loss, routers, statistics: the sums, which stand for the gradients of what was summed.

    choices: input by which balance is judged, where no rank has all choices of a sample.
    """
    layers: dict[int, list[RouterSums]] = {}
    judged = dict(zip(map(_piece, task.inputs.get("choices", ())), inputs.all("choices"), strict=True))
    for name, sums in zip(task.inputs["routers"], inputs.all("routers"), strict=True):
        known = replace(sums, judged_BE=judged.get(_piece(name))) if judged else sums
        layers.setdefault(name.layer, []).append(known)
    packed = context.codec.pack(inputs.all("loss"), list(layers.values()))
    if context.fingerprint is not None:  # here, since by now parameters that were updated are gathered
        context.marks[VALUES] = context.fingerprint()
    everything = torch.cat([packed, context.marks])
    context.transports.of(task.lane, task.axes).all_reduce(everything, task.axes)
    context.bounds.tell(layers, context.transports.of(task.lane, task.axes), task.axes)
    context.total = context.codec.unpack(everything[: len(packed)])
    context.marks_total = HostCounts(everything[len(packed) :])
    return dict.fromkeys(("loss", "routers", "statistics"), context.total)


def _piece(name: Name) -> tuple[int, int | None]:
    """Return the layer and microbatch of a task."""
    return name.layer, name.microbatch


def all_reduce(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Sum one piece of a layer's gradients of one kind over the task's ranks, in place."""
    del inputs  # the gradients are in the bucket; the edges say that they are complete
    assert task.piece is not None, task
    bucket = context.buckets.of(kind_of_task(task).name)[task.layer]
    for piece in bucket.chunk(task.piece, task.cut.parts):
        context.transports.of(task.lane, task.axes).all_reduce(piece, task.axes)
    return NOTHING


for kind in GRADIENT_KINDS.values():
    handles(kind.reduce, Phase.BACKWARD)(all_reduce)


# ---- the handler that gathers the loads of experts. Shapes: P ranks, Y MoE layers, E experts --------------


@handles(Op.LOADS, Phase.BACKWARD)
def gather_loads(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return loads: int32 [P, Y, E], how often tokens of each rank chose each expert in this step, before
    drops.

    Of ranks that have the same tokens the first one counts them.
    """
    chosen: dict[int, list[Tensor]] = {}
    samples: dict[int, list[SampleLoads]] = {}
    for name, sums in zip(task.inputs["routers"], inputs.all("routers"), strict=True):
        assert sums.ids_B is not None, "a step knows its samples"
        chosen.setdefault(name.layer, []).append(sums.chosen_E)
        samples.setdefault(name.layer, []).append(SampleLoads(sums.ids_B, sums.chosen_BE))
    context.sample_loads = list(samples.values())
    mine_YE = torch.stack([torch.stack(layer).sum(dim=0).int() for layer in chosen.values()])
    transport = context.transports.of(task.lane, task.axes)
    once = [1] * transport.size(task.axes)
    context.loads_PYE = transport.all_gather(mine_YE.unsqueeze(0), once, task.axes)
    return {"loads": context.loads_PYE}
