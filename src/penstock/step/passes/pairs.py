"""Slices of two transfers that run at the same time on two lanes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.graph import Cut, Graph, ScheduleError, Task
from penstock.ops.names import Op
from penstock.step.rewrite import split
from penstock.step.stages import Stage

PAIRS = {True: (Op.COMBINE, Op.GATHER_SLOTS), False: (Op.DISPATCH, Op.DEAL_SLOTS)}
"""Forward: combine and the gather after it. Backward: dispatch and the gather of gradients after it."""


@dataclass(frozen=True)
class SimultaneousPair:
    """Parm's SAA: while a slice is gathered inside the node, the next one crosses it.

    before  C ─rows─ SG                    D.B ─d_rows─ SD.B
    after   C.c0 ─rows─ SG.c0              D.c0.B ─d_rows─ SD.c0.B
            C.c1 ─rows─ SG.c1              D.c1.B ─d_rows─ SD.c1.B

    All other tasks stay whole. count: slices.
    """

    count: int
    name = "simultaneous_pair"
    stage = Stage.SLICES

    def __call__(self, graph: Graph) -> Graph:
        if any(task.cut.slices > 1 for task in graph.tasks):
            raise ScheduleError("a simultaneous pair is cut where nothing else is: set chunks to 1")
        chunked = {task.layer for task in graph.tasks if task.chunk is not None}

        def pieces(task: Task) -> int:
            if task.chunk is None:
                return 0
            return self.count if task.op in PAIRS[task.forward] else 1

        def cut(task: Task, chunk: int) -> Cut:
            if task.layer not in chunked or task.microbatch is None:
                return task.cut
            each = self.count // max(1, pieces(task))
            first = 0 if task.chunk is None else chunk * each
            stop = self.count if task.chunk is None else first + each
            return replace(task.cut, slices=self.count, first=first, stop=stop)

        return split(graph, "chunk", pieces, cut)
