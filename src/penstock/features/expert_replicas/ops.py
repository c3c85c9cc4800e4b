"""Ops of experts that ranks hold as replicas (Pro-Prophet): parameters out, gradients home, the next plan."""

from __future__ import annotations

from penstock.features.expert_replicas.encoding import FIRST_NUMBERS, NUMBER_BYTES
from penstock.graph.task import Task
from penstock.ops.base import Backward, Kind, OpSpec
from penstock.ops.names import Op
from penstock.ops.statistics import LOAD_BYTES
from penstock.ops.work import DIGEST_BYTES, Sizes, Work

REPLICAS = "replica gradients of L{layer}"
"""State: the gradients of the experts of which a rank holds replicas for a step."""


def _replicas(task: Task, sizes: Sizes) -> Work:
    """Return the work at most: every rank has as many replicas as it has room for, and owners send as
    many."""
    assert task.piece is not None, task
    parts = task.cut.parts
    return Work(collective="all_to_all", sent_bytes=sizes.replica_bytes * parts[task.piece] / sum(parts))


def _planning(task: Task, sizes: Sizes) -> Work:
    """Return the work of reading the loads; the planner's own time is added where it is known: `Placed`."""
    del task
    return Work(copied_bytes=sum(sizes.moe_layers) * sizes.num_experts * LOAD_BYTES)


def _replications(task: Task, sizes: Sizes) -> Work:
    """Return the work of exchanging all layers' replicas and a hash; for longer splits see `prices`."""
    told_bytes = sum(sizes.moe_layers) * NUMBER_BYTES * (FIRST_NUMBERS + sizes.num_replica_slots)
    return Work(collective="all_gather", sent_bytes=told_bytes + 2 * DIGEST_BYTES * sizes.members(task))


OPS = (
    OpSpec(
        name=Op.REPLICA_PARAMETERS,
        title="parameters of experts, from owners to replicas",
        kind=Kind.COLLECTIVE,
        work=_replicas,
        backward=Backward.NONE,
        indices="p",
    ),
    OpSpec(
        name=Op.REPLICA_GRADIENTS,
        title="gradients of experts, from replicas to owners",
        kind=Kind.COLLECTIVE,
        work=_replicas,
        backward=Backward.NONE,
        indices="p",
    ),
    OpSpec(
        name=Op.PLAN_REPLICAS,
        once=True,
        title="which replicas ranks hold in the next step",
        kind=Kind.HOST,
        work=_planning,
        backward=Backward.NONE,
        indices="",
    ),
    OpSpec(
        name=Op.COMPARE_REPLICAS,
        once=True,
        title="exchange of the next replicas",
        kind=Kind.COLLECTIVE,
        work=_replications,
        backward=Backward.NONE,
        indices="",
    ),
)
