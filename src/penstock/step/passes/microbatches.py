"""The batch, cut along its samples into microbatches that go through whole blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from penstock.graph import Cut, Graph, Task
from penstock.step.rewrite import split
from penstock.step.stages import Stage


@dataclass(frozen=True)
class Microbatches:
    """FlowMoE's R: every task of a microbatch becomes `count` tasks; sums over the batch read all of them.

    before  AT ─rows─ D ... HD ─loss─ ST
    after   AT.m0 ─rows─ D.m0 ... HD.m0 ─loss─ ST
            AT.m1 ─rows─ D.m1 ... HD.m1 ─loss─ ST
    """

    count: int
    name = "microbatches"
    stage = Stage.MICROBATCHES

    def __call__(self, graph: Graph) -> Graph:
        @cache
        def counted(cut: Cut) -> Cut:
            return replace(cut, microbatches=self.count)

        def cut(task: Task, _: int) -> Cut:
            return task.cut if task.microbatch is None else counted(task.cut)

        return split(graph, "microbatch", lambda t: 0 if t.microbatch is None else self.count, cut)
