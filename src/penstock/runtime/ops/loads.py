"""The handler that gathers the loads of experts. Shapes: P ranks, Y MoE layers, E experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.graph import Phase, Task
from penstock.moe.choices import GateSums
from penstock.ops import Op
from penstock.runtime.handlers import Inputs, Outputs, StepContext, handles
from penstock.runtime.loads import SampleLoads


@handles(Op.LOADS, Phase.BACKWARD)
def gather_loads(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """Return loads: int32 [P, Y, E], how often tokens of each rank chose each expert in this step, before
    drops.

    Of ranks that have the same tokens the first one counts them.
    """
    layers: dict[int, list[GateSums]] = {}
    for name, sums in zip(task.inputs["routers"], inputs.all("routers"), strict=True):
        layers.setdefault(name.layer, []).append(sums)
    context.sample_loads = [[_of_samples(sums) for sums in layer] for layer in layers.values()]
    mine_YE = torch.stack([_sum(layer) for layer in layers.values()])
    transport = context.transports.of(task.lane, task.axes)
    once = [1] * transport.size(task.axes)
    context.loads_PYE = transport.all_gather(mine_YE.unsqueeze(0), once, task.axes)
    return {"loads": context.loads_PYE}


def _sum(microbatches: Sequence[GateSums]) -> Tensor:
    """Return the choices of all microbatches, int32 [E]."""
    return torch.stack([sums.chosen_E for sums in microbatches]).sum(dim=0).int()


def _of_samples(sums: GateSums) -> SampleLoads:
    assert sums.ids_B is not None, "a step knows its samples"
    return SampleLoads(sums.ids_B, sums.chosen_BE)
