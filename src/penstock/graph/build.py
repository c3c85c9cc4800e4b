"""From a shape to the graph of one iteration: every task once, in program order, with its dependencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.graph.dependencies import INPUT, WEIGHT, B, F, dependencies, statistics_task
from penstock.graph.errors import ScheduleError
from penstock.graph.shape import StepShape
from penstock.graph.task import Op, Task


@dataclass(frozen=True)
class Graph:
    """All tasks of an iteration in program order (every dependency stands before its reader)."""

    shape: StepShape
    tasks: tuple[Task, ...]

    @cached_property
    def links(self) -> tuple[tuple[int, ...], ...]:
        """By position of a task the positions of those it reads. Raises ScheduleError for what is not there.

        A plan builds and simulates graphs by the hundred, and comparing numbers is far quicker than tasks.
        """
        position = self.position
        try:
            return tuple(
                tuple([position[need] for need in dependencies(task, self.shape)]) for task in self.tasks
            )
        except KeyError:
            task, need = next(self._dangling())
            raise ScheduleError(f"{task} needs {need}, which is not in the graph") from None

    @cached_property
    def needs(self) -> Mapping[Task, tuple[Task, ...]]:
        """For every task the tasks whose results it reads: the very objects in `tasks`, quick to compare."""
        return self._named(self.links)

    @cached_property
    def readers_at(self) -> list[list[int]]:
        """By position of a task the positions of those that read its result."""
        readers: list[list[int]] = [[] for _ in self.tasks]
        for place, needs in enumerate(self.links):
            for need in needs:
                readers[need].append(place)
        return readers

    @cached_property
    def readers(self) -> Mapping[Task, tuple[Task, ...]]:
        """For every task the tasks that read its result."""
        return self._named(self.readers_at)

    @cached_property
    def position(self) -> Mapping[Task, int]:
        """Where a task stands in program order."""
        return {task: i for i, task in enumerate(self.tasks)}

    def _named(self, places: Sequence[Sequence[int]]) -> dict[Task, tuple[Task, ...]]:
        tasks = self.tasks
        return {task: tuple([tasks[i] for i in found]) for task, found in zip(tasks, places, strict=True)}

    def _dangling(self) -> Iterator[tuple[Task, Task]]:
        for task in self.tasks:
            yield from ((task, need) for need in dependencies(task, self.shape) if need not in self.position)


def build_graph(shape: StepShape) -> Graph:
    """Build and check the graph: complete (no dependency is missing) and acyclic."""
    graph = Graph(shape, tuple(_program(shape)))
    _check(graph)
    return graph


def _check(graph: Graph) -> None:
    if len(graph.position) != len(graph.tasks):
        raise ScheduleError("a task stands twice in the graph")
    for place, needs in enumerate(graph.links):
        for need in needs:
            if need >= place:
                task, later = graph.tasks[place], graph.tasks[need]
                raise ScheduleError(f"{task} needs {later}, which comes after it: the graph has a cycle")


def _program(shape: StepShape) -> Iterator[Task]:
    """Breadth first as FlowMoE (Eq. 2-5) orders it: an op for all pieces, then the next op."""
    pieces = range(shape.microbatches)
    yield from (Task(0, Op.EMBED, F, m) for m in pieces)
    for layer in range(shape.num_layers):
        yield from _block_forward(layer, shape)
    yield from (Task(shape.last, Op.HEAD, F, m) for m in pieces)
    yield statistics_task(shape)
    yield from (Task(shape.last, Op.HEAD, B, m) for m in reversed(pieces))
    for layer in reversed(range(shape.num_layers)):
        yield from _block_backward(layer, shape)


def _block_forward(layer: int, shape: StepShape) -> Iterator[Task]:
    pieces, chunks = range(shape.microbatches), range(shape.chunks)
    yield from (Task(layer, Op.ATTENTION, F, m) for m in pieces)
    if not shape.moe_layers[layer]:
        return
    for m in pieces:
        if shape.exchange_counts:
            yield Task(layer, Op.COUNTS, F, m)
        yield from (Task(layer, op, F, m, c) for op in shape.dispatch for c in chunks)
    if shape.shared_experts:
        yield from (Task(layer, Op.SHARED, F, m) for m in pieces)
    for op in (Op.EXPERTS, *shape.combine):
        yield from (Task(layer, op, F, m, c) for m in pieces for c in chunks)
    yield from (Task(layer, Op.UNORDER, F, m) for m in pieces)


def _block_backward(layer: int, shape: StepShape) -> Iterator[Task]:
    pieces, chunks = range(shape.microbatches - 1, -1, -1), range(shape.backward_chunks)
    if shape.moe_layers[layer]:
        yield from (Task(layer, Op.UNORDER, B, m) for m in pieces)
        for op in reversed(shape.moe_chain):
            phase = INPUT if op is Op.EXPERTS and shape.split_experts else B
            yield from (Task(layer, op, phase, m, c) for m in pieces for c in chunks)
            if shape.shared_experts and op is shape.combine[0]:
                yield from (Task(layer, Op.SHARED, B, m) for m in pieces)
    yield from (Task(layer, Op.ATTENTION, B, m) for m in pieces)
    if layer == 0:
        yield from (Task(0, Op.EMBED, B, m) for m in pieces)
    if shape.moe_layers[layer]:
        if shape.split_experts:
            yield from (Task(layer, Op.EXPERTS, WEIGHT, m, c) for m in pieces for c in chunks)
        replicas = range(shape.expert_all_reduce_chunks[layer])
        yield from (Task(layer, Op.EXPERT_ALL_REDUCE, B, None, c) for c in replicas)
    yield from (Task(layer, Op.ALL_REDUCE, B, None, c) for c in range(shape.all_reduce_chunks[layer]))
