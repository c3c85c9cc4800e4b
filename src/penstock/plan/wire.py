"""Text on a plan's rows that travel rounded."""

from __future__ import annotations

from dataclasses import replace

from penstock.cost import StepCost
from penstock.decision import Decision
from penstock.plan.problem import Problem
from penstock.schedule import StepPlan
from penstock.words import mib


def row_words(problem: Problem, choice: Decision, plan: StepPlan) -> str:
    """Return text on the bytes that rows take, and would take unrounded; "" where they are not rounded."""
    if choice.comm_dtype == "none":
        return ""
    taken, plain = (_row_bytes(problem, each, plan) for each in (choice, replace(choice, comm_dtype="none")))
    return f" ({mib(taken)} of rows per rank and step instead of {mib(plain)}, rounded: plan.comm_dtype)"


def _row_bytes(problem: Problem, choice: Decision, plan: StepPlan) -> int:
    """Return the bytes that a rank hands to the transfers of rows, with even routing."""
    cost = StepCost(plan.shape, problem.workload_of(choice), problem.cluster)
    works = (cost.work(task) for task in plan.graph.tasks)
    return round(sum(work.sent_bytes for work in works if work.collective == "leg"))
