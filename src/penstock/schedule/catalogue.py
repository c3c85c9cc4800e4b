"""The available schedules, one line each, and the way from a decision to what a step runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from penstock.config import ConfigError
from penstock.decision import Decision, GradientBytes
from penstock.features.build import build_graph
from penstock.features.expert_replicas.prices import why_not_exact
from penstock.graph import Graph, Phase, RefusalError
from penstock.ops.core import FLAT
from penstock.schedule.baseline_esp import BaselineESP
from penstock.schedule.dense_overlap import DenseOverlap
from penstock.schedule.flowmoe import FlowMoE
from penstock.schedule.fsmoe import FSMoE
from penstock.schedule.lina import Lina
from penstock.schedule.moe_pipeline import MoEPipeline
from penstock.schedule.parm_s1 import ParmS1
from penstock.schedule.parm_s2 import ParmS2
from penstock.schedule.penstock import Penstock
from penstock.schedule.schedule import Schedule
from penstock.schedule.sequential import Sequential
from penstock.schedule.system import SCHEDULES, register_schedule
from penstock.step import StepShape
from penstock.timing import Cost

MOST_REPLICA_PIECES = 64
"""The most pieces of a layer's replicas in either direction: every piece is a task with a start-up."""

register_schedule(Sequential())
register_schedule(MoEPipeline())
register_schedule(DenseOverlap())
register_schedule(Lina())
register_schedule(FlowMoE())
register_schedule(FSMoE())
register_schedule(BaselineESP())
register_schedule(ParmS1())
register_schedule(ParmS2())
register_schedule(Penstock())
SHIPPED = frozenset(SCHEDULES)
"""Names of these schedules, which cut every step that they are offered for."""


@dataclass(frozen=True)
class StepPlan:
    """The graph of a step's tasks, their frozen order, and the shape into which the step is cut."""

    graph: Graph
    schedule: Schedule
    shape: StepShape

    @cached_property
    def digest(self) -> str:
        """A hash of the order and of every task's facts: two ranks with the same digest run the same step."""
        return hashlib.sha256(f"{self.schedule.text()}{self.graph.facts()}".encode()).hexdigest()

    @cached_property
    def separate_weights(self) -> bool:
        """Whether weight gradients of experts are tasks of their own."""
        return any(task.phase is Phase.WEIGHT for task in self.graph.tasks)


def cut(choice: Decision, shape: StepShape, gradients: GradientBytes) -> StepShape:
    """Return the shape of a step by a decision: cut by its schedule, with the passes of registered decisions.

    Raises:
        ConfigError: For a form of experts' shards that is impossible with the dispatch.
        RefusalError: For a split of rows that cannot be exact.
    """
    if shape.dispatch != FLAT and not shape.sharing.is_none and choice.form != "gather":
        decided = choice.reads("expert_form")
        key, value = ("expert_form", choice.form) if decided else ("schedule", choice.schedule)
        other = "expert_form=gather" if decided else "another schedule"
        raise ConfigError(
            key,
            value,
            f"sends rows to all shards of their experts at once, and the {choice.dispatch} dispatch has legs",
            f"Set moe.dispatch=flat, or use {other}.",
        )
    if choice.num_replica_slots and choice.split == "exact" and (why := why_not_exact(choice)):
        raise RefusalError(
            f"placement.split = exact: {why}, so rows cannot be split by the loads of their own step. Leave "
            "it out, or set placement.split=last_step"
        )
    pieces = 1  # of a layer's replicas: as large as those of gradients where these are cut
    if choice.reads("all_reduce_chunk_bytes"):
        wanted = -(-choice.num_replica_slots * gradients.expert // choice.all_reduce_chunk_bytes)
        pieces = max(1, min(wanted, MOST_REPLICA_PIECES))
    moves = choice.samples != "none"
    facts: dict[str, Any] = {
        "expert_form": choice.form,
        "moves_samples": moves,
        "carries_residual": shape.carries_residual and moves and choice.comm_dtype == "none",
        "replica_slots": choice.num_replica_slots,
        "recompute": choice.recompute,
        "replica_pieces": max(shape.replica_pieces, pieces),
        # The next step's replicas need them.
        "gathers_loads": shape.gathers_loads or choice.num_replica_slots > 0,
    }
    if any(getattr(shape, name) != fact for name, fact in facts.items()):  # searches mostly change none
        shape = replace(shape, **facts)
    cut_shape = SCHEDULES[choice.schedule].shape(shape, choice, gradients.of_form(choice.form))
    passes = choice.passes
    return replace(cut_shape, more=(*cut_shape.more, *passes)) if passes else cut_shape


def plan_step(
    choice: Decision, shape: StepShape, gradients: GradientBytes, cost_of: Callable[[StepShape], Cost]
) -> StepPlan:
    """Cut the iteration as `choice` says, order the pieces by its rule, and check the result.

    Args:
        cost_of: Returns the cost of tasks in a step of this shape.
    """
    cut_shape = cut(choice, shape, gradients)
    graph = build_graph(cut_shape)
    schedule = SCHEDULES[choice.schedule].order(graph, cost_of(cut_shape), choice)
    schedule.check(graph)
    return StepPlan(graph, schedule, cut_shape)
