"""Re-orders a schedule by measured task durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.cost import MeasuredCost
from penstock.decision import Decision
from penstock.graph import Task
from penstock.runtime import PipelinedStack
from penstock.schedule import SCHEDULES
from penstock.trace import TaskRecord


def refine(
    stack: PipelinedStack, choice: Decision, records: Sequence[TaskRecord], fallback: Callable[[Task], float]
) -> MeasuredCost:
    """Order the same graph by the same rule with measured costs, and return these costs.

    Results do not change, only waiting does. records: of this rank; all ranks exchange theirs, so that all
    use the same order.
    """
    everyone = stack.machinery.control.gather(list(records), "exchanging measured durations")
    cost = MeasuredCost.from_records([r for records in everyone for r in records], fallback)
    graph = stack.plan.graph
    stack.adopt(replace(stack.plan, schedule=SCHEDULES[choice.schedule].order(graph, cost, choice)))
    return cost
