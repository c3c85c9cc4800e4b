"""The handler that gathers the loads of experts. Shapes: P ranks, Y MoE layers, E experts."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.graph import Phase, Task
from penstock.ops import Op
from penstock.runtime.handlers import Inputs, Outputs, StepContext, handles
from penstock.runtime.loads import SampleLoads


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
