"""Ops of an optimiser of which every rank owns a share (ZeRO, stage 1).

Gradients are summed in shares, every rank updates its own share, and parameters are gathered from all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.graph.task import Task
from penstock.ops.base import Backward, Family, Kind, OpSpec
from penstock.ops.gradients import GRADIENT_KINDS, GradientKind
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work, WorkOf

NORM_BYTES = 8
UPDATE_COPIES: Final = 5.0
"""AdamW reads weight, gradient and two moments and writes all but the gradient; before that the gradient is
read for the norm, and read and written to be scaled: ten times the bytes of the share. A backward task is
priced at twice its work, hence half of ten."""


UPDATES: Final = frozenset(kind.update for kind in GRADIENT_KINDS.values())
GATHERS: Final = frozenset(kind.gather for kind in GRADIENT_KINDS.values())


def of_optimizer(task: Task) -> str:
    """Return the part of a task in the optimiser: "norm", "update", "gather", or "" for any other task."""
    if task.op in GATHERS:
        return "gather"
    return "norm" if task.op == Op.NORM else "update" if task.op in UPDATES else ""


def _scattered(task: Task, sizes: Sizes) -> Work:
    return Work(collective="reduce_scatter", sent_bytes=sizes.reduced_bytes(task))


def _updated(task: Task, sizes: Sizes) -> Work:
    return Work(copied_bytes=UPDATE_COPIES * sizes.reduced_bytes(task) / sizes.owners(task))


def _gathered(task: Task, sizes: Sizes) -> Work:
    sent_bytes = 0 if sizes.owners(task) == 1 else sizes.reduced_bytes(task)
    return Work(collective="all_gather", sent_bytes=sent_bytes)


def _spec(name: str, family: Family, title: str, work: WorkOf) -> OpSpec:
    kind = Kind.COMPUTE if work is _updated else Kind.COLLECTIVE
    return OpSpec(
        name=name, family=family, title=title, kind=kind, work=work, backward=Backward.NONE, indices="p"
    )


def _specs(kind: GradientKind) -> Iterator[OpSpec]:
    """Yield the ops of one kind of gradients."""
    of, shares = kind.name.removesuffix("s"), "a share to every rank"
    yield _spec(kind.scatter, Family.GRADIENTS, f"sums of {of} gradients, {shares}", _scattered)
    yield _spec(kind.update, Family.OPTIMIZER, f"AdamW on this rank's share of {of} parameters", _updated)
    gathered = f"{of} parameters, the shares of all ranks gathered"
    yield _spec(kind.gather, Family.OPTIMIZER, gathered, _gathered)


OPS = (
    *(spec for kind in GRADIENT_KINDS.values() for spec in _specs(kind)),
    OpSpec(
        name=Op.NORM,
        once=True,
        family=Family.OPTIMIZER,
        title="norm of all gradients, from the shares of all ranks",
        kind=Kind.COLLECTIVE,
        work=lambda task, sizes: Work(collective="all_reduce", sent_bytes=NORM_BYTES * sizes.members(task)),
        backward=Backward.NONE,
        indices="",
    ),
)
