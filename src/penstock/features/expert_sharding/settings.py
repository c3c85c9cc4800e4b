"""What a plan decides about shards of experts: how rows reach them all."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.field import Asked, Choice, Field
from penstock.step.shape import ExpertForm


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
