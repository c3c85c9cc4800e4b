"""Pipeline stages: the order of microbatches on them, and its simulation.

A stage holds one or more parts, each a few consecutive layers; parts are numbered in the order of layers and
dealt to stages in turn. The forward or backward of a microbatch on a part is a cell; a stage works on its
cells in slots, one after another. With one part each the order is 1F1B, with several that of Megatron's
interleaved 1F1B. Where cells overlap, a slot in the middle has two: the forward of one microbatch and the
backward of another, for which more microbatches are under way.

Every stage, and every link from one to another, is a lane of the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from penstock.config import ConfigError
from penstock.features.sharded_optimizer.feature import of_optimizer
from penstock.graph import Graph, ScheduleError, Task
from penstock.ops import spec_of
from penstock.schedule.schedule import Schedule
from penstock.schedule.system import is_all_reduce, lateness
from penstock.timing import path_ends

SIZE, VIRTUAL_SIZE = "--pipeline-parallel-size", "--virtual-pipeline-parallel-size"


class Cell(NamedTuple):
    """The forward or the backward of a microbatch on a part of the layers."""

    forward: bool
    part: int
    microbatch: int


Slot = tuple[Cell, ...]
"""What a stage works on at once."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages, and how microbatches pass through them.

    Attributes:
        pipeline_parallel_size: The number of stages.
        virtual_pipeline_parallel_size: The parts of each stage.
        microbatches: The microbatches of an update.
        overlaps: Whether a stage works on a forward and a backward at once.
        node_size: The consecutive ranks in one node, of one stage or of several; 0 = no stage shares its
            nodes with others.
    """

    pipeline_parallel_size: int
    virtual_pipeline_parallel_size: int = 1
    microbatches: int = 1
    overlaps: bool = False
    node_size: int = 0

    def __post_init__(self) -> None:
        stages, virtual, microbatches = self.sizes
        if stages < 1:
            raise ConfigError(SIZE, stages, "is the number of stages", "Use 1 or more.")
        if virtual < 1:
            raise ConfigError(VIRTUAL_SIZE, virtual, "is the number of parts of a stage", "Use 1 or more.")
        if virtual > 1 and stages == 1:
            why = "is the number of parts of every stage, and a single stage has nobody to take turns with"
            raise ConfigError(VIRTUAL_SIZE, virtual, why, f"Use 1, or set {SIZE}.")
        if virtual > 1 and (microbatches < stages or microbatches % stages):
            near = max(1, round(microbatches / stages)) * stages
            why = (
                f"makes {stages} stages take turns with groups of {stages} microbatches, and an update has "
                f"{microbatches}"
            )
            hint = f"Use a --global-batch of {near} microbatches, or 1."
            raise ConfigError(VIRTUAL_SIZE, virtual, why, hint)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Stages, parts of each, and microbatches."""
        return self.pipeline_parallel_size, self.virtual_pipeline_parallel_size, self.microbatches

    @property
    def parts(self) -> int:
        """The number of parts of all stages."""
        return self.pipeline_parallel_size * self.virtual_pipeline_parallel_size

    @property
    def words(self) -> str:
        """The order of microbatches as text."""
        order = "1F1B" if self.virtual_pipeline_parallel_size == 1 else "interleaved 1F1B"
        return f"{order}, forward and backward overlapped" if self.overlaps else order

    def stage_of(self, part: int) -> int:
        return part % self.pipeline_parallel_size

    def parts_of(self, stage: int) -> range:
        """Return the parts of a stage, in the order of layers."""
        return range(stage, self.parts, self.pipeline_parallel_size)

    @cached_property
    def slots(self) -> tuple[list[Slot], ...]:
        """What every stage works on, in its order."""
        return tuple(map(self._slots, range(self.pipeline_parallel_size)))

    def _slots(self, stage: int) -> list[Slot]:
        stages, virtual, microbatches = self.sizes
        cells = virtual * microbatches
        if virtual > 1 or self.overlaps:
            before = 2 * (stages - stage - 1) + (virtual - 1) * stages + self.overlaps
        else:
            before = stages - stage - 1
        before = min(before, cells)
        forward, backward = (list(self._cells(way, stage)) for way in (True, False))
        slots: list[Slot] = [(cell,) for cell in forward[:before]]
        for pair in zip(forward[before:], backward, strict=False):
            slots += [pair] if self.overlaps else [pair[:1], pair[1:]]
        return slots + [(cell,) for cell in backward[cells - before :]]

    def _cells(self, forward: bool, stage: int) -> Iterator[Cell]:
        """Yield all forwards or backwards of a stage: `stages` microbatches by one part, then by the next."""
        stages, _, microbatches = self.sizes
        parts = self.parts_of(stage)
        for first in range(0, microbatches, stages):
            for part in parts if forward else reversed(parts):
                for microbatch in range(first, min(first + stages, microbatches)):
                    yield Cell(forward, part, microbatch)

    @cached_property
    def held(self) -> tuple[frozenset[tuple[int, ...]], ...]:
        """By stage, of how many microbatches it keeps activations for each of its parts, at any time."""
        by_stage = []
        for stage, order in enumerate(self.slots):
            kept, held = dict.fromkeys(self.parts_of(stage), 0), set[tuple[int, ...]]()
            for slot in order:
                for cell in slot:
                    kept[cell.part] += cell.forward
                held.add(tuple(kept.values()))
                for cell in slot:
                    kept[cell.part] -= not cell.forward
            by_stage.append(frozenset(held))
        return tuple(by_stage)


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """Seconds of what happens in a pipeline.

    Attributes:
        slot: Returns the seconds from the beginning of a slot to the end of each of its cells.
        link: Returns the seconds of a microbatch's hidden states, or of their gradients, from one stage to
            another.
        closing: Returns the seconds of what a stage does when all stages have all their gradients.
        tied_s: The seconds in which the first and the last stage sum the gradients of a weight that both
            have; 0 = there is none.
    """

    slot: Callable[[Slot], Sequence[float]]
    link: Callable[[int, int], float]
    closing: Callable[[int], float] = lambda stage: 0.0
    tied_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """A simulated update.

    Attributes:
        seconds: The time of the whole update.
        busy_s: The seconds in which every stage works.
    """

    seconds: float
    busy_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of the update in which a stage waits for others: the mean of all stages."""
        return 1 - sum(self.busy_s) / len(self.busy_s) / self.seconds


def run_pipeline(pipeline: Pipeline, times: PipelineTimes) -> PipelineRun:
    """Simulate an update.

    Raises:
        ScheduleError: If stages wait for each other in a circle.
    """
    board = _Board(pipeline, times)
    ends = path_ends(board.orders, board.links, board.seconds)
    if max(ends) == inf:
        raise ScheduleError(f"the stages of {pipeline} wait for each other")
    stages = range(pipeline.pipeline_parallel_size)
    busy = tuple(sum(board.seconds[place] for place in board.orders[stage]) for stage in stages)
    return PipelineRun(seconds=max(ends), busy_s=busy)


class _Board:
    """The tasks of an update as numbers: a lane for each stage, then one for each link that is used."""

    def __init__(self, pipeline: Pipeline, times: PipelineTimes) -> None:
        self.seconds: list[float] = []
        self.links: list[Sequence[int]] = []
        stages = range(pipeline.pipeline_parallel_size)
        self.orders: list[list[int]] = [[] for _ in stages]
        made, early_s = dict[Cell, int](), dict[Cell, float]()
        for stage, order in enumerate(pipeline.slots):
            for slot in order:
                ends = times.slot(slot)
                place = self._add(max(ends))
                self.orders[stage].append(place)
                for cell, end in zip(slot, ends, strict=True):
                    made[cell], early_s[cell] = place, max(ends) - end
        # The transfers, and for every cell what brings its input; links keep the senders' order. What is sent
        # while the rest of its slot runs takes as much less when that has ended.
        link_s = dict[tuple[int, int], float]()
        lanes, arrived = dict[tuple[int, int], list[int]](), dict[Cell, int]()
        for cell, place in made.items():
            target = cell._replace(part=cell.part + (1 if cell.forward else -1))
            if not 0 <= target.part < pipeline.parts:
                continue
            link = pipeline.stage_of(cell.part), pipeline.stage_of(target.part)
            if link not in link_s:
                link_s[link] = times.link(*link)
            arrived[target] = self._add(max(0.0, link_s[link] - early_s[cell]), (place,))
            lanes.setdefault(link, []).append(arrived[target])
        self.orders += lanes.values()
        last = pipeline.parts - 1
        for cell, place in made.items():
            turns = not cell.forward and cell.part == last
            needed = made.get(cell._replace(forward=True)) if turns else arrived.get(cell)
            if needed is not None:
                self.links[place] = (*self.links[place], needed)
        all_last = [self.orders[stage][-1] for stage in stages]
        if times.tied_s:
            tied = self._add(times.tied_s, (all_last[0], all_last[-1]))
            self.orders.append([tied])
            all_last = [*all_last, tied]
        for stage in stages:
            self.orders[stage].append(self._add(times.closing(stage), all_last))

    def _add(self, seconds: float, needs: Sequence[int] = ()) -> int:
        self.seconds.append(seconds)
        self.links.append(needs)
        return len(self.seconds) - 1


# ---- what of a step runs on a pipeline stage: halves of its graph, and two of different microbatches as
# one
#
# The halves of a step on a stage are apart: what a backward reads was made long before, so edges between them
# are cut. The names of a forward and a backward task differ, so one graph can hold both.


@dataclass(frozen=True, kw_only=True)
class Half:
    """One half of a step on a part of the layers, for one microbatch.

    Attributes:
        begins, ends, blocks: Whether the part has the embedding, head and loss, and any layers.
        first: Whether sharded parameters are gathered before; forward only.
        sums, updates: Whether gradients are summed over ranks, and parameters updated; backward only.
    """

    forward: bool
    begins: bool
    ends: bool
    blocks: bool = True
    first: bool = False
    sums: bool = False
    updates: bool = False

    def of(self, graph: Graph) -> list[Task]:
        """Return the tasks of this half, which read each other alone."""
        kept = []
        for task in (each for each in graph.tasks if each.forward is self.forward):
            spec = spec_of(task.op)
            if spec.place == "input":
                is_here = self.begins
            elif spec.place == "output" or (self.forward and spec.once):
                is_here = self.ends
            else:
                is_here = self.blocks or lateness(task) > 0 or of_optimizer(task) != ""
            if self.forward:
                wanted = self.first or not of_optimizer(task)
            else:
                wanted = self.sums if is_all_reduce(task) else self.updates or not lateness(task)
            if is_here and wanted:
                kept.append(task)
        kept_names, tasks = {task.name for task in kept}, []
        for task in kept:
            inputs = {
                role: inside
                for role, names in task.inputs.items()
                if (inside := tuple(name for name in names if name in kept_names))
            }
            tasks.append(task.reading(inputs))
        return tasks


def in_order(schedule: Schedule, tasks: Iterable[Task]) -> Schedule:
    """Return the order of a step for some of its tasks."""
    own = {task.name: task for task in tasks}
    lanes = {
        lane: tuple(own[task.name] for task in order if task.name in own)
        for lane, order in schedule.lanes.items()
    }
    return Schedule(schedule.name, {lane: order for lane, order in lanes.items() if order})
