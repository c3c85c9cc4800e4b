"""Ops of an optimiser of which every rank owns a share (ZeRO, stage 1).

Gradients are summed in shares, every rank updates its own share, and parameters are gathered from all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.features.feature import Feature
from penstock.graph import Graph, Lane, Name, Phase, Task
from penstock.mesh import Group
from penstock.ops.base import Backward, Family, Kind, Op, OpSpec, parameters_of
from penstock.ops.core import GRADIENT_KINDS
from penstock.ops.work import Sizes, Work
from penstock.step.rewrite import Pass, Stage
from penstock.step.shape import StepShape

NORM_BYTES = 8
UPDATE_COPIES: Final = 5.0
"""AdamW reads weight, gradient and two moments and writes all but the gradient; before that the gradient is
read for the norm, and read and written to be scaled: ten times the bytes of the share. A backward task is
priced at twice its work, hence half of ten."""


UPDATES: Final = frozenset(kind.update for kind in GRADIENT_KINDS.values())
GATHERS: Final = frozenset(kind.gather for kind in GRADIENT_KINDS.values())


def of_optimizer(task: Task) -> str:
    """Return the part of a task in the optimiser: "norm", "update", "gather", or "" for any other task."""
    if task.op in GATHERS:
        return "gather"
    return "norm" if task.op == Op.NORM else "update" if task.op in UPDATES else ""


def _scattered(task: Task, sizes: Sizes) -> Work:
    return Work(collective="reduce_scatter", sent_bytes=sizes.reduced_bytes(task))


def _updated(task: Task, sizes: Sizes) -> Work:
    return Work(copied_bytes=UPDATE_COPIES * sizes.reduced_bytes(task) / sizes.owners(task))


def _gathered(task: Task, sizes: Sizes) -> Work:
    sent_bytes = 0 if sizes.owners(task) == 1 else sizes.reduced_bytes(task)
    return Work(collective="all_gather", sent_bytes=sent_bytes)


# Of every kind of gradients.
TITLES = {
    "scatter": (Family.GRADIENTS, "sums of {} gradients, a share to every rank", _scattered),
    "update": (Family.OPTIMIZER, "AdamW on this rank's share of {} parameters", _updated),
    "gather": (Family.OPTIMIZER, "{} parameters, the shares of all ranks gathered", _gathered),
}

OPS = (
    *(
        OpSpec(
            name=getattr(kind, op),
            family=family,
            title=title.format(kind.name.removesuffix("s")),
            kind=Kind.COMPUTE if op == "update" else Kind.COLLECTIVE,
            work=work,
            backward=Backward.NONE,
            indices="p",
        )
        for kind in GRADIENT_KINDS.values()
        for op, (family, title, work) in TITLES.items()
    ),
    OpSpec(
        name=Op.NORM,
        once=True,
        family=Family.OPTIMIZER,
        title="norm of all gradients, from the shares of all ranks",
        kind=Kind.COLLECTIVE,
        work=lambda task, sizes: Work(collective="all_reduce", sent_bytes=NORM_BYTES * sizes.members(task)),
        backward=Backward.NONE,
        indices="",
    ),
)


# ---- tasks of an optimiser of which every rank updates a share: norm, updates, and the gather of
# parameters


BY_SCATTER = {kind.scatter: kind for kind in GRADIENT_KINDS.values()}
EXPERT_SCATTER = GRADIENT_KINDS["experts"].scatter
PARAMETERS = "parameters"

FIRST_LAYER = 0


@dataclass(frozen=True)
class ShardedOptimizer:
    """ZeRO's stage 1. What a step updates is gathered by the next step, before the first task that reads it.

    before  D ─rows─ X
    after   RA.p0, RX.p0 ─gradients─ NM ─scale─ OA.p0, OX.p0          RA.p0 ─gradients─ OA.p0
            OA.p0 ─updated─ PA.p0.B                                   PX.p0 ─parameters─ X

    The next step begins with tasks that read the first layer's replicated parameters, and nothing would hide
    their gather: this step brings them itself, while other layers are updated.

    Attributes:
        clips: Whether updates wait for the norm; without it each waits for its own piece.
        edp: Whether several ranks own each expert; else no rank needs the experts of another.
    """

    clips: bool
    edp: bool
    name = "sharded_optimizer"
    stage = Stage.UPDATES

    def __call__(self, graph: Graph) -> Graph:
        scatters = [task for task in graph.tasks if task.op in BY_SCATTER]
        if not scatters:
            return graph
        first = [_gather_at_once(task) for task in scatters if _begins(task)]
        gathers = [
            _gather(task)
            for task in scatters
            if (self.edp or task.op != EXPERT_SCATTER) and not _begins(task)
        ]
        norm = norm_of(scatters)
        scatters.sort(key=lambda task: not _begins(task))  # what others wait for is updated first
        updates = []
        for task in scatters:
            inputs = {"gradients": (task.name,)}
            if self.clips:
                inputs["scale"] = (norm.name,)
            parameters = _parameters(task)
            written = parameters, parameters.replace(PARAMETERS, "moments")
            name = task.name._replace(op=BY_SCATTER[task.op].update)
            read = (*task.writes, *written)
            updates.append(Task(name, Lane.COMPUTE, (), inputs, task.cut, (), read, written))
        return Graph.of([*_gathered_first(graph, gathers), norm, *updates, *first])


def norm_of(scatters: Sequence[Task]) -> Task:
    """Return the task that finds the norm of the gradients that these tasks sum."""
    return Task(
        Name(FIRST_LAYER, Op.NORM, Phase.BACKWARD),
        Lane.INTER,
        Group.WORLD,
        {"gradients": tuple(task.name for task in scatters)},
        reads=tuple(dict.fromkeys(state for task in scatters for state in task.writes)),
    )


def updates_of(scatter: Task, *, edp: bool) -> tuple[Task, ...]:
    """Return the update of a piece, and its gather if there is one, without inputs, only to be priced."""
    name = scatter.name._replace(op=BY_SCATTER[scatter.op].update)
    update = Task(name, Lane.COMPUTE, cut=scatter.cut)
    if scatter.op == EXPERT_SCATTER and not edp:
        return (update,)
    return update, _gather_at_once(scatter) if _begins(scatter) else _gather(scatter)


def _begins(scatter: Task) -> bool:
    """Return whether the next step cannot begin without these parameters."""
    return scatter.layer == FIRST_LAYER and scatter.op != EXPERT_SCATTER


def _parameters(scatter: Task) -> str:
    """Return the state that an update by these gradients changes."""
    return parameters_of(BY_SCATTER[scatter.op].state.format(layer=scatter.layer))


def _gather(scatter: Task) -> Task:
    name = scatter.name._replace(op=BY_SCATTER[scatter.op].gather, phase=Phase.FORWARD)
    return Task(name, Lane.INTER, scatter.axes, cut=scatter.cut, writes=(_parameters(scatter),))


def _gather_at_once(scatter: Task) -> Task:
    """Return the task that gathers a piece of parameters in the backward pass that has updated it."""
    gather = _gather(scatter)
    update = scatter.name._replace(op=BY_SCATTER[scatter.op].update)
    name = gather.name._replace(phase=Phase.BACKWARD)
    return replace(gather, name=name, inputs={"updated": (update,)}, reads=gather.writes)


def _gathered_first(graph: Graph, gathers: list[Task]) -> Iterator[Task]:
    """Yield the step with each state's gathers before its first reader, which waits for them for all."""
    made: dict[str, list[Task]] = defaultdict(list)
    for gather in gathers:
        made[gather.writes[0]].append(gather)
    bits = {state: 1 << place for place, state in enumerate(made)}
    placed: set[str] = set()
    knows: dict[Name, int] = {}  # states that a task or one before it has waited for, as bits
    for task in graph.tasks:
        awaited = 0
        for names in task.inputs.values():
            for name in names:
                awaited |= knows[name]
        wanted = [state for state in task.reads if state in made and not awaited & bits[state]]
        for state in wanted:
            awaited |= bits[state]
            if state not in placed:
                placed.add(state)
                yield from made[state]
        knows[task.name] = awaited
        read = tuple(gather.name for state in wanted for gather in made[state])
        yield task.reading({**task.inputs, PARAMETERS: read}) if read else task
    assert placed == made.keys(), "a layer's own tasks read its parameters"


