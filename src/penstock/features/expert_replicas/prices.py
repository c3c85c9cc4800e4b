"""Prices of replicas: what a planner of them is told, what they move, and how long planning takes. No torch.

Shapes: Y MoE layers, P ranks of an expert group, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from penstock.apportion import Counts
from penstock.config import ConfigError
from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.encoding import told_bytes
from penstock.features.expert_replicas.planners import PLANNERS, pays, planning_s
from penstock.features.expert_replicas.problem import ExpertCosts, ExpertProblem, copies_of
from penstock.features.field import Choice
from penstock.features.routed import (
    Batch,
    Move,
    Rates,
    Routed,
    RoutedStep,
    exchanged,
    gathered,
    links_of,
)
from penstock.graph import RefusalError
from penstock.graph.task import Phase, Task
from penstock.mesh import Group
from penstock.ops import Op
from penstock.ops.work import DIGEST_BYTES, FLOAT32_BYTES
from penstock.placement import ExpertPlacement, Replication
from penstock.routing.sizes import Floats, part_sizes

LATE: Final = "not in the time there is; --budget 10 gives more"
"""Why moves are not weighed on a busy machine, or with very many ranks."""


LOCAL = ("pro_prophet", "shadowing")
"""Planners whose replicas compute only rows of their own ranks."""


def expert_costs(work: Batch, cluster: Rates) -> ExpertCosts:
    """Return the costs of a step for a planner of replicas; slack as in Eq 8.

    A rank computes its shard of experts and of attention. Loads are those of all ranks that share an expert,
    each of which sends its own part of the rows over links of its own, and its shard of a copy; where they
    share a node's card, copies of all shards pass it. Where replicas were seen to travel longer than their
    bytes by the links, these are more bytes.
    """
    links = links_of(work, cluster, work.mesh.groups(Group.EXPERT)[0])
    if not links.card_per_rank:
        links = replace(links, across_s_per_byte=links.across_s_per_byte * work.etp_size)
    tokens = work.tokens(0, 1)
    forward = partial(cluster.compute_s, phase=Phase.FORWARD, moved_bytes=0.0)
    rows_s = [forward(Op.EXPERTS, flops=work.expert_flops(n) / work.etp_size) for n in (0, tokens)]
    return ExpertCosts(
        links=links,
        row_s=(rows_s[1] - rows_s[0]) / tokens,
        row_bytes=work.wire_bytes(1) / work.etp_size,
        parameter_bytes=work.expert_bytes * cluster.prolonged(Op.REPLICA_PARAMETERS),
        gradient_bytes=work.expert_bytes * cluster.prolonged(Op.REPLICA_GRADIENTS),
        other_s=forward(Op.ATTENTION, flops=work.attention_flops(tokens) / work.tp_size),
    )


def why_not_exact(choice: Choice) -> str:
    """Return why rows of shared experts cannot be split by their own step's loads; "" = they can."""
    if choice.experts in LOCAL:
        return f"placement.experts={choice.experts} gives replicas the rows of their own ranks"
    if choice.samples != "none":
        return f"placement.samples={choice.samples} places samples by where their rows go"
    if choice.form not in ("gather", "s1"):
        return f"expert form {choice.form} gathers rows of several ranks before they leave"
    if DISPATCHES[choice.dispatch].joins_rows:
        return f"moe.dispatch={choice.dispatch} sends one row for several experts"
    return ""


def splits_exactly(choice: Choice, work: Batch) -> bool:
    """Return whether rows are split among the homes of their expert by the loads of their own step.

    Raises:
        ConfigError: Where that was asked for and is impossible.
    """
    joined = "moe.one_copy_per_rank=true sends one row for several experts" if work.one_copy_per_rank else ""
    why = why_not_exact(choice) or joined
    if why and choice.num_replica_slots and choice.split == "exact":
        hint = "Leave it out, or set placement.split=last_step."
        raise ConfigError(
            "placement.split", choice.split, f"{why}, so loads of a step come too late for it", hint
        )
    return choice.split != "last_step" and not why


