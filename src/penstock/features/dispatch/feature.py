"""The way of rows to the ranks of their experts, as legs on lanes."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.dispatch.passes import Hierarchical
from penstock.features.dispatch.settings import COMPRESSION, DISPATCH
from penstock.features.feature import Feature
from penstock.ops.transfers import FLAT
from penstock.step.shape import StepShape
from penstock.step.stages import Pass


def _passes(shape: StepShape) -> Sequence[Pass]:
    hierarchical = shape.dispatch != FLAT and any(shape.moe_layers)
    return (Hierarchical(shape.dispatch),) if hierarchical else ()


FEATURE = Feature(
    name="dispatch",
    title="brings rows to their experts in legs inside and between nodes, at the same time",
    source="FSMoE, section 4; DeepSpeed-MoE and HetuMoE for the two hierarchical ways",
    passes=_passes,
    fields={"dispatch": DISPATCH, "comm_dtype": COMPRESSION},
)
