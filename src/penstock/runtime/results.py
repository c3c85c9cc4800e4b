"""Results of tasks, kept exactly as long as somebody will read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from penstock.graph import Graph, Task


@dataclass
class Outcome:
    """What a handler returns.

    value: for readers of the same phase. saved: what forward keeps for backward (or None).
    Two lifetimes, because a forward value is large and soon read, and backward needs something else.
    """

    value: Any
    saved: Any = None


class ResultTable:
    """Outcomes by task. A value goes when its last reader of the same phase has run, the rest with the
    last reader of all."""

    def __init__(self, graph: Graph, tasks: Iterable[Task]) -> None:
        running = set(tasks)
        self._graph = graph
        self._outcomes: dict[Task, Outcome] = {}
        self._near = {
            t: sum(r in running and r.forward is t.forward for r in graph.readers[t]) for t in running
        }
        self._far = {
            t: sum(r in running and r.forward is not t.forward for r in graph.readers[t]) for t in running
        }
        self._lock = Lock()

    def put(self, task: Task, outcome: Outcome) -> None:
        self._outcomes[task] = outcome
        with self._lock:
            self._release(task)

    def read(self, reader: Task, need: Task) -> Any:
        """What `reader` sees of `need`: the value within a phase, what was saved from the other phase."""
        outcome = self._outcomes[need]
        return outcome.value if reader.forward is need.forward else outcome.saved

    def done(self, reader: Task) -> None:
        """`reader` has run: its inputs have one reader less."""
        with self._lock:
            for need in self._graph.needs[reader]:
                counts = self._near if reader.forward is need.forward else self._far
                counts[need] -= 1
                self._release(need)

    def __len__(self) -> int:
        return len(self._outcomes)

    def _release(self, task: Task) -> None:
        outcome = self._outcomes.get(task)
        if outcome is None:
            return
        if self._near[task] == 0:
            outcome.value = None
        if self._far[task] == 0:
            outcome.saved = None
        if self._near[task] == 0 and self._far[task] == 0:
            del self._outcomes[task]
