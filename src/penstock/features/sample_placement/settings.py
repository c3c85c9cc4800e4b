"""What a plan decides about samples that move: whether they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.settings import why_experts_stay
from penstock.features.field import Asked, Choice, Field

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
