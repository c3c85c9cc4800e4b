"""Ops that move whole samples between ranks: NetMoE's placement of samples, layer by layer.

A combine can deliver a sample's rows to any rank. So ranks tell each other what every sample sends to which
position (`SC`, `SN`), each works out the same new homes on the host (`SP`), and they compare what they found
(`SH`). Expert outputs are put in the order of the new homes (`RO`) and combine takes them there; values that
do not pass the experts follow in a transfer of their own (`SM`).

Where it can, the residual stream passes the experts: rows leave with it in place of its norm, and with the
weight of their choice, and come home with outputs weighted and the residual added
(`penstock.moe.experts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.feature import why_experts_stay
from penstock.features.feature import Feature
from penstock.features.field import Asked, Choice, Field
from penstock.features.sample_placement.prices import COUNT_BYTES, ROUTED
from penstock.graph import Graph, Lane, Name, ScheduleError, Task
from penstock.graph.task import Inputs
from penstock.mesh import Axes, Group
from penstock.ops import spec_of
from penstock.ops.base import Backward, Kind, Op, OpSpec
from penstock.ops.work import Sizes, Work, compared
from penstock.step.rewrite import Pass, Stage, require
from penstock.step.shape import StepShape

PACKED_COLUMNS = 2
"""Numbers in a row beside the residual stream: a weight, and whether the residual is added there."""
TABLE_BYTES, FACT_BYTES = 8, 8
SOLVER_PASSES = 100


def _counting(task: Task, sizes: Sizes) -> Work:
    """Return the work of the next layer's gate on this layer's tokens."""
    return Work(flops=sizes.router_flops(sizes.tokens(task)))


def _exchange(task: Task, sizes: Sizes) -> Work:
    """Return the work of sending every sample's rows by expert, here and in the next layer, to all ranks."""
    own_bytes = sizes.samples(task) * 2 * sizes.num_experts * COUNT_BYTES
    return Work(collective="all_gather", sent_bytes=own_bytes * sizes.members(task))


def _solving(task: Task, sizes: Sizes) -> Work:
    """Return the work of SOLVER_PASSES passes over the table of all samples, at this machine's copying speed.

    Measured: 1.3 ms for 384 samples of 16 ranks and 16 experts, 150 ms for 4,096 samples of 128.
    """
    samples = sizes.samples(task) * sizes.members(replace(task, axes=Group.EXPERT))
    return Work(copied_bytes=SOLVER_PASSES * samples * 2 * sizes.num_experts * TABLE_BYTES)


def _moving(task: Task, sizes: Sizes) -> Work:
    """Return the work at most: all samples leave, with their residual, or with facts where rows bring it."""
    tokens = sizes.tokens(task)
    beside_bytes = FACT_BYTES * (sizes.top_k + 1) * tokens
    sent_bytes = beside_bytes if sizes.packed_residual else sizes.hidden_bytes(tokens)
    return Work(collective="all_to_all", sent_bytes=sent_bytes)


def _ordering(task: Task, sizes: Sizes) -> Work:
    copied_bytes = 2 * sizes.wire_bytes(sizes.rows(task))
    return Work(copied_bytes=copied_bytes, pieces=len(task.cut.held), follows_rows=True)


OPS = (
    OpSpec(
        name=Op.SAMPLE_COUNTS,
        turn="gated",
        title="rows of every sample by expert, here and expected in the next layer",
        kind=Kind.COMPUTE,
        work=_counting,
        backward=Backward.NONE,
    ),
    OpSpec(
        name=Op.SAMPLE_LOADS,
        turn="routed",
        title="exchange of rows per sample and expert",
        kind=Kind.COLLECTIVE,
        work=_exchange,
        backward=Backward.NONE,
    ),
    OpSpec(
        name=Op.SAMPLE_PLACES,
        title="new homes of all samples",
        kind=Kind.HOST,
        work=_solving,
        backward=Backward.NONE,
    ),
    OpSpec(
        name=Op.SAMPLE_HOMES,
        title="comparison of the new homes",
        kind=Kind.COLLECTIVE,
        work=compared,
        backward=Backward.NONE,
    ),
    OpSpec(
        name=Op.SAMPLE_MOVE,
        title="what of samples is not in their rows, to their new homes",
        kind=Kind.COLLECTIVE,
        work=_moving,
        transpose=Op.SAMPLE_MOVE,
        given=frozenset({"positions", "homes", "metadata"}),
    ),
    OpSpec(
        name=Op.ROW_ORDER,
        turn="computed",
        title="expert outputs in the order of new homes",
        kind=Kind.COPY,
        work=_ordering,
        given=frozenset({"homes"}),
        indices="mc",
    ),
)


# ---- whole samples change ranks in every MoE layer, on the way home from the experts ----------------------


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

    SP is on lane host. Later tasks, the next SC among them, know from `metadata` whose tokens they have. The
    last MoE layer expects nothing of a next one, so its SC reads no tokens.

    Attributes:
        counted: The axes along which the ranks meet that know of all rows.
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


# ---- sample placement: whole samples change ranks on the way home from experts ----------------------------


SampleMoves = Literal["none", "netmoe"]
Solver = Literal["network_simplex", "kuhn_munkres"]
Prediction = Literal["next_gate", "conditional", "none"]


def why_samples_stay(asked: Asked, choice: Choice) -> str:
    """Return why samples cannot move with this choice; "" = they may."""
    if DISPATCHES[choice.dispatch].joins_rows:
        return f"moe.dispatch={choice.dispatch} sends one row for several experts"
    return asked.shape.sharing.why_samples_stay or why_experts_stay(asked, choice)


def _samples(asked: Asked, choice: Choice) -> Sequence[str]:
    return ("none",) if why_samples_stay(asked, choice) else asked.movable.samples


SAMPLES = Field(
    values=_samples,
    words=lambda d: "" if d.samples == "none" else f"samples move ({d.samples})",
    head="samples",
    cell=lambda d: "-" if d.samples == "none" else d.samples,
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)


def _passes(shape: StepShape) -> Sequence[Pass]:
    if not (shape.moves_samples and any(shape.moe_layers)):
        return ()
    moves = MoveSamples(Group.EXPERT_SHARDS if shape.sharing.etp_size > 1 else Group.EXPERT)
    return (moves, PackedResidualPass()) if shape.packed_residual else (moves,)


def _why_not(shape: StepShape) -> str:
    if not (shape.moves_samples and any(shape.moe_layers)):
        return ""
    if not shape.sharing.is_none and shape.expert_form != "gather":
        return (
            f"placement.samples = netmoe: with expert_form = {shape.expert_form} ranks send rows of samples "
            "that others have, too, or sums of them, and a sample's rows are not one rank's to order. Use "
            "schedule.expert_form=gather, or set placement.samples=none"
        )
    if why := shape.sharing.why_samples_stay:
        return f"placement.samples = netmoe: {why}. Use other sizes, or set placement.samples=none"
    return ""


FEATURE = Feature(
    name="sample_placement",
    title="gives samples new homes in every layer, so that fewer of their rows cross nodes",
    source="NetMoE",
    ops=OPS,
    passes=_passes,
    why_not=_why_not,
    fields={"samples": SAMPLES},
    routed=ROUTED,
    row_columns=lambda shape: PACKED_COLUMNS if shape.packed_residual else 0,
)
