"""Penstock's own schedule: all graph transformations at once, ordered by the remaining critical path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.graph import Graph, StepShape, Task
from penstock.schedule.flowmoe import FlowMoE
from penstock.schedule.freeze import Cost, freeze, slowest
from penstock.schedule.schedule import Schedule
from penstock.schedule.system import Pieces


class Penstock:
    """FlowMoE's pieces, and experts' weight gradients (W) as tasks that fill gaps of the compute lane.

    Among ready tasks the one with the longest chain of work behind it goes first. Nothing waits for a W, so
    it runs where the compute lane would wait for the network, and the last ones run under the last
    all-reduce, which no other schedule can hide.

    penstock: one column = one slot, · = idle
    forward
    layer    L0                                L1
    compute  EM0 EM1 AT0 AT1 ·  ·  X0 X1 U0 U1 AT0 AT1 ·  ·  X0 X1 U0 U1 HD0 HD1 ·
    inter    ·   ·   ·   N0  N1 D0 D1 C0 C1 ·  ·   N0  N1 D0 D1 C0 C1 ·  ·   ·   ST
    backward
    layer    L1                          L0                               L1          L0
    compute  HD1 HD0 U1 U0 X1 X0 AT1 AT0 U1    U0 X1 X0 AT1 AT0   EM1 EM0 W1    W0    W1 W0
    inter    ·   ·   ·  C1 C0 D1 D0  ·   AR1.0 C1 C0 D1 D0  AR1.1 ·   ·   AR0.0 AR0.1 ·  ·
    """

    name = "penstock"

    def shape(self, shape: StepShape, pieces: Pieces) -> StepShape:
        return replace(FlowMoE().shape(shape, pieces), split_experts=True)

    def order(self, graph: Graph, cost: Cost) -> Schedule:
        remaining_s = remaining_path(graph, cost)
        return freeze(self.name, graph, cost, lambda task: (-remaining_s[task],))


def remaining_path(graph: Graph, cost: Cost) -> Mapping[Task, float]:
    """For every task the seconds from its start to the end of the step along the longest chain behind it."""
    remaining_s: dict[Task, float] = {}
    for task in reversed(graph.tasks):
        behind_s = max((remaining_s[reader] for reader in graph.readers[task]), default=0.0)
        remaining_s[task] = slowest(cost(task)) + behind_s
    return remaining_s
