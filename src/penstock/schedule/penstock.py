"""Penstock's own schedule: all graph transformations at once, in an order that is searched for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.decision import Decision, GradientBytes
from penstock.graph import Graph, Task
from penstock.schedule.flowmoe import FlowMoE, all_to_all_first
from penstock.schedule.schedule import Schedule, freeze
from penstock.schedule.search import search
from penstock.schedule.system import lateness
from penstock.step import StepShape
from penstock.timing import Cost, slowest, tail

LEAST_TRIALS, MOST_TRIALS, MOST_PLACEMENTS = 120, 7500, 1_500_000
APART = (0, 1, 2, 4, 8)


class Penstock(FlowMoE):
    """FlowMoE's pieces, and experts' weight gradients (W) as tasks that fill gaps of the compute lane.

    `priority` selects the rule of the order; `search` begins with the other rules and improves on the best.
    By the first of these, the task with the longest chain of work after it goes first. Nothing waits for a W,
    so it runs where the compute lane would wait for the network, and the last ones run under the last
    all-reduce, which no other schedule can hide.

    penstock: one column = one slot, · = idle
    forward
    layer    L0                          L1  L0 L1
    compute  EM1 AT1 EM0 AT0 X1 ·  X0 U1 AT1 U0 AT0 X1 ·  X0 U1 HD1 U0 HD0 ·
    inter    ·   ·   N1  D1  N0 D0 C1 C0 ·   N1 D1  N0 D0 C1 C0 ·   ·  ·   ST
    backward
    layer    L1                      L0 L1 L0 L1  L0                            L1    L0
    compute  HD1 U1 HD0 X1 W1 AT1 U0 U1 X0 X1 AT0 U0    AT1   EM1 X0 W0 AT0 EM0 W0    W1
    inter    ·   ·  C1  ·  D1 ·   ·  C0 C1 D0 D1  AR1.0 AR1.1 C0  ·  D0 ·   ·   AR0.0 AR0.1
    """

    name = "penstock"
    reads = (*FlowMoE.reads, "chunks", "backward_chunks", "priority")

    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        return replace(
            super().shape(shape, choice, gradients),
            chunks=choice.chunks or self.usual_chunks,
            degree_backward=choice.backward_chunks or 0,
            split_experts=True,
        )

    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        return self.quick_order(graph, cost, choice, 1)

    def quick_order(self, graph: Graph, cost: Cost, choice: Decision, part: int) -> Schedule:
        if choice.priority == "critical_path":
            remaining_s = remaining_path(graph, cost)
            return freeze(self.name, graph, cost, lambda task: (-remaining_s[task],))
        if choice.priority == "all_to_all_first":
            return freeze(self.name, graph, cost, all_to_all_first)
        return search(self.name, graph, cost, _starts(graph, cost), trials(len(graph.tasks)) // part)


def trials(tasks: int) -> int:
    """Return how many changes a search simulates for an order of this number of tasks."""
    return max(LEAST_TRIALS, min(MOST_TRIALS, MOST_PLACEMENTS // tasks))


def _starts(graph: Graph, cost: Cost) -> list[dict[Task, float]]:
    """Return the first priorities: longest remaining path, also with staggered microbatches; FlowMoE's."""
    remaining_s = remaining_path(graph, cost)
    usual_s = max(remaining_s.values()) / len(graph.tasks)
    whole_s = max(remaining_s.values())
    staggered = [
        {task: apart * usual_s * (task.microbatch or 0) - remaining_s[task] for task in graph.tasks}
        for apart in APART
    ]
    published = {
        task: whole_s * lateness(task) + 1e-6 * whole_s * graph.position[task] for task in graph.tasks
    }
    return [*staggered, published]


def remaining_path(graph: Graph, cost: Cost) -> Mapping[Task, float]:
    """Return, by task, the seconds from its start to the end of the step along the longest chain after it."""
    seconds = [slowest(cost(task)) for task in graph.tasks]
    tails_s = tail(graph.readers_at, seconds)
    return {task: own + after for task, own, after in zip(graph.tasks, seconds, tails_s, strict=True)}
