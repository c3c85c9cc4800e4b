"""Rows bring the residual stream of samples that move to their new homes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.graph import Graph, Task
from penstock.ops import spec_of
from penstock.ops.names import Op
from penstock.step.rewrite import require
from penstock.step.stages import Stage

PACKED = ("residual", "weights")
"""Roles whose values rows carry: what a token's outputs are added to, and what they are multiplied by."""


@dataclass(frozen=True)
class PackedResidualPass:
    """Neither the residual stream nor gate weights follow samples by themselves (NetMoE); after sample_moves.

    before  AT ─residual─ SM ─residual─ U          AT ─weights─ SM ─weights─ U          D ─rows─ X
    after   AT ─rows─ D ─rows─ X          SM ─order─ U

    Rows have the residual stream in place of its norm; X computes the norm, and reads the norm's
    parameters.
    """

    name = "packed_residual"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        require(graph, Op.SAMPLE_MOVE, "residual")
        out: list[Task] = []
        for task in graph.tasks:
            if task.op in (Op.SAMPLE_MOVE, Op.UNORDER):
                kept = {role: names for role, names in task.inputs.items() if role not in PACKED}
                out.append(task.reading(kept))
            elif task.op == Op.EXPERTS:
                norms = spec_of(Op.ATTENTION).parameters(task.layer)
                out.append(replace(task, reads=(*task.reads, *norms)))
            else:
                out.append(task)
        return Graph.of(out)
