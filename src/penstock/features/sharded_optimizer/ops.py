"""Ops of an optimiser of which every rank owns a share (ZeRO, stage 1).

Gradients are summed in shares, every rank updates its own share, and parameters are gathered from all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from penstock.graph.task import Task
from penstock.ops.base import Backward, Family, Kind, OpSpec
from penstock.ops.names import Op
from penstock.ops.sums import SCATTERS
from penstock.ops.work import Work, WorkOf

NORM_BYTES = 8
UPDATE_COPIES: Final = 5.0
"""AdamW reads weight, gradient and two moments and writes all but the gradient; before that the gradient is
read for the norm, and read and written to be scaled: ten times the bytes of the share. A backward task is
priced at twice its work, hence half of ten."""


@dataclass(frozen=True)
class Owned:
    """The ops that deal with gradients of one kind.

    kind: the op that would leave the whole sum on every rank. of: the kind in a word.
    """

    kind: str
    scatter: str
    update: str
    gather: str
    of: str

    def specs(self) -> Iterator[OpSpec]:
        """Yield the facts of these ops."""
        titles = {
            self.scatter: f"sums of {self.of} gradients, a share to every rank",
            self.update: f"AdamW on this rank's share of {self.of} parameters",
            self.gather: f"{self.of} parameters, the shares of all ranks gathered",
        }
        works: dict[str, WorkOf] = {
            self.scatter: lambda task, sizes: Work(
                collective="reduce_scatter", sent_bytes=sizes.reduced_bytes(task)
            ),
            self.update: lambda task, sizes: Work(
                copied_bytes=UPDATE_COPIES * sizes.reduced_bytes(task) / sizes.owners(task)
            ),
            self.gather: lambda task, sizes: Work(
                collective="all_gather",
                sent_bytes=0 if sizes.owners(task) == 1 else sizes.reduced_bytes(task),
            ),
        }
        for name, title in titles.items():
            kind = Kind.COMPUTE if name == self.update else Kind.COLLECTIVE
            yield OpSpec(
                name=name,
                family=Family.GRADIENTS if name == self.scatter else Family.OPTIMIZER,
                title=title,
                kind=kind,
                work=works[name],
                backward=Backward.NONE,
                indices="p",
            )


OWNED: Final = (
    Owned(Op.ALL_REDUCE, Op.SCATTER, Op.UPDATE, Op.PARAMETERS, "replicated"),
    Owned(Op.PARTIAL_ALL_REDUCE, Op.PARTIAL_SCATTER, Op.PARTIAL_UPDATE, Op.PARTIAL_PARAMETERS, "partial"),
    Owned(Op.EXPERT_ALL_REDUCE, Op.EXPERT_SCATTER, Op.EXPERT_UPDATE, Op.EXPERT_PARAMETERS, "expert"),
)
KINDS: Final = {op: each.kind for each in OWNED for op in (each.kind, each.scatter, each.update, each.gather)}
"""The kind of gradients that an op deals with: the name of their all-reduce."""

UPDATES: Final = frozenset(each.update for each in OWNED)
GATHERS: Final = frozenset(each.gather for each in OWNED)


def of_optimizer(task: Task) -> str:
    """Return the part of a task in the optimiser: "norm", "update", "gather", or "" for any other task."""
    if task.op in GATHERS:
        return "gather"
    return "norm" if task.op == Op.NORM else "update" if task.op in UPDATES else ""


assert {each.scatter: each.kind for each in OWNED} == SCATTERS

OPS = (
    *(spec for each in OWNED for spec in each.specs()),
    OpSpec(
        name=Op.NORM,
        family=Family.OPTIMIZER,
        title="norm of all gradients, from the shares of all ranks",
        kind=Kind.COLLECTIVE,
        work=lambda task, sizes: Work(collective="all_reduce", sent_bytes=NORM_BYTES * sizes.members(task)),
        backward=Backward.NONE,
        indices="",
    ),
)
