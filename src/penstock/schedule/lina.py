"""Lina (USENIX ATC 2023): an all-reduce cut into chunks of a fixed size yields to all-to-alls."""

from __future__ import annotations

from dataclasses import replace

from penstock.decision import Decision, GradientBytes
from penstock.graph import Graph
from penstock.schedule.flowmoe import all_to_all_first
from penstock.schedule.moe_pipeline import MoEPipeline
from penstock.schedule.schedule import Schedule, freeze
from penstock.schedule.system import equal_pieces
from penstock.step import StepShape
from penstock.timing import Cost


class Lina(MoEPipeline):
    """Chunks of tokens inside each MoE layer; gradients in chunks of equal bytes where the network is free.

    An all-to-all that is ready goes before an all-reduce chunk, and waits for one at most. Lina decides that
    in a queue while training; here the rule runs once, on predicted durations, and its order is frozen.

    lina: one column = one slot, · = idle
    forward
    layer    L0                              L1
    compute  EM0 AT0 ·  ·  X0   X0.1 ·    U0 AT0 ·  ·  X0   X0.1 ·    U0 HD0 ·
    inter    ·   ·   N0 D0 D0.1 C0   C0.1 ·  ·   N0 D0 D0.1 C0   C0.1 ·  ·   ST
    backward
    layer    L1                           L0
    compute  HD0 U0 ·  X0   X0.1 ·    AT0 U0    ·  X0   X0.1 ·    AT0   EM0 ·     ·
    inter    ·   ·  C0 C0.1 D0   D0.1 ·   AR1.0 C0 C0.1 D0   D0.1 AR1.1 ·   AR0.0 AR0.1
    """

    name = "lina"
    reads = (*MoEPipeline.reads, "all_reduce_chunk_bytes")

    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        return replace(
            super().shape(shape, choice, gradients),
            pieces=equal_pieces(gradients, choice.all_reduce_chunk_bytes),
        )

    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        del choice
        return freeze(self.name, graph, cost, all_to_all_first)
