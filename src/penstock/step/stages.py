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
    for item in passes:
        named = isinstance(getattr(item, "name", None), str)
        if not (named and callable(item) and isinstance(getattr(item, "stage", None), Stage)):
            raise ScheduleError(
                f"{item!r} is no pass: it needs a name, a stage of Stage, and to be called with a graph"
            )
        try:
            hash(item)
        except TypeError as error:
            raise ScheduleError(
                f"pass {item.name} cannot be hashed ({error}), and steps are kept by their passes: make it a "
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
        RefusalError: For a pass that could not rewrite the graph, which it names.
    """
    for rewrite in passes:
        try:
            rewritten = rewrite(graph)
        except ScheduleError as error:
            raise RefusalError(f"pass {rewrite.name}: {error}") from error
        if not isinstance(rewritten, Graph):
            raise ScheduleError(
                f"pass {rewrite.name} returned {type(rewritten).__name__}: it must return a Graph"
            )
        graph = rewritten
    return graph


def in_order(passes: Sequence[Pass], own: Sequence[Pass] = ()) -> tuple[Pass, ...]:
    """Return passes sorted by stage.

    Args:
        own: Custom passes, which run last in their stage.

    Raises:
        ScheduleError: For two passes of one name.
    """
    seen: set[str] = set()
    for rewrite in (*passes, *own):
        if rewrite.name in seen:
            raise ScheduleError(f"pass {rewrite.name} stands twice: systems combine each pass once")
        seen.add(rewrite.name)
    placed = [(rewrite.stage, rewrite) for rewrite in passes]
    placed += [
        (Stage.UPDATES if rewrite.stage is Stage.GRADIENTS else rewrite.stage, rewrite) for rewrite in own
    ]
    return tuple(rewrite for _, rewrite in sorted(placed, key=lambda pair: pair[0]))
