"""How rows travel: dispatch, format, and the way in which they reach all shards of their experts."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.decision.field import READERS, Asked, Field
from penstock.decision.moving import Choice, must_move
from penstock.dispatch import DISPATCHES
from penstock.step.shape import ExpertForm


def expert_forms(asked: Asked, dispatches: Sequence[str]) -> tuple[ExpertForm, ...]:
    """Return the forms that differ in this step. All but the first send rows to all shards at once."""
    shared = any(asked.shape.moe_layers) and "flat" in dispatches and not must_move(asked)
    return asked.shape.sharing.forms if shared else ("gather",)


def _dispatches(asked: Asked, choice: Choice) -> Sequence[str]:
    if READERS[choice.schedule].expert_form not in (None, "gather"):
        return ("flat",)
    may_stay = "none" in asked.movable.samples  # a row for several experts has no single sample's home
    fitting = [name for name in asked.dispatches if may_stay or not DISPATCHES[name].joins_rows]
    return fitting or asked.dispatches


def _comm_dtypes(asked: Asked, choice: Choice) -> Sequence[str]:
    joined = DISPATCHES[choice.dispatch].joins_rows  # the numbers sent with a row would be rounded, too
    return ("none",) if joined or not any(asked.shape.moe_layers) else asked.comm_dtypes


def _expert_forms(asked: Asked, choice: Choice) -> Sequence[ExpertForm | None]:
    if asked.shape.sharing.is_none or not any(asked.shape.moe_layers):
        return (None,)
    return expert_forms(asked, (choice.dispatch,))


DISPATCH = Field(
    values=_dispatches,
    words=lambda d: f"{d.dispatch.replace('_', ' ')} dispatch",
    head="dispatch",
    cell=lambda d: d.dispatch.replace("_", " "),
)
COMPRESSION = Field(
    values=_comm_dtypes,
    words=lambda d: "" if d.comm_dtype == "none" else f"rows as {d.comm_dtype}",
    head="rows",
    cell=lambda d: "-" if d.comm_dtype == "none" else d.comm_dtype,
    may_be_left_out=True,
)
EXPERT_FORM = Field(
    values=_expert_forms,
    words=lambda d: "" if d.expert_form is None else f"expert form {d.expert_form}",
    head="form",
    cell=lambda d: d.expert_form or "-",
    always=False,
    may_be_left_out=True,
)
