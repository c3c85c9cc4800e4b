"""The form of a published system in Penstock: a graph transformation plus an order rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar, cast

from penstock.config import ConfigError
from penstock.decision import TAIL, Decision, GradientBytes, Slot
from penstock.features.field import READERS
from penstock.features.sharded_optimizer.feature import GATHERS, ROOM, UPDATES
from penstock.graph import Graph, Lane, Phase, ScheduleError, Task
from penstock.ops import Op
from penstock.ops.core import GRADIENT_KINDS, ByKind, summed
from penstock.schedule.schedule import Schedule
from penstock.step import StepShape
from penstock.step.shape import ExpertForm
from penstock.timing import Cost, advance, positions

MOST_REDUCTIONS = 1 << 15
"""The most pieces of all layers' gradients in a step. With a start-up of 0.1 ms they alone take 3.3 s."""


class System(ABC):
    """One file, one class: how it cuts the iteration and how it orders the pieces.

    Attributes:
        reads: The fields of a decision that this schedule uses; searches vary only these, and descriptions
            name only these.
        usual_chunks: The pieces of an MoE layer's tokens where none is set.
        expert_form: How rows reach all shards of their experts, where that is part of the schedule and not
            for a plan to decide.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    usual_chunks: ClassVar[int] = 1
    expert_form: ClassVar[ExpertForm | None] = None

    @abstractmethod
    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        """Return how the step is cut, and by which further passes (`more`) it is rewritten."""

    @abstractmethod
    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        """Return the order by this system's rule, frozen."""

    def quick_order(self, graph: Graph, cost: Cost, choice: Decision, part: int) -> Schedule:  # noqa: ARG002
        """Return an order nearly as good as `order`'s for about 1/part of the work, where `order` is slow.

        Args:
            part: How many times less work it is than `order`'s.
        """
        return self.order(graph, cost, choice)


SCHEDULES = cast("dict[str, System]", READERS)
"""The schedules by name."""


def register_schedule(system: System) -> None:
    """Make a schedule known to configurations, plans, searches and commands. The last of a name counts."""
    SCHEDULES[system.name] = system


