"""Which parts of a layer fit together, and why others do not: one table for configurations and for code."""

from __future__ import annotations

from typing import Literal

ChoiceKind = Literal["token", "expert", "soft"]
OrderName = Literal["sort", "index", "einsum"]

REFUSED: dict[tuple[ChoiceKind, OrderName], str] = {
    (
        "expert",
        "sort",
    ): "where experts choose, every slot is filled and none is left to sort; use index or einsum",
    (
        "soft",
        "sort",
    ): "a slot of SoftMoE mixes all tokens of a sample, so no token has a row of its own; use einsum",
    ("soft", "index"): "a slot of SoftMoE mixes all tokens of a sample, so it has no index; use einsum",
}


def refusal(kind: ChoiceKind, order: OrderName, *, dropless: bool) -> str | None:
    """Return why an order cannot serve a gate of a kind; None if it can. dropless: no capacity was given."""
    if (kind, order) in REFUSED:
        return REFUSED[kind, order]
    if kind == "soft":
        return None
    if order == "sort" and not dropless:
        return "the sort order gives every choice a row, so a capacity_factor would have no effect; use index"
    if order != "sort" and dropless:
        return f"the {order} order has a fixed number of slots per expert; set a capacity_factor"
    return None


def default_order(kind: ChoiceKind, *, dropless: bool) -> OrderName:
    """Return the fastest order that a gate of this kind can have."""
    if kind == "soft":
        return "einsum"
    return "sort" if dropless and kind == "token" else "index"
