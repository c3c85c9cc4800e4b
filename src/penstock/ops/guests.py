"""Ops that bring experts to ranks that host them as guests, and their gradients home (Pro-Prophet)."""

from __future__ import annotations

from penstock.graph.task import Task
from penstock.ops.base import Backward, Kind, OpSpec, register
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work

GUESTS = "guest gradients of L{layer}"
"""State: the gradients of the experts that a rank hosts for a step."""


def _guests(task: Task, sizes: Sizes) -> Work:
    """One guest for every rank, sent by as many owners."""
    assert task.piece is not None, task
    parts = task.cut.parts
    return Work(collective="all_to_all", sent_bytes=sizes.expert_bytes * parts[task.piece] / sum(parts))


register(
    OpSpec(
        name=Op.GUEST_PARAMETERS,
        title="parameters of experts, from owners to their hosts",
        kind=Kind.COLLECTIVE,
        work=_guests,
        backward=Backward.NONE,
        indices="p",
    ),
    OpSpec(
        name=Op.GUEST_GRADIENTS,
        title="gradients of experts, from their hosts to owners",
        kind=Kind.COLLECTIVE,
        work=_guests,
        backward=Backward.NONE,
        indices="p",
    ),
)
