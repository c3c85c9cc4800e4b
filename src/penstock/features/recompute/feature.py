"""Recomputation of experts or blocks before their backward."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.feature import Feature
from penstock.features.field import Field
from penstock.features.recompute.passes import Recompute
from penstock.step.shape import StepShape
from penstock.step.stages import Pass

RECOMPUTE = Field(
    values=lambda asked, choice: asked.recompute,
    words=lambda d: "" if d.recompute == "none" else f"{d.recompute} recomputed",
    head="recompute",
    cell=lambda d: "-" if d.recompute == "none" else d.recompute,
    affects=("cut", "memory"),
    may_be_left_out=True,
)


def _passes(shape: StepShape) -> Sequence[Pass]:
    return () if shape.recompute == "none" else (Recompute(experts_only=shape.recompute == "experts"),)


FEATURE = Feature(
    name="recompute",
    title="computes experts or whole blocks a second time instead of keeping what they save",
    source="Chen et al. 2016, activation checkpointing",
    passes=_passes,
    fields={"recompute": RECOMPUTE},
)
