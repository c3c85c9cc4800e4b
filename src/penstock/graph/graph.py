"""`Graph`: all tasks of an iteration in program order, checked, with a text form. State has edges, too."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

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


# ---- state: tasks that touch a named state must be ordered by edges, not by luck -------------------------
#
# A task names the state that it `reads`, `writes` and `accumulates` (adds to), as `KIND of L2`: gradients of
# L2, expert parameters of L2. State that every step produces again, such as gradients, is read after all
# tasks that write or add to it. State that lasts from step to step (`LASTING`) may also be read first: then
# the reader has the value of the step before, and edges must lead from the reader to the writer. A step
# begins when the one before has ended, so nothing needs an edge across that border.
#
# Tasks that have different pieces of one buffer, cut alike, do not touch each other's.

LASTING = (
    "parameters",
    "partial parameters",
    "expert parameters",
    "moments",
    "partial moments",
    "expert moments",
)
"""Kinds of state whose value outlives a step."""


def lasts(state: str) -> bool:
    """Return whether a state keeps its value from step to step."""
    return state.partition(" of ")[0] in LASTING


def check_state(graph: Graph) -> None:
    """Raise ScheduleError, naming a state and two tasks that touch it without an order between them."""
    reading, writing, adding = (defaultdict[str, list[int]](list) for _ in range(3))
    for place, task in enumerate(graph.tasks):
        for touching, states in ((reading, task.reads), (writing, task.writes), (adding, task.accumulates)):
            for state in states:
                touching[state].append(place)
    for state in dict.fromkeys((*writing, *adding)):  # state that no task changes may be read at any time
        _check_reads(graph, state, reading[state], writing[state], adding[state])
        _check_changes(graph, state, writing[state], adding[state])


def _check_reads(graph: Graph, state: str, reading: list[int], writing: list[int], adding: list[int]) -> None:
    """Check that a reader stands after every task that adds, and before or after each that writes."""
    checked: set[tuple[int, ...]] = set()  # pieces of one buffer read the same tasks
    writers = _by_part(graph, writing)
    for reader in reading:
        early = graph.tasks[reader]
        if (needs := graph.links[reader]) not in checked:
            checked.add(needs)
            for adder in adding:
                if adder != reader and not graph.leads(adder, reader):
                    raise ScheduleError(
                        f"{early} reads {state} before {graph.tasks[adder]} has added to it: no edge leads "
                        "from one to the other"
                    )
        for writer in writers(reader):
            if writer == reader or graph.leads(writer, reader):
                continue
            late, first = graph.tasks[writer], graph.leads(reader, writer)
            if not lasts(state) and not (first and state in late.reads):
                raise ScheduleError(
                    f"{early} reads {state} before {late} has written it: no edge leads from one to the other"
                )
            if not first:
                raise ScheduleError(
                    f"{early} reads {state}, which {late} writes: without an edge between them the schedule "
                    "decides whether that is this step's value or the last one's"
                )


def _check_changes(graph: Graph, state: str, writing: list[int], adding: list[int]) -> None:
    """Check that edges order two writers of one part, and a writer and a task that adds."""
    tasks, before, writers = graph.tasks, graph.leads, _by_part(graph, writing)
    for writer in writing:
        task = tasks[writer]
        for other in writers(writer):
            if other > writer and not before(writer, other):
                raise ScheduleError(
                    f"{task} and {tasks[other]} both write {state}, and no edge says which of them comes last"
                )
        # A writer that also reads the state stands after every task that adds to it.
        for adder in adding if state not in task.reads else ():
            if not (before(writer, adder) or before(adder, writer)):
                raise ScheduleError(
                    f"{tasks[adder]} adds to {state}, which {task} writes, and no edge says which comes first"
                )
    if len({tasks[adder].lane for adder in adding}) > 1:
        for i, j in combinations(adding, 2):
            first, second = tasks[i], tasks[j]
            if first.lane is not second.lane and not before(i, j):
                raise ScheduleError(
                    f"{first} on lane {first.lane} and {second} on lane {second.lane} both add to {state}, "
                    "perhaps at the same time: give them an edge or one lane"
                )


def _by_part(graph: Graph, places: Sequence[int]) -> Callable[[int], Iterable[int]]:
    """Return a function from a task's place to those that share a part of its buffer.

    A look-up where all are cut into the same pieces, a search otherwise.
    """
    cuts = {_parts(graph.tasks[place]) for place in places}
    by_piece: dict[int | None, list[int]] = {}
    for place in places:
        by_piece.setdefault(graph.tasks[place].piece, []).append(place)

    def sharing(place: int) -> Iterable[int]:
        task = graph.tasks[place]
        if task.piece is not None and cuts == {_parts(task)}:
            return by_piece.get(task.piece, ())
        return [
            other
            for other in places
            if task.piece in (None, graph.tasks[other].piece) or _parts(task) != _parts(graph.tasks[other])
        ]

    return sharing


def _parts(task: Task) -> tuple[int, ...] | None:
    """Return how the buffer is cut of which a task has a piece; None if the task has the whole buffer."""
    return None if task.piece is None else task.cut.parts
