"""Plain expert parallelism: nothing is cut, nothing overlaps, all-reduces at the very end."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from penstock.decision import Decision, GradientBytes
from penstock.graph import Graph
from penstock.schedule.schedule import Schedule
from penstock.schedule.system import System, all_reduce_at_the_end, whole
from penstock.step import StepShape
from penstock.timing import Cost


class Sequential(System):
    """What DeepSpeed-MoE and Megatron-Core do without their overlap options (FlowMoE's "vanilla EP").

    sequential: one column = one slot, · = idle
    forward
    layer    L0                     L1
    compute  EM0 AT0 ·  ·  X0 ·  U0 AT0 ·  ·  X0 ·  U0 HD0 ·
    inter    ·   ·   N0 D0 ·  C0 ·  ·   N0 D0 ·  C0 ·  ·   ST
    backward
    layer    L1                  L0
    compute  HD0 U0 ·  X0 ·  AT0 U0 ·  X0 ·  AT0 EM0 ·     ·
    inter    ·   ·  C0 ·  D0 ·   ·  C0 ·  D0 ·   ·   AR0.0 AR1.0
    """

    name = "sequential"
    reads: ClassVar[tuple[str, ...]] = ("expert_form",)

    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        del choice
        return replace(shape, microbatches=1, chunks=1, pieces=whole(gradients))

    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        del cost, choice  # program order needs no durations
        return all_reduce_at_the_end(self.name, graph)
