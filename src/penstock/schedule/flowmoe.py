"""FlowMoE (NeurIPS 2025): microbatches through the whole block, all-reduce chunks in the gaps."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from penstock.decision import Decision, GradientBytes
from penstock.graph import Graph, Task
from penstock.schedule.schedule import Schedule, freeze
from penstock.schedule.system import System, equal_pieces, lateness
from penstock.step import StepShape
from penstock.timing import Cost


class FlowMoE(System):
    """Attention, router, experts and all-to-all of R microbatches form one pipeline (FlowMoE, equations 2 to
    5).

    The gradients of a block are cut into chunks of S_p bytes that fill the holes between all-to-alls of
    the blocks below it: an all-to-all that is ready goes before an all-reduce chunk (Algorithm B). The
    published queue decides that while training, separately on every rank, and ranks that decide
    differently deadlock; here the rule runs once, on predicted durations, and its order is frozen.

    flowmoe: one column = one slot, · = idle
    forward
    layer    L0                                L1
    compute  EM0 EM1 AT0 AT1 ·  X0 ·  X1 U0 U1 AT0 AT1 ·  X0 ·  X1 U0 U1 HD0 HD1 ·
    inter    ·   ·   ·   N0  D0 N1 D1 C0 C1 ·  ·   N0  D0 N1 D1 C0 C1 ·  ·   ·   ST
    backward
    layer    L1                          L0
    compute  HD1 HD0 U1 U0 X1 X0 AT1 AT0 U1    U0 X1 X0 AT1 AT0   EM1 EM0 ·     ·
    inter    ·   ·   ·  C1 C0 D1 D0  ·   AR1.0 C1 C0 D1 D0  AR1.1 ·   ·   AR0.0 AR0.1
    """

    name = "flowmoe"
    reads: ClassVar[tuple[str, ...]] = ("microbatches", "all_reduce_chunk_bytes", "expert_form")

    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        return replace(
            shape,
            microbatches=choice.microbatches,
            chunks=1,
            pieces=equal_pieces(gradients, choice.all_reduce_chunk_bytes),
        )

    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        del choice
        return freeze(self.name, graph, cost, all_to_all_first)


def all_to_all_first(task: Task) -> tuple[float, ...]:
    """Return a task's priority on its lane: program order, then all-reduce chunks, then updates."""
    return (lateness(task),)
