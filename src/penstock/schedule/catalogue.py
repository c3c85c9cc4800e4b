"""The schedules that a configuration can name, and how one is built from sizes and costs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import lcm
from typing import Annotated

from penstock.config import ConfigError, Within, check_bounds
from penstock.config.bounds import Steps
from penstock.graph import Graph
from penstock.schedule.dense_overlap import DenseOverlap
from penstock.schedule.flowmoe import FlowMoE
from penstock.schedule.freeze import Cost
from penstock.schedule.fsmoe import FSMoE
from penstock.schedule.lina import Lina
from penstock.schedule.moe_pipeline import MoEPipeline
from penstock.schedule.penstock import Penstock, PriorityName
from penstock.schedule.schedule import Schedule
from penstock.schedule.sequential import Sequential
from penstock.schedule.system import Pieces, System
from penstock.step import StepShape, build_graph

MOST_PIECES = 256
MOST_SLICES = 64
PieceCount = Annotated[int, Within(1, MOST_PIECES, "each piece costs a start-up")]
ChunkBytes = Annotated[
    int,
    Within(
        512,
        1 << 40,
        "every chunk costs a start-up, so chunks under 512 bytes never pay",
        hint="Use 512 or more; 1048576 is a good start.",
    ),
]
SCHEDULES: dict[str, System] = {
    system.name: system
    for system in (Sequential(), MoEPipeline(), DenseOverlap(), Lina(), FlowMoE(), FSMoE(), Penstock())
}


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Section `[schedule]`.

    name: one of SCHEDULES.
    microbatches: pieces of the batch through whole blocks; read by flowmoe and penstock.
    chunks: pieces of the tokens inside an MoE layer; none = as the schedule usually has it (moe_pipeline,
        dense_overlap and lina 2, fsmoe and penstock 1). sequential and flowmoe do not cut there.
    backward_chunks: the same on the way back; none = as many. What is saved between the two is cut into the
        least common multiple of both, each of which experts compute for itself; MOST_SLICES at most.
    all_reduce_chunk_bytes: FlowMoE's S_p, read by flowmoe, penstock and lina.
    priority: by which rule penstock orders; `search` starts from the others and is the best and the slowest.
    refine_after: after this many steps the order is frozen again from measured durations; 0 = never.
    """

    name: str = "flowmoe"
    microbatches: PieceCount = 2
    chunks: PieceCount | None = None
    backward_chunks: PieceCount | None = None
    all_reduce_chunk_bytes: ChunkBytes = 1 << 20
    priority: PriorityName = "search"
    refine_after: Steps = 4

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.name not in SCHEDULES:
            nearest = get_close_matches(self.name, SCHEDULES, n=1, cutoff=0.0)[0]
            hint = f"Nearest: {nearest}. All: {', '.join(SCHEDULES)}."
            raise ConfigError("name", self.name, "no such schedule", hint)
        self._check_slices()

    def _check_slices(self) -> None:
        """Two numbers of chunks with few common factors cut what both share into crumbs."""
        forward, backward = self._cut_alone.degrees
        if not _crumbles(forward, backward):
            return
        fitting = [b for b in range(1, MOST_PIECES + 1) if not _crumbles(forward, b)]
        why = (
            f"with chunks = {forward} what is saved would be cut into {lcm(forward, backward)} slices (their "
            f"least common multiple), and experts compute every slice for itself; at most {MOST_SLICES}"
        )
        nearest = min(fitting, key=lambda b: (abs(b - backward), b))
        raise ConfigError(
            "backward_chunks", backward, why, f"Nearest valid: {nearest}. {forward} times or part fits best."
        )

    @property
    def system(self) -> System:
        return Penstock(self.priority) if self.name == Penstock.name else SCHEDULES[self.name]

    @property
    def cuts_batch(self) -> bool:
        """Whether the schedule reads `microbatches`."""
        return self._cut_alone.microbatches == self.microbatches > 1

    @property
    def _cut_alone(self) -> StepShape:
        """How a step of one MoE layer is cut."""
        return self.system.shape(StepShape(moe_layers=(True,)), self.pieces((1,), (0,)))

    def pieces(self, all_reduce_bytes: tuple[int, ...], expert_all_reduce_bytes: tuple[int, ...]) -> Pieces:
        """The cut that this section asks for, given the bytes of every layer's gradients."""
        return Pieces(
            microbatches=self.microbatches,
            chunks=self.chunks,
            all_reduce_chunk_bytes=self.all_reduce_chunk_bytes,
            all_reduce_bytes=all_reduce_bytes,
            expert_all_reduce_bytes=expert_all_reduce_bytes,
            backward_chunks=self.backward_chunks,
        )


def _crumbles(forward: int, backward: int) -> bool:
    """Whether two numbers of chunks need over MOST_SLICES slices, and more than either says itself."""
    return lcm(forward, backward) > max(MOST_SLICES, forward, backward)


@dataclass(frozen=True)
class StepPlan:
    """What a step runs: the graph of its tasks, their frozen order, and how the step is cut."""

    graph: Graph
    schedule: Schedule
    shape: StepShape

    @cached_property
    def digest(self) -> str:
        """A hash of the order and of what every task is: two ranks with the same digest run the same step."""
        return hashlib.sha256(f"{self.schedule.text()}{self.graph.facts()}".encode()).hexdigest()


def plan_step(
    system: System, shape: StepShape, pieces: Pieces, cost_of: Callable[[StepShape], Cost]
) -> StepPlan:
    """Cut the iteration as `system` does, order the pieces by its rule, and check the result."""
    cut = system.shape(shape, pieces)
    graph = build_graph(cut)
    schedule = system.order(graph, cost_of(cut))
    schedule.check(graph)
    return StepPlan(graph, schedule, cut)