def planned_replications(
    loads_YPE: Counts,
    planner: str,
    replica_slots: int,
    placement: ExpertPlacement,
    costs: Sequence[ExpertCosts],
    exact: bool = True,
    ends: Callable[[], bool] = lambda: False,
) -> tuple[Replication, ...]:
    """Return the replication of every layer by a planner's name, from the loads of the step before.

    A layer has no replicas where replication would not have paid.

    Args:
        loads_YPE: The rows of every layer, by rank and expert.
        replica_slots: The free slots of every rank.
        planner: The name of the planner.
        costs: The costs of every layer.
        exact: See `ExpertProblem`.
        ends: Tells, before every layer, whether the time is over.

    Raises:
        RefusalError: If the time is over.
    """
    plan, replications = PLANNERS[planner], list[Replication]()
    common = partial(ExpertProblem, placement=placement, replica_slots=replica_slots, exact=exact)
    for loads_PE, cost in zip(loads_YPE, costs, strict=True):
        if ends():
            raise RefusalError(LATE)
        problem = common(loads=loads_PE, costs=cost)
        replication = plan(problem)
        replications.append(
            replication if pays(problem, replication) else Replication.none(placement, replica_slots)
        )
    return tuple(replications)


def planning_share(work: Batch, layers: int) -> float:
    """Return the part of planning all layers' replicas on the busiest rank: each rank plans some layers."""
    return -(-layers // work.mesh.size(work.mesh.all_experts)) / max(1, layers)


def replica_planning_s(work: Batch, planner: str, layers: int) -> float:
    """Return the seconds in which the busiest rank plans its share of the layers, on a thread of the host.

    Args:
        planner: The name of the planner.
        layers: The number of MoE layers.
    """
    return planning_share(work, layers) * layers * planning_s(planner, work.ep_size, work.num_experts)


# ---- what is moved -----------------------------------------------------------------------------------------


def _told_bytes(step: RoutedStep, task: Task) -> int:
    """Return bytes that all ranks exchange about replicas, as if the next step had those of this one."""
    members, replications = step.sizes.mesh.size(task.axes), step.placed.replications
    layer_bytes = [told_bytes(each) for each in replications]
    return 2 * DIGEST_BYTES * members + sum(
        layer_bytes[column] for column in step.columns or range(len(layer_bytes))
    )


def _compared(step: RoutedStep, task: Task, rank: int) -> Move:
    """Return the move of every rank's share of the planned replications."""
    del rank
    share_bytes = round(_told_bytes(step, task) / step.sizes.mesh.size(task.axes))
    return gathered(step, task, 1, share_bytes)


def _compared_load(step: RoutedStep, task: Task) -> Floats:
    return np.full(step.sizes.mesh.world_size, _told_bytes(step, task) / step.work(task).sent_bytes)


def _replicas(step: RoutedStep, task: Task, rank: int) -> Move:
    """Return the move of a piece of every replica's parameters to its rank, or of gradients to its owner."""
    assert task.piece is not None, task
    elements = round(step.sizes.expert_bytes) // FLOAT32_BYTES
    piece_bytes = part_sizes(elements, task.cut.parts)[task.piece] * FLOAT32_BYTES
    sent = copies_of(step.placed.replications[step.column(task)])
    return exchanged(step, task, rank, sent if task.forward else sent.T, piece_bytes)


def _replicas_load(step: RoutedStep, task: Task) -> Floats:
    """Return the load of replicas: the task's work fills every slot."""
    mesh = step.sizes.mesh
    sent = np.zeros((mesh.world_size, mesh.world_size))
    if step.placed.replications:
        here = copies_of(step.placed.replications[step.column(task)])
        for ranks in mesh.groups(Group.EXPERT):
            sent[np.ix_(ranks, ranks)] = here if task.forward else here.T
    return step.argument(sent) / step.shape.replica_slots


def _planned_s(step: RoutedStep, task: Task, seconds: float) -> float:
    """Return the seconds in which a rank plans its share of the next step's replicas."""
    del task
    return max(step.placed.planning_s, seconds)


ROUTED = {
    **dict.fromkeys(
        (Op.REPLICA_PARAMETERS, Op.REPLICA_GRADIENTS), Routed(move=_replicas, load=_replicas_load)
    ),
    Op.PLAN_REPLICAS: Routed(seconds=_planned_s),
    Op.COMPARE_REPLICAS: Routed(move=_compared, load=_compared_load),
}
