"""Measures Parm's SAA as it runs: slices of a combine between nodes, each gathered under the next.

Its alpha and beta are measured, since two lines do not tell how much two simultaneous transfers disturb each
other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.autotune.profile.sample import Action
from penstock.graph import Lane, Name, Phase, Task
from penstock.mesh import Axes, Group
from penstock.ops import Op
from penstock.runtime import Machinery
from penstock.runtime.handlers import Handler, Inputs, Outputs
from penstock.runtime.lanes import LaneError
from penstock.runtime.program import Call, Span

SLICES = 4
"""Slices of a pair: fewer overlap less, more cost start-ups; the middle of what Parm's planner tries."""


def pair_axes(etp_size: int) -> Axes:
    """Return the axes along which the pair's all-to-all meets ranks."""
    return Group.EXPERT_SHARDS if etp_size > 1 else Group.EXPERT


def make_pair(machinery: Machinery, elements: int) -> Action:
    """Return a pair in which every rank sends `elements` float32 numbers to all shards of all experts."""
    layout, transports = machinery.layout, machinery.transports
    axes = pair_axes(layout.etp_size)
    between, inside = transports.of(Lane.INTER, axes), transports.of(Lane.INTRA, Group.TENSOR)
    size = between.size(axes)
    each = max(1, elements // SLICES // size)
    rows = torch.zeros(each * size, device=machinery.device)
    home: dict[Name, Tensor] = {}

    def combine(context: Any, task: Task, inputs: Inputs) -> Outputs:
        """Exchange the partial outputs of all shards of an expert, and add them where they arrive."""
        del context, inputs
        found = between.all_to_all(rows, [each] * size, [each] * size, axes)
        home[task.name] = found.view(-1, layout.etp_size, each).sum(1).flatten()
        return {"rows": home[task.name]}

    def gather(context: Any, task: Task, inputs: Inputs) -> Outputs:
        del context, inputs
        mine = home.pop(task.name._replace(op=Op.COMBINE))
        inside.all_gather(mine, [len(mine)] * layout.tp_size, Group.TENSOR)
        return {"rows": mine}

    return _action(machinery, _span(axes, combine, gather))


def _action(machinery: Machinery, span: Span) -> Action:
    def execute(call: Call) -> Outputs:
        return call.handler(None, call.task, Inputs())

    def action() -> None:
        try:
            machinery.lanes.run(span, execute)
        except LaneError as failure:  # the measured pair has no grid to show
            assert failure.__cause__ is not None, failure
            raise failure.__cause__ from None

    return action


def _span(axes: Axes, combine: Handler, gather: Handler) -> Span:
    """Return the calls of both lanes, each in order: every slice is gathered after it was combined."""
    sent, gathered = [], []
    for number in range(SLICES):
        name = Name(0, Op.COMBINE, Phase.FORWARD, microbatch=0, chunk=number)
        after = ((Lane.INTER, number + 1),)
        sent.append(_call(Task(name, Lane.INTER, axes, {}), combine, ()))
        inside = Task(name._replace(op=Op.GATHER_SLOTS), Lane.INTRA, Group.TENSOR, {})
        gathered.append(_call(inside, gather, after))
    return {Lane.INTER: tuple(sent), Lane.INTRA: tuple(gathered)}


def _call(task: Task, handler: Handler, waits: tuple[tuple[Lane, int], ...]) -> Call:
    return Call(task, handler, reads=(), writes=(), frees=(), shared=(), waits=waits)
