"""The handler that gathers the loads of experts. Shapes: P ranks, B samples, Y MoE layers, E experts."""

from __future__ import annotations

import torch

from penstock.graph import Phase, Task
from penstock.moe.choices import GateSums
from penstock.ops import Op
from penstock.runtime.handlers import Inputs, Outputs, StepContext, handles


@handles(Op.LOADS, Phase.BACKWARD)
def gather_loads(context: StepContext, task: Task, inputs: Inputs) -> Outputs:
    """loads: int32 [P, Y, E], how often tokens of each rank chose each expert in this step, before any drop.

    Of ranks that have the same tokens the first one counts them.
    """
    layers: dict[int, list[GateSums]] = {}
    for name, sums in zip(task.inputs["routers"], inputs.all("routers"), strict=True):
        layers.setdefault(name.layer, []).append(sums)
    of_samples = [torch.cat([sums.chosen_BE for sums in layer]) for layer in layers.values()]
    context.sample_loads = of_samples
    mine_YE = torch.stack([chosen_BE.sum(dim=0).int() for chosen_BE in of_samples])
    transport = context.transports.of(task.lane, task.axes)
    once = [1] * transport.size(task.axes)
    context.loads_PYE = transport.all_gather(mine_YE.unsqueeze(0), once, task.axes)
    return {"loads": context.loads_PYE}
