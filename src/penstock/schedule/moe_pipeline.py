"""MoE-only pipelining, as Tutel and PipeMoE do it: chunks of tokens inside each MoE layer."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from penstock.decision import Decision, GradientBytes
from penstock.graph import Graph
from penstock.schedule.schedule import Schedule
from penstock.schedule.system import System, all_reduce_at_the_end, whole
from penstock.step import StepShape
from penstock.timing import Cost


class MoEPipeline(System):
    """The tokens of an MoE layer are cut into chunks; while one chunk is in transit another is computed.

    Attention hides nothing and is hidden by nothing, and the all-reduces wait until the end.

    moe_pipeline: one column = one slot, · = idle
    forward
    layer    L0                              L1
    compute  EM0 AT0 ·  ·  X0   X0.1 ·    U0 AT0 ·  ·  X0   X0.1 ·    U0 HD0 ·
    inter    ·   ·   N0 D0 D0.1 C0   C0.1 ·  ·   N0 D0 D0.1 C0   C0.1 ·  ·   ST
    backward
    layer    L1                           L0
    compute  HD0 U0 ·  X0   X0.1 ·    AT0 U0 ·  X0   X0.1 ·    AT0 EM0 ·     ·
    inter    ·   ·  C0 C0.1 D0   D0.1 ·   ·  C0 C0.1 D0   D0.1 ·   ·   AR0.0 AR1.0
    """

    name = "moe_pipeline"
    reads: ClassVar[tuple[str, ...]] = ("chunks", "backward_chunks", "expert_form")
    usual_chunks = 2

    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        return replace(
            shape,
            microbatches=1,
            chunks=choice.chunks or self.usual_chunks,
            degree_backward=choice.backward_chunks or 0,
            pieces=whole(gradients),
        )

    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        del cost, choice  # program order already runs a chunk's experts under the next chunk's dispatch
        return all_reduce_at_the_end(self.name, graph)
