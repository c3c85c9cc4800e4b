"""Whole samples change ranks in every MoE layer, on the way home from the experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.graph import Graph, Lane, Name, ScheduleError, Task
from penstock.graph.task import Inputs
from penstock.mesh import Axes, Group
from penstock.ops import spec_of
from penstock.ops.names import Op
from penstock.step.rewrite import require
from penstock.step.stages import Stage

MOVED = ("residual", "weights", "order", "shared", "metadata")
"""Roles that unpermute reads of the samples that have arrived."""


@dataclass(frozen=True)
class MoveSamples:
    """NetMoE: combine delivers samples to new homes, chosen from the routing while rows are in transit.

    before  AT ─counts─ N ─route─ D, X, C
            X ─rows─ C          AT ─residual─ U          AT ─weights─ U          AT ─order─ U
    after   AT ─counts─ SC ─counts─ SN ─route─ D, X          AT ─positions─ SC          AT ─tokens─ SC
            SN ─loads─ SP ─homes─ SH ─homes─ SM, RO          SH ─route─ C          X ─rows─ RO ─rows─ C
            AT ─residual─ SM ─residual─ U          AT ─weights─ SM ─weights─ U          SM ─metadata─ U
            AT ─positions─ SM ─order─ U

    SP is on lane host. Later tasks, the next SC among them, know from `metadata` whose tokens they have.
    The last MoE layer expects nothing of a next one, so its SC reads no tokens.

    counted: axes along which the ranks meet that know of all rows.
    """

    counted: Axes = Group.EXPERT
    name = "sample_moves"
    stage = Stage.INSERT

    def __call__(self, graph: Graph) -> Graph:
        return Graph.of(_Rewriting(graph, self.counted).tasks(graph))


class _Rewriting:
    """The rewriting of one graph in program order. came: input from the last task that moved samples."""

    def __init__(self, graph: Graph, counted: Axes) -> None:
        self._counting = {task.layer: task for task in graph.tasks if task.op == Op.COUNTS}
        if missing := {task.layer for task in graph.tasks if task.op == Op.COMBINE} - set(self._counting):
            raise ScheduleError(
                f"layer {min(missing)} has a fixed number of rows, and which tokens get one depends on the "
                "samples that share a rank: samples stay where routing is not dropless"
            )
        layers = sorted(self._counting)
        self._following = dict(pairwise(layers))
        self._counted = counted
        self._came: Inputs = {}

    def tasks(self, graph: Graph) -> Iterator[Task]:
        for task in graph.tasks:
            layer = task.layer
            match task.op:
                case Op.ATTENTION:
                    yield task.reading({**task.inputs, **self._came})
                    if layer in self._counting:
                        yield self._counts(task)
                case Op.COUNTS:
                    yield self._made(task, Op.SAMPLE_LOADS, counts=_name(task, Op.SAMPLE_COUNTS))
                case Op.DISPATCH:
                    yield self._routed(task)
                    # The new homes are found while rows are in transit.
                    counting = self._counting[layer]
                    places = self._made(counting, Op.SAMPLE_PLACES, loads=_name(counting, Op.SAMPLE_LOADS))
                    yield replace(places, lane=Lane.HOST, axes=())
                    yield self._made(counting, Op.SAMPLE_HOMES, homes=places.name)
                case Op.EXPERTS:
                    yield self._routed(task)
                    came = {"rows": (task.name,), "homes": (_name(task, Op.SAMPLE_HOMES),)}
                    yield Task(task.name._replace(op=Op.ROW_ORDER), Lane.COMPUTE, (), came, task.cut)
                case Op.COMBINE:
                    yield (moving := self._moving(self._counting[layer], graph))
                    self._came = {"metadata": (moving.name,)}
                    ordered = task.name._replace(op=Op.ROW_ORDER)
                    yield task.reading({"rows": (ordered,), "route": (_name(task, Op.SAMPLE_HOMES),)})
                case Op.UNPERMUTE:
                    moved = _name(task, Op.SAMPLE_MOVE)
                    read = dict.fromkeys(r for r in MOVED if r in task.inputs or r in self._came)
                    yield task.reading({**task.inputs, **dict.fromkeys(read, (moved,))})
                case Op.HEAD:
                    yield task.reading({**task.inputs, **self._came})
                case _:
                    yield task

    def _counts(self, attention: Task) -> Task:
        """Return the task that counts rows, and asks the gate of the next MoE layer, if there is one."""
        following = self._following.get(attention.layer)
        read = {**dict.fromkeys(("counts", "positions"), (attention.name,)), **self._came}
        task = Task(_name(attention, Op.SAMPLE_COUNTS), Lane.COMPUTE, (), read)
        if following is None:
            return task
        reads = spec_of(Op.ATTENTION).parameters(following)
        return replace(task, inputs={**read, "tokens": (attention.name,)}, reads=reads)

    def _routed(self, task: Task) -> Task:
        return task.reading({**task.inputs, "route": (_name(task, Op.SAMPLE_LOADS),)})

    def _moving(self, counting: Task, graph: Graph) -> Task:
        """Return the task that moves what unpermute would have read here and what came with samples."""
        after = graph.by_name[_name(counting, Op.UNPERMUTE)].inputs
        moved = {role: after[role] for role in ("residual", "weights", "shared") if role in after}
        read = {**moved, "positions": after["order"], "homes": (_name(counting, Op.SAMPLE_HOMES),)}
        return Task(_name(counting, Op.SAMPLE_MOVE), counting.lane, counting.axes, {**read, **self._came})

    def _made(self, counting: Task, op: str, **read: Name) -> Task:
        inputs = {role: (name,) for role, name in read.items()}
        return Task(_name(counting, op), counting.lane, self._counted, inputs)


def _name(task: Task, op: str) -> Name:
    """Return the name of the task of `op` in the same layer and microbatch."""
    return task.name._replace(op=op, chunk=None)


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
            if task.op in (Op.SAMPLE_MOVE, Op.UNPERMUTE):
                kept = {role: names for role, names in task.inputs.items() if role not in PACKED}
                out.append(task.reading(kept))
            elif task.op == Op.EXPERTS:
                norms = spec_of(Op.ATTENTION).parameters(task.layer)
                out.append(replace(task, reads=(*task.reads, *norms)))
            else:
                out.append(task)
        return Graph.of(out)
