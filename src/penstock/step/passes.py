"""The passes of the core: the backward half, cuts of batch and rows, and gradients. Stages order them.

A check says whether passes of one's own have lost a gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import groupby
from math import lcm

from penstock.graph import Cut, Graph, Lane, Name, Phase, ScheduleError, Task
from penstock.mesh import Group
from penstock.ops import Backward, spec_of
from penstock.ops.base import Op, gradients_of, place_of
from penstock.ops.core import GRADIENT_KINDS, PARTIAL, REPLICATED, KindName, computes_experts, summed
from penstock.step.rewrite import Stage, end_layers, require, split
from penstock.step.shape import StepShape

# ---- the backward half, derived from the forward half and never written ----------------------------------


@dataclass(frozen=True)
class Transpose:
    """Reverses every differentiable edge. A task's gradient needs its readers' gradients and what it saved.

    Roles that are not differentiated (`given` of the reader's op) make no edge back; a transfer, which saves
    nothing, reads them again, and has no backward where it reads nothing else. Sums that normalise the loss
    stand for the gradients of what they read.

        before  AT ─rows─ D ─rows─ X                 N ─route─ D
        after   X.B ─d_rows─ D.B ─d_rows─ AT.B       N ─route─ D.B       X ─saved─ X.B     ST ─d_loss─ HD.B
    """

    name = "transpose"
    stage = Stage.TRANSPOSE

    def __call__(self, graph: Graph) -> Graph:
        # For every task, by role, the tasks that make gradients of its outputs.
        wanted: dict[Name, dict[str, tuple[Name, ...]]] = defaultdict(dict)
        for task in graph.tasks:
            spec = spec_of(task.op)
            if spec.backward is Backward.NONE:
                continue
            source = task.name if spec.backward is Backward.VALUE else task.name.back
            for role, names in task.inputs.items():
                if role not in spec.given:
                    for name in names:
                        roles = wanted[name]
                        roles[f"d_{role}"] = (*roles.get(f"d_{role}", ()), source)
        back = []
        for task in reversed(graph.tasks):
            spec = spec_of(task.op)
            given = {role: names for role, names in task.inputs.items() if role in spec.given}
            # A transfer of values without gradients has no backward.
            carries = spec.saves or not task.inputs or len(given) < len(task.inputs)
            if spec.backward is not Backward.TASK or not carries:
                continue
            inputs = wanted[task.name] | ({"saved": (task.name,)} if spec.saves else given)
            read = tuple(gradients_of(state) for state in task.reads if "parameters" in state)
            state, facts = read or spec.states(task.layer), (task.lane, task.axes, inputs, task.cut)
            back.append(Task(task.name.back, *facts, accumulates=state, reads=task.reads))
        return Graph.of([*graph.tasks, *back])


# ---- the batch, cut along its samples into microbatches that go through whole blocks ----------------------


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


# ---- the rows of an MoE layer, cut into chunks inside the layer -------------------------------------------


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


# ---- the backward of experts as two tasks: input gradients, for which the wire waits, and weight gradients


@dataclass(frozen=True)
class WeightGradients:
    """X.B becomes X.I, which the next leg reads, and X.W, which nothing but the update needs.

    before  C.B ─d_rows─ X.B ─d_rows─ D.B
    after   C.B ─d_rows─ X.I ─d_rows─ D.B          X.I ─left─ X.W
    """

    name = "weight_gradients"
    stage = Stage.WEIGHTS

    def __call__(self, graph: Graph) -> Graph:
        halves = {task.name: task.name._replace(phase=Phase.INPUT) for task in filter(_splits, graph.tasks)}
        out: list[Task] = []
        added: dict[int, list[Task]] = {}
        for task in graph.tasks:
            inputs = task.inputs
            if not halves.keys().isdisjoint(task.sources()):
                inputs = {role: tuple(halves.get(n, n) for n in names) for role, names in inputs.items()}
            if task.name in halves:
                name = halves[task.name]
                # Experts' gradients can wait for X.W; X.I adds to the others.
                dense = [state.format(layer=task.layer) for state in (REPLICATED, PARTIAL)]
                late = tuple(state for state in task.accumulates if state not in dense)
                early = tuple(state for state in task.accumulates if state in dense)
                out.append(Task(name, task.lane, task.axes, inputs, task.cut, early, task.reads))
                weights, left = name._replace(phase=Phase.WEIGHT), {"left": (name,)}
                last = Task(weights, task.lane, (), left, task.cut, late)
                added.setdefault(task.layer, []).append(last)
            else:
                out.append(task if inputs is task.inputs else task.reading(inputs))
        return end_layers(Graph.of(out), added)


def _splits(task: Task) -> bool:
    return computes_experts(task.op) and task.phase is Phase.BACKWARD


# ---- the number of every rank's rows that went to each expert, told to all ranks once per step ------------


@dataclass(frozen=True)
class GatheredLoads:
    """One small all-gather of what the gates have counted, for planners and metrics.

    It belongs to the backward half, after the loss: no task of the step waits for it, an evaluation does
    without, and the network has a gap there while the head computes.

    before  AT.m0, AT.m1 ─routers─ ST
    after   AT.m0, AT.m1 ─routers─ ST ─statistics─ LG.B          AT.m0, AT.m1 ─routers─ LG.B
    """

    name = "gathered_loads"
    stage = Stage.GRADIENTS

    def __call__(self, graph: Graph) -> Graph:
        require(graph, Op.STATISTICS, "routers")
        (total,) = [task for task in graph.tasks if spec_of(task.op).normalises]
        inputs = {"routers": total.inputs["routers"], "statistics": (total.name,)}
        name = Name(total.layer, Op.LOADS, Phase.BACKWARD)
        return end_layers(graph, {total.layer: [Task(name, Lane.INTER, Group.WORLD, inputs)]})


# ---- the all-reduces of gradients, one buffer per layer, each cut into pieces -----------------------------


Parts = Sequence[Sequence[int]]
"""For every layer the relative sizes of the pieces of its buffer; none = nothing to reduce."""


@dataclass(frozen=True)
class GradientPieces:
    """Every piece waits for all tasks that add to its buffer, directly or through another of them.

    before  AT.m1.B, AT.m0.B
    after   AT.m1.B, AT.m0.B ─gradients─ AR.p0, AR.p1          X.m*.B ─gradients─ XR.p0

    Attributes:
        parts: The sizes of the pieces of every layer's buffer, by kind of gradients.
        sharing: Whether ranks share attention.
        scatters: Whether every rank keeps its share of a sum (RA, RP, RX stand for AR, PR, XR).
    """

    parts: Mapping[KindName, Parts]
    sharing: bool = False
    scatters: bool = False
    name = "gradient_pieces"
    stage = Stage.GRADIENTS

    def __call__(self, graph: Graph) -> Graph:
        last = last_to_add(graph)
        added: dict[int, list[Task]] = {}
        for layer in range(max(map(len, self.parts.values()))):
            sizes = {kind: parts[layer] for kind, parts in self.parts.items()}
            made = reductions(layer, sizes, last, sharing=self.sharing, scatters=self.scatters)
            # Experts first: their gradients are complete before those of the layer's attention.
            added[layer] = [task for kind in reversed(made) for task in made[kind]]
        return end_layers(graph, added)


def reductions(
    layer: int,
    parts: Mapping[KindName, Sequence[int]],
    last: Mapping[str, Sequence[Name]] | None = None,
    *,
    sharing: bool = False,
    scatters: bool = False,
) -> dict[KindName, list[Task]]:
    """Return the pieces of a layer's gradients, by kind.

    Args:
        parts: The sizes of the pieces of every buffer, by kind.
        last: The tasks after which a buffer is complete; nothing adds to a buffer that it does not name. None
            = tasks without inputs, only to be priced.
        sharing, scatters: See GradientPieces.
    """
    by_kind = {}
    for name, sizes in parts.items():
        kind = GRADIENT_KINDS[name]
        op, buffer, axes = (
            kind.sums(scatters=scatters),
            kind.state.format(layer=layer),
            kind.axes_of(sharing=sharing),
        )
        inputs = {} if last is None else {"gradients": tuple(last.get(buffer, ()))}
        pieces = range(len(sizes) if last is None or inputs["gradients"] else 0)
        names = [Name(layer, op, Phase.BACKWARD, piece=piece) for piece in pieces]
        cut = Cut(parts=tuple(sizes))
        touched = (), (buffer,), (buffer,)  # summed in place
        by_kind[name] = [Task(each, Lane.INTER, axes, inputs, cut, *touched) for each in names]
    return by_kind


@lru_cache(maxsize=8)
def last_to_add(graph: Graph) -> Mapping[str, Sequence[Name]]:
    """Return for every buffer the tasks that add to it and after which, in their layer, no other does."""
    begin = next((i for i, task in enumerate(graph.tasks) if task.accumulates), len(graph.tasks))
    followed: dict[Name, set[str]] = defaultdict(set)
    for task in reversed(graph.tasks[begin:]):
        states = followed[task.name].union(task.accumulates)
        for name in task.sources():
            if name.layer == task.layer:
                followed[name] |= states
    last: dict[str, list[Name]] = {}
    for task in graph.tasks[begin:]:
        for state in task.accumulates:
            if state not in followed[task.name]:
                last.setdefault(state, []).append(task.name)
    return last


# ---- program order, by which rules and searches break ties ------------------------------------------------


@dataclass(frozen=True)
class Settle:
    """Program order, breadth first as in FlowMoE (Eq. 2-5): an op for all its pieces, then the next op.

    In the backward half the last microbatch goes first. Shared experts stand before the routed ones, in both
    halves: they are what can be computed while rows are in transit.
    """

    name = "settle"
    stage = Stage.SETTLE

    def __call__(self, graph: Graph) -> Graph:
        blocks = [list(block) for _, block in groupby(graph.tasks, _block)]
        shared: dict[tuple[int, bool], list[Task]] = defaultdict(list)
        for block in blocks:
            if place_of(block[0].op) == "beside":
                shared[block[0].layer, block[0].forward] += sorted(block, key=_place(block))
        out: list[Task] = []
        for block in blocks:
            first = block[0]
            if place_of(first.op) == "beside":
                continue
            if any(computes_experts(task.op) for task in block):
                out += shared.pop((first.layer, first.forward), ())
            out += sorted(block, key=_place(block))
        return Graph.of(out)


def _block(task: Task) -> tuple[object, ...]:
    """Return the key of tasks that stand together: pieces of one op, or of several for a microbatch."""
    layer, op, phase, *_ = task.name
    turn = spec_of(op).turn
    if turn == "computed":
        return layer, turn, task.forward
    return layer, turn or op if phase is Phase.FORWARD else op, phase


def _place(block: Sequence[Task]) -> Callable[[Task], tuple[int, ...]]:
    """Return the sort key of a block's tasks: by microbatch, then in the block's own order."""
    turn = {op: i for i, op in enumerate(dict.fromkeys(task.op for task in block))}
    by_chunk = spec_of(block[0].op).turn == "computed"

    def place(task: Task) -> tuple[int, ...]:
        _, op, phase, microbatch, chunk, piece = task.name
        m = microbatch or 0
        inside = (chunk or 0, turn[op]) if by_chunk else (turn[op], chunk or 0)
        return (m if phase is Phase.FORWARD else -m), *inside, piece or 0

    return place


# ---- checks that a pass of one's own loses no gradient and no sum over ranks, which would be silent -------

GRADIENT = "d_"


def check_complete(graph: Graph, shape: StepShape) -> None:
    """Raise ScheduleError naming a gradient that no task reads, or one that is not reduced over the ranks.

    An edge that is meant to have no gradient is `given` in its op; a task that takes the place of a reduction
    writes the state that the reduction wrote.
    """
    _check_gradients(graph)
    # Every buffer that tasks add to is reduced over the ranks as a whole.
    added = {state for task in graph.tasks for state in task.accumulates}
    # By state the pieces that are written, each with the number into which its buffer is cut.
    written: dict[str, set[tuple[int | None, int]]] = defaultdict(set)
    for task in graph.tasks:
        for state in task.writes:
            written[state].add((task.piece, len(task.cut.parts)))
    for name, kind in GRADIENT_KINDS.items():
        for layer in range(shape.num_layers):
            state = kind.state.format(layer=layer)
            if state not in added or not shape.parts_of(layer, name):
                continue
            pieces = written[state]
            if not any(piece is None or {(i, of) for i in range(of)} <= pieces for piece, of in pieces):
                raise ScheduleError(
                    f"{state} are not reduced over the ranks, or not all of them: no {kind.reduce} of layer "
                    f"{layer} writes that piece, and no task in its place"
                )
    # Over fewer ranks the others keep theirs; over more, experts count twice.
    sharing = shape.sharing.tp_size > 1
    for task in graph.tasks:
        sums = summed(task.op)
        if sums and task.axes != (axes := GRADIENT_KINDS[sums].axes_of(sharing=sharing)):
            met, wanted = " x ".join(task.axes) or "no axis", " x ".join(axes)
            raise ScheduleError(
                f"{task} sums over {met}, and gradients of that kind are summed over {wanted}: "
                "give a sum over other ranks an op of its own"
            )


def _check_gradients(graph: Graph) -> None:
    """Check that every gradient that a backward task makes for an input of its forward task is read."""
    read = {
        (name, role.removeprefix(GRADIENT))
        for task in graph.tasks
        for role, names in task.inputs.items()
        for name in names
    }
    # By piece the roles of a forward task whose sources have a backward of their own.
    wanted = {
        _piece(task): [
            role
            for role, names in task.inputs.items()
            if role not in spec_of(task.op).given
            and any(spec_of(name.op).backward is Backward.TASK for name in names)
        ]
        for task in graph.tasks
        if task.forward
    }
    for task in graph.tasks:
        for role in wanted.get(_piece(task), ()) if task.phase in (Phase.BACKWARD, Phase.INPUT) else ():
            if (task.name, role) not in read:
                raise ScheduleError(
                    f"nobody reads {GRADIENT}{role} of {task}: the gradient is lost. Where none is wanted, "
                    f"name {role} in `given` of op {task.op}"
                )
    # A task that reads a sum as its gradient is among the tasks that were summed, which all read it.
    told = set[tuple[Name, str, Name]]()
    for task in graph.tasks:
        for role, names in task.inputs.items():
            output = role.removeprefix(GRADIENT)
            if task.forward or role == output:
                continue
            for total in (name for name in names if spec_of(name.op).backward is Backward.VALUE):
                forward = task.name._replace(phase=Phase.FORWARD)
                if forward not in graph.by_name[total].inputs.get(output, ()):
                    raise ScheduleError(f"{task} reads {role} of {total}, which does not sum its {output}")
                told.add((forward, output, total))
    for task in graph.tasks:
        for role, names in task.inputs.items() if spec_of(task.op).backward is Backward.VALUE else ():
            for name in names:
                if spec_of(name.op).backward is Backward.TASK and (name, role, task.name) not in told:
                    raise ScheduleError(
                        f"no backward task of {name} reads {GRADIENT}{role} of {task}: the gradient is lost"
                    )


def _piece(task: Task) -> tuple[int, str, int | None]:
    """Return what a task has in common with its backward, whose chunks may differ: layer, op, microbatch."""
    return task.layer, task.op, task.microbatch
