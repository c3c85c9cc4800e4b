"""Expert sharding: ranks that share every expert, and the forms in which rows reach all of its shards."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.expert_sharding.ops import OPS
from penstock.features.expert_sharding.passes import (
    DealtSlots,
    FusedShards,
    GatheredShards,
    RepeatedRows,
    SimultaneousPair,
)
from penstock.features.expert_sharding.settings import EXPERT_FORM
from penstock.features.feature import Feature
from penstock.step.shape import StepShape
from penstock.step.stages import Pass


def _passes(shape: StepShape) -> Sequence[Pass]:
    sharing, form = shape.sharing, shape.expert_form
    if not any(shape.moe_layers) or sharing.is_none:
        return ()
    if form == "baseline":
        return (RepeatedRows(sharing.etp_size),)
    found: list[Pass] = []
    if form == "s2" and sharing.tp_size > 1:
        found.append(DealtSlots(sharing.tp_size))
        if shape.pair_slices > 1:
            found.append(SimultaneousPair(shape.pair_slices))
    if sharing.etp_size > 1:
        shards = GatheredShards if form == "gather" else FusedShards
        found.append(shards(sharing.etp_size))
    return found


FEATURE = Feature(
    name="expert_sharding",
    title="cuts the hidden width of every expert over the ranks of a group",
    source="Parm, sections 3 and 4 (N_ESP; schedules S1 and S2); FSMoE; DeepSpeed-MoE",
    ops=OPS,
    passes=_passes,
    fields={"expert_form": EXPERT_FORM},
)
