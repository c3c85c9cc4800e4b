"""What a plan decides about recomputation: what runs a second time before its backward."""

from __future__ import annotations

from penstock.features.field import Field

RECOMPUTE = Field(
    values=lambda asked, choice: asked.recompute,
    words=lambda d: "" if d.recompute == "none" else f"{d.recompute} recomputed",
    head="recompute",
    cell=lambda d: "-" if d.recompute == "none" else d.recompute,
    affects=("cut", "memory"),
    may_be_left_out=True,
)
