"""Compiled plans whose handlers do what a test says, and spans made by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from penstock.features.build import build_graph
from penstock.graph import Graph, Lane, Name, Phase, Task
from penstock.mesh import Axes
from penstock.ops import OPS, Op
from penstock.runtime.executor import Call, Program, Span, compile_plan
from penstock.runtime.handlers import Handler, Handlers, Inputs, Outputs
from penstock.schedule import Schedule, StepPlan
from penstock.step import StepShape


def nothing(context: Any, task: Task, inputs: Inputs) -> Outputs:
    """A handler that leaves nothing."""
    del context, task, inputs
    return {}


def all_by(handler: Handler) -> Handlers:
    """One handler for every op and phase."""
    return {(op, phase): handler for op in OPS for phase in Phase}


def plan_in(shape: StepShape, order: Callable[[Graph], Mapping[Lane, tuple[Task, ...]]]) -> StepPlan:
    """A plan of a shape with any order."""
    graph = build_graph(shape)
    return StepPlan(graph, Schedule("random", order(graph)), shape)


def stops_of(plan: StepPlan) -> list[Name]:
    """Where a real step stops: once, after the statistics."""
    return [task.name for task in plan.graph.tasks if task.op == Op.STATISTICS]


def program_of(
    plan: StepPlan,
    handler: Handler = nothing,
    *,
    silent: Collection[Axes] = (),
    training: bool = True,
) -> Program:
    """A plan compiled as a stack compiles it, with one handler for all tasks."""
    return compile_plan(plan, all_by(handler), stops_of(plan), silent, all=training)


def span_of(
    orders: Mapping[Lane, Sequence[Task]], needs: Mapping[Task, Sequence[Task]] | None = None
) -> Span:
    """Calls that hand on nothing and wait for what `needs` says, by name or not at all."""
    place = {task: (lane, i) for lane, order in orders.items() for i, task in enumerate(order)}

    def waits(task: Task, lane: Lane) -> tuple[tuple[Lane, int], ...]:
        found = [place[need] for need in (needs or {}).get(task, ())]
        return tuple((other, i + 1) for other, i in found if other is not lane)

    return {
        lane: tuple(Call(task, nothing, (), (), (), (), waits(task, lane)) for task in order)
        for lane, order in orders.items()
    }
