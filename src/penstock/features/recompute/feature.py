"""Recomputation of experts or blocks before their backward."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.feature import Feature
from penstock.features.recompute.passes import Recompute
from penstock.features.recompute.settings import RECOMPUTE
from penstock.step.shape import StepShape
from penstock.step.stages import Pass


def _passes(shape: StepShape) -> Sequence[Pass]:
    return () if shape.recompute == "none" else (Recompute(experts_only=shape.recompute == "experts"),)


FEATURE = Feature(
    name="recompute",
    title="computes experts or whole blocks a second time instead of keeping what they save",
    source="Chen et al. 2016, activation checkpointing",
    passes=_passes,
    fields={"recompute": RECOMPUTE},
)