def pieces_of(total_bytes: tuple[int, ...], chunk_bytes: int) -> tuple[int, ...]:
    """Return the number of nearly equal chunks of each buffer so that none is over `chunk_bytes`.

    Raises:
        ConfigError: For more than MOST_REDUCTIONS chunks in all: every one is a task and a start-up.
    """
    if chunk_bytes < 1:
        raise ConfigError("all_reduce_chunk_bytes", chunk_bytes, "is the size of a piece", "Use 1048576.")
    pieces = tuple(-(-size // chunk_bytes) for size in total_bytes)
    if (count := sum(pieces)) <= _most_reductions(total_bytes):
        return pieces
    why = (
        f"cuts {sum(total_bytes):,} bytes of gradients in {len(total_bytes)} layers into {count:,} "
        f"all-reduce pieces per step; at most {MOST_REDUCTIONS:,}, since each is a task with a start-up"
    )
    hint = f"Use {least_chunk_bytes(total_bytes)} or more."
    raise ConfigError("all_reduce_chunk_bytes", chunk_bytes, why, hint)


def least_chunk_bytes(total_bytes: tuple[int, ...]) -> int:
    """Return a chunk size with which `pieces_of` stays within its limit, hardly larger than necessary."""
    layers = sum(size > 0 for size in total_bytes)  # the last piece of each may be a small one
    return max(1, -(-sum(total_bytes) // (_most_reductions(total_bytes) - layers)))


def _most_reductions(total_bytes: tuple[int, ...]) -> int:
    return max(MOST_REDUCTIONS, 2 * len(total_bytes))


def equal_pieces(gradients: GradientBytes, chunk_bytes: int) -> ByKind:
    """Return for every kind of gradients what `pieces_of` does."""
    return ByKind({kind: pieces_of(sizes, chunk_bytes) for kind, sizes in gradients.by_kind.items()})


def whole(gradients: GradientBytes) -> ByKind:
    """Return one piece for every buffer that holds anything."""
    return ByKind({kind: tuple(min(n, 1) for n in sizes) for kind, sizes in gradients.by_kind.items()})


def is_all_reduce(task: Task) -> bool:
    """Return whether the task synchronises gradients, of whatever kind."""
    return summed(task.op) is not None


def lateness(task: Task) -> int:
    """Return 0 for a task of the model, 1 for a sum or norm of gradients, 2 for an update or later task.

    Where tasks compete, those with the smaller number go first: all others wait for the model's own.
    """
    return _lateness(task.op, task.forward)


@cache
def _lateness(op: str, forward: bool) -> int:
    if op in UPDATES or (op in GATHERS and not forward):
        return 2
    return int(summed(op) is not None or op == Op.NORM)


def all_reduce_at_the_end(name: str, graph: Graph) -> Schedule:
    """Return program order, with every gradient all-reduce after the last backward computation.

    Among the all-reduces layer 0 goes first: its gradients are the last to be made, so none of the others can
    slip under the computation. That is what plain expert parallelism does. (Where layer 0 has nothing to
    reduce, the first all-reduce may start one block early.)
    """
    tasks = [task for task in graph.tasks if not lateness(task)]
    last = [task for task in graph.tasks if is_all_reduce(task)]
    kinds: list[str | None] = [*GRADIENT_KINDS]
    tasks += sorted(last, key=lambda task: (task.layer, kinds.index(summed(task.op))))
    tasks += [task for task in graph.tasks if lateness(task) and not is_all_reduce(task)]
    return ordered(name, graph, {lane: [task for task in tasks if task.lane is lane] for lane in Lane})


# ---- fixed orders in which gradients make room for others: sums are moved to where a task waits for them --


def ordered(name: str, graph: Graph, lanes: Mapping[Lane, Sequence[Task]]) -> Schedule:
    """Return the schedule of these orders; where no lane could proceed, the sums waited for come first.

    Args:
        lanes: The tasks of every lane, in their order.
    """
    by_lane = {lane: tuple(order) for lane, order in lanes.items() if order}
    if not any(ROOM in task.inputs for task in graph.tasks):
        return Schedule(name, by_lane)
    left = {lane: order[::-1] for lane, order in positions(by_lane, graph).items()}  # the next one is last
    done = set[int]()
    row = advance(left.values(), graph.links, done)
    tasks, moved = graph.tasks, True
    while moved and any(left.values()):
        # The sums that some lane waits for, and that could run, come to the front of their lanes.
        waiting = (tasks[order[-1]] for order in left.values() if order)
        wanted = {name for task in waiting for name in task.inputs.get(ROOM, ())}
        moved = False
        for order in left.values():
            sums = [i for i in order if tasks[i].name in wanted and done.issuperset(graph.links[i])]
            assert all(summed(tasks[i].op) for i in sums), "sums make room"
            for place in sums:
                order.remove(place)
                order.append(place)
                moved = True
        if moved:
            row += advance(left.values(), graph.links, done)
    for order in left.values():  # none, or a deadlock of another kind, which the schedule's check names
        row += order[::-1]
    ran = [tasks[place] for place in row]
    return Schedule(name, {lane: tuple(task for task in ran if task.lane is lane) for lane in by_lane})


# ---- gradient reductions in chosen gaps of the backward pass; everything else in program order ------------


def dense_gap(layer: int) -> Slot:
    """Return the gap under attention of a layer; below layer 0 there is only the tail."""
    return Slot(layer=layer, part="dense") if layer >= 0 else TAIL


def reduce_in_gaps(name: str, graph: Graph, gaps: Mapping[Slot, Sequence[Task]]) -> Schedule:
    """Return a step in program order whose reductions run in their gaps.

    Args:
        gaps: The reductions of every gap; every reduction is in one.

    Raises:
        ScheduleError: For a gap between all-to-alls in a layer that has no all-to-alls.
    """
    chunked = {task.layer for task in graph.tasks if task.chunk is not None}
    for slot in gaps:
        if slot.part == "moe" and slot.layer not in chunked:
            raise ScheduleError(f"layer {slot.layer} is dense: there is no gap between its all-to-alls")
    tasks = [task for task in graph.tasks if not lateness(task)]
    lanes = {lane: [task for task in tasks if task.lane is lane] for lane in Lane}
    # A layer's dense gap ends where the next MoE layer's all-to-alls below it begin.
    inter: list[Task] = []
    left = dict(gaps)
    above = 1 + max(task.layer for task in graph.tasks)  # gaps of this layer and of higher ones are passed
    for task in lanes[Lane.INTER]:
        if task.phase is Phase.BACKWARD and task.op == Op.COMBINE:
            for layer in reversed(range(task.layer + 1, above)):
                inter += left.pop(Slot(layer=layer, part="dense"), ())
            above = task.layer + 1
        if task.phase is Phase.BACKWARD and task.op == Op.DISPATCH:
            inter += left.pop(Slot(layer=task.layer, part="moe"), ())
        inter.append(task)
    for layer in reversed(range(above)):
        inter += left.pop(Slot(layer=layer, part="dense"), ())
    lanes[Lane.INTER] = [*inter, *left.pop(TAIL, ())]
    assert not left, f"no such gaps: {list(left)}"
    for task in graph.tasks:  # the optimiser's tasks, which follow the sums of gradients
        if lateness(task) and not is_all_reduce(task):
            lanes[task.lane].append(task)
    return ordered(name, graph, lanes)
