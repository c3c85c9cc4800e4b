"""How rows meet all shards of their experts: FSMoE's way, Parm's two, and DeepSpeed-MoE's.

Every pass begins with a flat dispatch, `AT ─rows─ D ─rows─ X ─rows─ C ─rows─ U`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from penstock.graph import Cut, Graph, ScheduleError, Task
from penstock.mesh import Group
from penstock.ops.names import Op
from penstock.ops.transfers import TRANSFERS, Hop
from penstock.step.rewrite import Beside, insert_after, insert_before, split
from penstock.step.stages import Stage

BETWEEN = (Op.DISPATCH, Op.COMBINE)


@dataclass(frozen=True)
class GatheredShards:
    """FSMoE: a row crosses nodes once, is gathered inside the node by all shards, whose outputs are summed.

    before  D ─rows─ X ─rows─ C
    after   D ─rows─ XG ─rows─ X ─rows─ XS ─rows─ C          XG, XS intra

    shards: shards of every expert.
    """

    shards: int
    name = "gathered_shards"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        graph = _copied(graph, (Op.EXPERTS,), self.shards)
        graph = insert_before(graph, Op.EXPERTS, "rows", Beside(Hop(Op.SHARD_GATHER, Group.SHARDS)).before)
        graph = insert_after(graph, Op.EXPERTS, "rows", Beside(Hop(Op.SHARD_SCATTER, Group.SHARDS)).after)
        return _counts_known_to_all(graph)


@dataclass(frozen=True)
class FusedShards:
    """Parm: one all-to-all brings a row to every shard of its expert; partial outputs are summed at home.

    D and C meet ranks along both axes, (ep, etp). shards: shards of every expert.
    """

    shards: int
    name = "fused_shards"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        _refuse_legs(graph, self.name)
        fused = Graph.of(
            replace(task, axes=Group.EXPERT_SHARDS) if task.op in BETWEEN else task for task in graph.tasks
        )
        return _counts_known_to_all(_copied(fused, (*BETWEEN, Op.EXPERTS), self.shards))


@dataclass(frozen=True)
class DealtSlots:
    """Parm's S2: ranks that share attention have the same rows, and each sends its share of every expert's.

    before  AT ─rows─ D ... C ─rows─ U
    after   AT ─rows─ SD ─rows─ D ... C ─rows─ SG ─rows─ U          SD, SG intra

    ranks: ranks that share attention.
    """

    ranks: int
    name = "dealt_slots"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        _refuse_legs(graph, self.name)
        graph = insert_before(graph, Op.DISPATCH, "rows", Beside(Hop(Op.DEAL_SLOTS, Group.TENSOR)).before)
        graph = insert_after(graph, Op.COMBINE, "rows", Beside(Hop(Op.GATHER_SLOTS, Group.TENSOR)).after)
        shared = (*BETWEEN, Op.DEAL_SLOTS, Op.GATHER_SLOTS, Op.EXPERTS)
        return Graph.of(
            replace(task, cut=replace(task.cut, token_shards=self.ranks)) if task.op in shared else task
            for task in graph.tasks
        )


@dataclass(frozen=True)
class RepeatedRows:
    """DeepSpeed-MoE: rows are gathered by all shards before they leave, and come home to all of them.

    Ranks that share attention have the same rows, so each row is sent and computed once for each of them:
    this form serves as a baseline.

    before  AT ─rows─ D ... X ─rows─ C ─rows─ U
    after   AT ─rows─ BG ─rows─ D ... X ─rows─ BR ─rows─ C ─rows─ BS ─rows─ U          BG, BR, BS intra

    shards: shards of every expert.
    """

    shards: int
    name = "repeated_rows"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        _refuse_legs(graph, self.name)
        graph = _copied(graph, (*BETWEEN, Op.EXPERTS), self.shards)
        graph = insert_before(graph, Op.DISPATCH, "rows", Beside(Hop(Op.ROWS_GATHER, Group.SHARDS)).before)
        graph = insert_after(graph, Op.EXPERTS, "rows", Beside(Hop(Op.ROWS_REDUCE, Group.SHARDS)).after)
        graph = insert_after(graph, Op.COMBINE, "rows", Beside(Hop(Op.ROWS_KEEP, Group.SHARDS)).after)
        return _counts_known_to_all(graph)


def _copied(graph: Graph, ops: Collection[str], shards: int) -> Graph:
    """Return the graph whose tasks of `ops` have the rows of all shards, or send theirs to all of them."""
    return Graph.of(
        replace(task, cut=replace(task.cut, row_copies=shards)) if task.op in ops else task
        for task in graph.tasks
    )


def _counts_known_to_all(graph: Graph) -> Graph:
    """Return the graph whose counts are exchanged over all shards: each must know what others receive."""
    return Graph.of(
        replace(task, axes=Group.EXPERT_SHARDS) if task.op == Op.COUNTS else task for task in graph.tasks
    )


def _refuse_legs(graph: Graph, name: str) -> None:
    legs = {task.op for task in graph.tasks if task.op in TRANSFERS and task.op not in BETWEEN}
    if legs:
        raise ScheduleError(
            f"{name} sends rows to all shards in one flat all-to-all; a dispatch with legs inside nodes "
            f"({', '.join(sorted(legs))}) goes with expert_form=gather"
        )


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
