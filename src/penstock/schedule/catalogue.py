"""The schedules that a configuration can name, and how one is built from sizes and costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from penstock.config import ConfigError
from penstock.graph import Graph, StepShape, build_graph
from penstock.schedule.flowmoe import FlowMoE
from penstock.schedule.freeze import Cost
from penstock.schedule.moe_pipeline import MoEPipeline
from penstock.schedule.penstock import Penstock
from penstock.schedule.schedule import Schedule
from penstock.schedule.sequential import Sequential
from penstock.schedule.system import Pieces, System

MOST_PIECES = 256
SCHEDULES: dict[str, System] = {
    system.name: system for system in (Sequential(), MoEPipeline(), FlowMoE(), Penstock())
}


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Section `[schedule]`.

    name: one of SCHEDULES.
    microbatches: pieces of the batch through whole blocks; read by flowmoe.
    chunks: pieces of the tokens inside an MoE layer; read by moe_pipeline.
    all_reduce_chunk_bytes: FlowMoE's S_p.
    refine_after: after this many steps the order is frozen again from measured durations; 0 = never.
    """

    name: str = "flowmoe"
    microbatches: int = 2
    chunks: int = 2
    all_reduce_chunk_bytes: int = 1 << 20
    refine_after: int = 4

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            nearest = get_close_matches(self.name, SCHEDULES, n=1, cutoff=0.0)[0]
            hint = f"Nearest: {nearest}. All: {', '.join(SCHEDULES)}."
            raise ConfigError("name", self.name, "no such schedule", hint)
        for key in ("microbatches", "chunks"):
            pieces = getattr(self, key)
            if not 1 <= pieces <= MOST_PIECES:
                why = f"a batch is cut into 1 to {MOST_PIECES} pieces: each costs a start-up"
                raise ConfigError(key, pieces, why, f"Nearest valid: {min(max(pieces, 1), MOST_PIECES)}.")
        if self.all_reduce_chunk_bytes < 512:
            raise ConfigError(
                "all_reduce_chunk_bytes",
                self.all_reduce_chunk_bytes,
                "every chunk costs a start-up, so chunks under 512 bytes never pay",
                "Use 512 or more; 1048576 is a good start.",
            )
        if self.refine_after < 0:
            raise ConfigError("refine_after", self.refine_after, "is a number of steps", "Use 0 for never.")

    @property
    def system(self) -> System:
        return SCHEDULES[self.name]

    @property
    def cuts_batch(self) -> bool:
        """Whether the schedule reads `microbatches`."""
        whole = StepShape(moe_layers=(True,))
        return self.system.shape(whole, self.pieces((1,), (0,))).microbatches == self.microbatches > 1

    def pieces(self, all_reduce_bytes: tuple[int, ...], expert_all_reduce_bytes: tuple[int, ...]) -> Pieces:
        """The cut that this section asks for, given the bytes of every layer's gradients."""
        return Pieces(
            microbatches=self.microbatches,
            chunks=self.chunks,
            all_reduce_chunk_bytes=self.all_reduce_chunk_bytes,
            all_reduce_bytes=all_reduce_bytes,
            expert_all_reduce_bytes=expert_all_reduce_bytes,
        )


@dataclass(frozen=True)
class StepPlan:
    """What a step runs: the graph of its tasks and their frozen order."""

    graph: Graph
    schedule: Schedule


def plan_step(
    system: System, shape: StepShape, pieces: Pieces, cost_of: Callable[[StepShape], Cost]
) -> StepPlan:
    """Cut the iteration as `system` does, order the pieces by its rule, and check the result."""
    graph = build_graph(system.shape(shape, pieces))
    schedule = system.order(graph, cost_of(graph.shape))
    schedule.check(graph)
    return StepPlan(graph, schedule)
