"""What a published system is here: a graph transformation plus an order rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar, cast

from penstock.config import ConfigError
from penstock.decision import Decision, GradientBytes
from penstock.decision.field import READERS
from penstock.graph import Graph, Lane, Task
from penstock.ops import Op
from penstock.ops.optimizer import GATHERS, UPDATES
from penstock.ops.sums import REDUCTIONS, reduced
from penstock.schedule.freeze import Cost
from penstock.schedule.room import ordered
from penstock.schedule.schedule import Schedule
from penstock.step import StepShape
from penstock.step.shape import ExpertForm

MOST_REDUCTIONS = 1 << 15
"""Pieces of all layers' gradients in a step. With a start-up of 0.1 ms they take 3.3 s by themselves."""


class System(ABC):
    """One file, one class: how it cuts the iteration and how it orders the pieces.

    reads: the fields of a decision that change anything here; searches try values of them alone, and people
    are told of no others. usual_chunks: pieces of an MoE layer's tokens where none is set. expert_form: how
    rows meet all shards of their experts, where that is part of the schedule and not for a plan to decide.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    usual_chunks: ClassVar[int] = 1
    expert_form: ClassVar[ExpertForm | None] = None

    @abstractmethod
    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        """How the step is cut, and by which further passes (`more`) it is rewritten."""

    @abstractmethod
    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        """The order rule, frozen."""

    def draft(self, graph: Graph, cost: Cost, choice: Decision, part: int) -> Schedule:  # noqa: ARG002
        """An order nearly as good for about 1/part of the work, where `order` takes long: to compare cuts."""
        return self.order(graph, cost, choice)


SCHEDULES = cast("dict[str, System]", READERS)
"""The schedules by name."""


def register_schedule(system: System) -> None:
    """Make a schedule known: to configurations, plans, searches and commands. The last of a name counts."""
    SCHEDULES[system.name] = system


def pieces_of(total_bytes: tuple[int, ...], chunk_bytes: int) -> tuple[int, ...]:
    """Into how many nearly equal chunks each buffer is cut so that none is over `chunk_bytes`.

    Raises ConfigError for more than MOST_REDUCTIONS of them in all: every one is a task and a start-up.
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
    """A chunk size with which `pieces_of` is within its limit, and hardly larger than it must be."""
    layers = sum(size > 0 for size in total_bytes)  # the last piece of each may be a small one
    return max(1, -(-sum(total_bytes) // (_most_reductions(total_bytes) - layers)))


def _most_reductions(total_bytes: tuple[int, ...]) -> int:
    return max(MOST_REDUCTIONS, 2 * len(total_bytes))


def whole(total_bytes: tuple[int, ...]) -> tuple[int, ...]:
    """One chunk for every buffer that holds anything."""
    return tuple(min(size, 1) for size in total_bytes)


def is_all_reduce(task: Task) -> bool:
    """Whether the task synchronises gradients, of whatever kind."""
    return reduced(task.op) != ""


def lateness(task: Task) -> int:
    """0 for a task of the model, 1 for one that sums gradients or takes their norm, 2 for an update or later.

    Where tasks compete, those with less go first: the model's own are on the way of all others.
    """
    return _lateness(task.op, task.forward)


@cache
def _lateness(op: str, forward: bool) -> int:
    if op in UPDATES or (op in GATHERS and not forward):
        return 2
    return int(reduced(op) != "" or op == Op.NORM)


def all_reduce_at_the_end(name: str, graph: Graph) -> Schedule:
    """Program order, every gradient all-reduce after the last backward computation.

    Layer 0 goes first among them: its gradients are the last to be made, so none of the others can
    slip under the computation. That is what plain expert parallelism does. (Where layer 0 has nothing to
    reduce, the first all-reduce may start one block early.)
    """
    tasks = [task for task in graph.tasks if not lateness(task)]
    last = [task for task in graph.tasks if is_all_reduce(task)]
    tasks += sorted(last, key=lambda task: (task.layer, list(REDUCTIONS).index(reduced(task.op))))
    tasks += [task for task in graph.tasks if lateness(task) and not is_all_reduce(task)]
    return ordered(name, graph, {lane: [task for task in tasks if task.lane is lane] for lane in Lane})
