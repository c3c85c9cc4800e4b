"""The order of passes. A pass is graph in, graph out; its stage says when it may run.

The order matters: cutting before the transpose would give the backward the forward's chunks, and gradient
pieces before weight gradients would reduce what is not complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

from penstock.graph import Graph, RefusalError, ScheduleError


class Stage(IntEnum):
    """When a pass runs. Passes of one stage run in the order in which they are given, own ones last.

    A pass of one's own at GRADIENTS finds the step with its updates.
    """

    INSERT = 0
    TRANSPOSE = 1
    MICROBATCHES = 2
    CHUNKS = 3
    SLICES = 4
    WEIGHTS = 5
    GRADIENTS = 6
    UPDATES = 7
    SETTLE = 8


class Pass(Protocol):
    """A rewriting of a graph. Frozen, because steps are compared and cached by passes; named for messages."""

    @property
    def name(self) -> str: ...

    @property
    def stage(self) -> Stage: ...

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph rewritten. Raises ScheduleError with the reason where that is impossible."""
        ...


def check_passes(passes: Sequence[Any]) -> None:
    """Raise ScheduleError for an object that is no pass, or a pass that cannot be hashed."""
    for each in passes:
        named = isinstance(getattr(each, "name", None), str)
        if not (named and callable(each) and isinstance(getattr(each, "stage", None), Stage)):
            raise ScheduleError(
                f"{each!r} is no pass: it needs a name, a stage of Stage, and to be called with a graph"
            )
        try:
            hash(each)
        except TypeError as error:
            raise ScheduleError(
                f"pass {each.name} cannot be hashed ({error}), and steps are kept by their passes: make it a "
                "frozen dataclass"
            ) from error


def apply(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """Run passes by stage.

    Raises:
        ScheduleError: For two passes of one name, and as `run` does.
    """
    return run(graph, in_order(passes))


def run(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """Run passes in this order.

    Raises:
        RefusalError: Naming the pass that could not rewrite the graph.
    """
    for each in passes:
        try:
            found = each(graph)
        except ScheduleError as error:
            raise RefusalError(f"pass {each.name}: {error}") from error
        if not isinstance(found, Graph):
            raise ScheduleError(f"pass {each.name} returned {type(found).__name__}: it must return a Graph")
        graph = found
    return graph


def in_order(passes: Sequence[Pass], own: Sequence[Pass] = ()) -> tuple[Pass, ...]:
    """Return passes sorted by stage, with somebody's own.

    Raises:
        ScheduleError: For two passes of one name.
    """
    seen: set[str] = set()
    for each in (*passes, *own):
        if each.name in seen:
            raise ScheduleError(f"pass {each.name} stands twice: systems combine each pass once")
        seen.add(each.name)
    placed = [(each.stage, each) for each in passes]
    placed += [(Stage.UPDATES if each.stage is Stage.GRADIENTS else each.stage, each) for each in own]
    return tuple(each for _, each in sorted(placed, key=lambda pair: pair[0]))
