"""The rows of an MoE layer, cut into chunks inside the layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import lcm

from penstock.graph import Cut, Graph, Task
from penstock.step.rewrite import split
from penstock.step.stages import Stage


@dataclass(frozen=True)
class Chunks:
    """The pipeline degree of Tutel, PipeMoE and FSMoE, separate for `forward` and `backward`.

    Both are runs of slices, as many as their least common multiple, so that what forward saves is found by
    slice whatever the numbers. A backward chunk reads what the forward chunks that overlap with it saved.

        before  AT ─rows─ D ─rows─ X ─rows─ C ─rows─ U
        after   AT ─rows─ D.c0 ─rows─ X.c0 ─rows─ C.c0 ─rows─ U
                AT ─rows─ D.c1 ─rows─ X.c1 ─rows─ C.c1 ─rows─ U
    """

    forward: int
    backward: int
    name = "chunks"
    stage = Stage.CHUNKS

    def __call__(self, graph: Graph) -> Graph:
        slices = lcm(self.forward, self.backward)
        chunked = {task.layer for task in graph.tasks if task.chunk is not None}

        def count(task: Task) -> int:
            return self.forward if task.forward else self.backward

        @cache
        def run(whole: Cut, chunk: int, each: int) -> Cut:
            return replace(whole, slices=slices, first=chunk * each, stop=(chunk + 1) * each)

        def cut(task: Task, chunk: int) -> Cut:
            if task.layer not in chunked or task.microbatch is None:
                return task.cut
            each = slices if task.chunk is None else slices // count(task)
            return run(task.cut, chunk, each)

        return split(graph, "chunk", lambda t: 0 if t.chunk is None else count(t), cut)
