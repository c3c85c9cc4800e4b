"""The place of an op in a step, for readers of the step's parts."""

from __future__ import annotations

from typing import Final, Literal

from penstock.ops.names import Op

Place = Literal["input", "block", "after", "beside", "output"]
"""input, output: below the first layer, above the last layer. after, beside: in a layer, after its experts,
or while other tasks wait for its experts. block: everything else."""

INPUT: Final = (Op.EMBED, Op.EMBED_SCATTER, Op.EMBED_REDUCE)
OUTPUT: Final = (Op.HEAD, Op.HEAD_GATHER, Op.HEAD_COPY, Op.LOGITS, Op.PEAKS, Op.LOSS)
ONCE: Final = (Op.STATISTICS, Op.LOADS, Op.PLAN_REPLICAS, Op.COMPARE_REPLICAS, Op.NORM)
"""Ops of which a step has one task, however many its layers."""

AFTER: Final = (Op.UNORDER, Op.KEEP_OUTPUT, Op.GATHER_OUTPUT)

_PLACES: Final[dict[str, Place]] = {
    **dict.fromkeys(INPUT, "input"),
    **dict.fromkeys(OUTPUT, "output"),
    **dict.fromkeys(AFTER, "after"),
    Op.SHARED: "beside",
}


def place_of(op: str) -> Place:
    """Return where tasks of an op stand in a step."""
    return _PLACES.get(op, "block")
