"""Expert sharding: ranks that share every expert, and the forms in which rows reach all of its shards."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.expert_sharding.ops import OPS, ROUTED
from penstock.features.expert_sharding.passes import (
    DealtSlots,
    FusedShards,
    GatheredShards,
    RepeatedRows,
    SimultaneousPair,
)
from penstock.features.feature import Feature
from penstock.features.field import Asked, Choice, Field
from penstock.step.shape import ExpertForm, StepShape
from penstock.step.stages import Pass


def expert_forms(asked: Asked, dispatches: Sequence[str]) -> tuple[ExpertForm, ...]:
    """Return the forms that differ in this step. All but the first send rows to all shards at once."""
    shared = any(asked.shape.moe_layers) and "flat" in dispatches and not asked.movable.must_move
    return asked.shape.sharing.forms if shared else ("gather",)


def _expert_forms(asked: Asked, choice: Choice) -> Sequence[ExpertForm | None]:
    if asked.shape.sharing.is_none or not any(asked.shape.moe_layers):
        return (None,)
    return expert_forms(asked, (choice.dispatch,))


EXPERT_FORM = Field(
    values=_expert_forms,
    words=lambda d: "" if d.expert_form is None else f"expert form {d.expert_form}",
    head="form",
    cell=lambda d: d.expert_form or "-",
    affects=("cut", "memory"),
    always=False,
    may_be_left_out=True,
)


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
    routed=ROUTED,
)
