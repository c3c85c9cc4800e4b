"""What a plan decides about the way of rows: the dispatch, and the format in which they travel."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.dispatch import DISPATCHES
from penstock.features.field import READERS, Asked, Choice, Field


def _dispatches(asked: Asked, choice: Choice) -> Sequence[str]:
    if READERS[choice.schedule].expert_form not in (None, "gather"):
        return ("flat",)
    may_stay = "none" in asked.movable.samples  # a row for several experts has no single sample's home
    fitting = [name for name in asked.dispatches if may_stay or not DISPATCHES[name].joins_rows]
    return fitting or asked.dispatches


def _comm_dtypes(asked: Asked, choice: Choice) -> Sequence[str]:
    joined = DISPATCHES[choice.dispatch].joins_rows  # the numbers sent with a row would be rounded, too
    return ("none",) if joined or not any(asked.shape.moe_layers) else asked.comm_dtypes


DISPATCH = Field(
    values=_dispatches,
    words=lambda d: f"{d.dispatch.replace('_', ' ')} dispatch",
    head="dispatch",
    cell=lambda d: d.dispatch.replace("_", " "),
    affects=("cut", "cost", "memory"),
)
COMPRESSION = Field(
    values=_comm_dtypes,
    words=lambda d: "" if d.comm_dtype == "none" else f"rows as {d.comm_dtype}",
    head="rows",
    cell=lambda d: "-" if d.comm_dtype == "none" else d.comm_dtype,
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)
