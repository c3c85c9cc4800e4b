"""`Graph`: all tasks of an iteration in program order, checked, with a text form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.graph.state import check_state
from penstock.graph.task import Name, ScheduleError, Task

MOST_WITH_BITS = 1 << 14
"""The most tasks of a graph that keeps, for each, what leads to it: as many bits as tasks, 16 MiB in all."""


@dataclass(frozen=True)
class Graph:
    """All tasks of an iteration in program order (every task stands after those it reads)."""

    tasks: tuple[Task, ...]

    @staticmethod
    def of(tasks: Iterable[Task]) -> Graph:
        """Return a graph of these tasks.

        Raises:
            ScheduleError: For two tasks of one name.
        """
        graph = Graph(tuple(tasks))
        if len({task.name for task in graph.tasks}) != len(graph.tasks):
            ((twice, _),) = Counter(task.name for task in graph.tasks).most_common(1)
            raise ScheduleError(f"two tasks are called {twice}")
        return graph

    @cached_property
    def by_name(self) -> Mapping[Name, Task]:
        """Every task by its name."""
        return {task.name: task for task in self.tasks}

    @cached_property
    def links(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the tasks that every task reads, by position.

        A plan builds and simulates graphs by the hundred, and numbers are far quicker to compare than tasks.

        Raises:
            ScheduleError: For a missing task.
        """
        place = {task.name: i for i, task in enumerate(self.tasks)}
        try:
            return tuple(tuple([place[name] for name in task.sources()]) for task in self.tasks)
        except KeyError:
            task, role, name = next(
                (task, role, name)
                for task in self.tasks
                for role, names in task.inputs.items()
                for name in names
                if name not in place
            )
            raise ScheduleError(f"{task} reads {role} of {name}, which is not in the graph") from None

    @cached_property
    def needs(self) -> Mapping[Task, tuple[Task, ...]]:
        """For every task, the tasks that it reads, each once: the very objects in `tasks`."""
        return self._named(self.links)

    @cached_property
    def readers_at(self) -> list[list[int]]:
        """The positions of the tasks that read every task's outputs, by position."""
        readers: list[list[int]] = [[] for _ in self.tasks]
        for place, needs in enumerate(self.links):
            for need in needs:
                readers[need].append(place)
        return readers

    @cached_property
    def readers(self) -> Mapping[Task, tuple[Task, ...]]:
        """For every task, the tasks that read its outputs."""
        return self._named(self.readers_at)

    @cached_property
    def position(self) -> Mapping[Task, int]:
        """The place of every task in program order."""
        return {task: i for i, task in enumerate(self.tasks)}

    def text(self) -> str:
        """Return one line per task: its name, lane, axes, and inputs by role."""
        return "".join(f"{task.text}\n" for task in self.tasks)

    def facts(self) -> str:
        """Return `text` with how every task is cut and which state it touches: what ranks compare."""
        return "".join(f"{t.text} | {t.cut.text} {t.accumulates, t.reads, t.writes}\n" for t in self.tasks)

    def leads(self, first: int, last: int) -> bool:
        """Return whether edges lead from the task at `first` to the one at `last`.

        In a graph of very many tasks they are searched for: most pairs that are asked about are near each
        other.
        """
        if first >= last:
            return False
        if len(self.tasks) <= MOST_WITH_BITS:
            return bool(self._behind[last] >> first & 1)
        visited: set[int] = set()
        left = [last]
        while left:
            needs = self.links[left.pop()]
            if first in needs:
                return True
            for need in needs:
                if need > first and need not in visited:
                    visited.add(need)
                    left.append(need)
        return False

    @cached_property
    def _behind(self) -> list[int]:
        """By position of a task, all tasks from which edges lead to it, as the bits of one number."""
        behind: list[int] = []
        for needs in self.links:
            bits = 0
            for need in needs:
                bits |= behind[need] | 1 << need
            behind.append(bits)
        return behind

    def check(self) -> Graph:
        """Check the tasks, their order and their state, and return the graph.

        Raises:
            ScheduleError: For a missing task, a cycle, or unordered access to state.
        """
        for place, needs in enumerate(self.links):
            for need in needs:
                if need >= place:
                    task, later = self.tasks[place], self.tasks[need]
                    role = next(r for r, names in task.inputs.items() if later.name in names)
                    raise ScheduleError(
                        f"{task} reads {role} of {later}, which comes after it: the graph has a cycle"
                    )
        check_state(self)
        return self

    def _named(self, places: Sequence[Sequence[int]]) -> dict[Task, tuple[Task, ...]]:
        tasks = self.tasks
        return {
            task: tuple([tasks[i] for i in positions]) for task, positions in zip(tasks, places, strict=True)
        }
