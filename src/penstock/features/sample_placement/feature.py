"""Sample placement: whole samples change ranks on the way home from experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.feature import why_experts_stay
from penstock.features.feature import Feature
from penstock.features.field import Asked, Choice, Field
from penstock.features.sample_placement.ops import OPS, PACKED_COLUMNS
from penstock.features.sample_placement.passes import MoveSamples, PackedResidualPass
from penstock.features.sample_placement.prices import ROUTED
from penstock.mesh import Group
from penstock.step.shape import StepShape
from penstock.step.stages import Pass

SampleMoves = Literal["none", "netmoe"]
Solver = Literal["network_simplex", "kuhn_munkres"]
Prediction = Literal["next_gate", "conditional", "none"]


def why_samples_stay(asked: Asked, choice: Choice) -> str:
    """Return why samples cannot move with this choice; "" = they may."""
    if DISPATCHES[choice.dispatch].joins_rows:
        return f"moe.dispatch={choice.dispatch} sends one row for several experts"
    return asked.shape.sharing.why_samples_stay or why_experts_stay(asked, choice)


def _samples(asked: Asked, choice: Choice) -> Sequence[str]:
    return ("none",) if why_samples_stay(asked, choice) else asked.movable.samples


SAMPLES = Field(
    values=_samples,
    words=lambda d: "" if d.samples == "none" else f"samples move ({d.samples})",
    head="samples",
    cell=lambda d: "-" if d.samples == "none" else d.samples,
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)


def _passes(shape: StepShape) -> Sequence[Pass]:
    if not (shape.moves_samples and any(shape.moe_layers)):
        return ()
    moves = MoveSamples(Group.EXPERT_SHARDS if shape.sharing.etp_size > 1 else Group.EXPERT)
    return (moves, PackedResidualPass()) if shape.packed_residual else (moves,)


def _why_not(shape: StepShape) -> str:
    if not (shape.moves_samples and any(shape.moe_layers)):
        return ""
    if not shape.sharing.is_none and shape.expert_form != "gather":
        return (
            f"moves_samples: with expert_form = {shape.expert_form} ranks send rows of samples that others "
            "have, too, or sums of them, and a sample's rows are not one rank's to order. Use "
            "expert_form=gather, or let samples stay"
        )
    if why := shape.sharing.why_samples_stay:
        return f"moves_samples: {why}. Use other sizes, or set placement.samples=none"
    return ""


FEATURE = Feature(
    name="sample_placement",
    title="gives samples new homes in every layer, so that fewer of their rows cross nodes",
    source="NetMoE",
    ops=OPS,
    passes=_passes,
    why_not=_why_not,
    fields={"samples": SAMPLES},
    routed=ROUTED,
    row_columns=lambda shape: PACKED_COLUMNS if shape.packed_residual else 0,
)