LAYERS = 2
"""One layer's gradients are made while those of the layer above are summed."""

ROOM = "room"


@dataclass(frozen=True)
class GradientRoom:
    """ZeRO's stage 2. Without it, sums on a slow network would wait, and all whole gradients with them.

    before  L2.RA.p0, L2.RA.p1          L0.U.B ─rows─ L0.C.B
    after   L2.RA.p0, L2.RA.p1 ─room─ L0.U.B ─rows─ L0.C.B

    The first tasks to add to a layer's gradients wait for the sums of the layer two above.

    Attributes:
        edp: Whether several ranks own each expert; else their gradients are summed with no other rank's and
            stay.
    """

    edp: bool
    name = "gradient_room"
    stage = Stage.UPDATES

    def __call__(self, graph: Graph) -> Graph:
        freed: dict[int, list[Name]] = defaultdict(list)
        for task in graph.tasks:
            if task.op in BY_SCATTER and (self.edp or task.op != EXPERT_SCATTER):
                freed[task.layer].append(task.name)
        after: set[Name] = set()
        firsts: set[Name] = set()
        for task in graph.tasks:
            waits = any(name in after for name in task.sources() if name.layer == task.layer)
            if waits or task.accumulates:
                after.add(task.name)
            if task.accumulates and not waits:
                firsts.add(task.name)
        out = []
        for task in graph.tasks:
            names = tuple(freed.get(task.layer + LAYERS, ())) if task.name in firsts else ()
            out.append(task.reading({**task.inputs, ROOM: names}) if names else task)
        return Graph.of(out)


# ---- the sharded optimiser: every rank updates its share of the parameters, as tasks of the step ----------


def _passes(shape: StepShape) -> Sequence[Pass]:
    updating = shape.updating
    if updating is None:
        return ()
    sharded = ShardedOptimizer(updating.clips, updating.edp)
    return (sharded, GradientRoom(updating.edp)) if updating.releases else (sharded,)


FEATURE = Feature(
    name="sharded_optimizer",
    title="sums gradients in shares, updates each share on one rank, and gathers parameters in the next step",
    source="ZeRO, stages 1 and 2",
    ops=OPS,
    passes=_passes,
)
