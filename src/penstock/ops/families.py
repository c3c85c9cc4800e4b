"""The families of ops, named in the few words of a legend."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from penstock.ops.base import OPS, Kind
from penstock.ops.names import Op
from penstock.ops.optimizer import GATHERS, UPDATES
from penstock.ops.sums import reduced
from penstock.ops.transfers import TRANSFERS


class Family(StrEnum):
    """Ops that people think of as one group."""

    ATTENTION = "attention"
    EXPERTS = "experts"
    MODEL = "rest of the model"
    ROWS = "dispatch and combine"
    GRADIENTS = "sums of gradients"
    OPTIMIZER = "optimiser"
    EXCHANGES = "other exchanges"
    HOST = "placement"


ATTENTION: Final = (Op.ATTENTION, Op.HEADS, Op.GATE)
EXPERTS: Final = (Op.EXPERTS, Op.SHARED)
ROWS: Final = (
    *TRANSFERS,
    Op.SHARD_GATHER,
    Op.SHARD_SCATTER,
    Op.DEAL_SLOTS,
    Op.GATHER_SLOTS,
    Op.ROWS_GATHER,
    Op.ROWS_REDUCE,
)
OPTIMIZER: Final = (*UPDATES, *GATHERS, Op.NORM)


def family_of(op: str) -> Family:
    """Return the family of an op; an op that is not registered belongs to the rest of the model."""
    for family, ops in (
        (Family.ATTENTION, ATTENTION),
        (Family.EXPERTS, EXPERTS),
        (Family.ROWS, ROWS),
        (Family.OPTIMIZER, OPTIMIZER),
    ):
        if op in ops:
            return family
    if reduced(op):
        return Family.GRADIENTS
    kind = OPS[op].kind if op in OPS else Kind.COMPUTE
    return {Kind.COLLECTIVE: Family.EXCHANGES, Kind.HOST: Family.HOST}.get(kind, Family.MODEL)
