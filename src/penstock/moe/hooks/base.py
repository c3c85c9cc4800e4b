"""Hooks: functions of the rows, called at six places of the layer. Autograd derives their backward.

    x ─[before_moe_start]─ gate, order ─[before_dispatch]─ dispatch ─[after_dispatch]─ experts
    ─[before_combine]─ combine ─[after_combine]─ un-order ─[before_moe_end]─ out

Shapes: T tokens, M hidden size, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

Moment = Literal[
    "before_moe_start",
    "before_dispatch",
    "after_dispatch",
    "before_combine",
    "after_combine",
    "before_moe_end",
]


class Hook(nn.Module):
    """A hook that does nothing at any of the six places; a subclass overrides the methods that it needs.

    A change to the width or the type of rows between `before_dispatch` and `after_dispatch` (or
    `before_combine` and `after_combine`) has to be undone there: rows meet experts and weights as [R, M].
    encodes_rows: whether this hook makes such a change.
    """

    encodes_rows: bool = False

    def before_moe_start(self, x_TM: Tensor) -> Tensor:
        """Return the tokens for the gate, at home."""
        return x_TM

    def before_dispatch(self, rows_RM: Tensor) -> Tensor:
        """Return the rows to send, in expert order."""
        return rows_RM

    def after_dispatch(self, rows_RM: Tensor) -> Tensor:
        """Return the rows that have come to this rank's experts, sorted by source rank."""
        return rows_RM

    def before_combine(self, rows_RM: Tensor) -> Tensor:
        """Return the outputs of this rank's experts that are about to leave."""
        return rows_RM

    def after_combine(self, rows_RM: Tensor) -> Tensor:
        """Return the outputs for this rank's tokens, in expert order."""
        return rows_RM

    def before_moe_end(self, out_TM: Tensor) -> Tensor:
        """Return the layer's output, back in token order."""
        return out_TM

    def scaled(self, rows: Tensor, by: float) -> Tensor:
        """Multiply gradients in transit, encoded as this hook encodes rows, by a number.

        Called by expert form `baseline` only. Raises ValueError for a hook that encodes rows and does not
        override this method.
        """
        if self.encodes_rows:
            raise ValueError(
                f"{type(self).__name__} encodes rows and does not say how encoded gradients are scaled; "
                "expert_form = baseline needs that. Override `scaled`, or set schedule.expert_form=gather"
            )
        return rows * by


class Hooks(nn.Module):
    """A layer's hooks. Those called `before_` run in order, those called `after_` in reverse: they nest."""

    def __init__(self, hooks: tuple[Hook, ...] = ()) -> None:
        super().__init__()
        self.hooks = nn.ModuleList(hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)  # type: ignore[arg-type]  # a ModuleList does not know what is in it

    @property
    def any(self) -> bool:
        """Whether the layer has hooks."""
        return len(self.hooks) > 0

    def scaled(self, rows: Tensor, by: float) -> Tensor:
        """Multiply gradients in transit by a number."""
        encoding = next((hook for hook in self if hook.encodes_rows), None)
        return rows * by if encoding is None else encoding.scaled(rows, by)

    def run(self, moment: Moment, tensor: Tensor) -> Tensor:
        """Return `tensor` after all hooks of this moment."""
        if not self.any:
            return tensor
        hooks = list(self)
        for hook in reversed(hooks) if moment.startswith("after") else hooks:
            tensor = getattr(hook, moment)(tensor)
        return tensor


def two_way(
    tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `forward(tensor)`, whose gradient is `backward` of the gradient that comes back."""
    out: Tensor = _TwoWay.apply(tensor, forward, backward)
    return out


class _TwoWay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_of = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(grads[0]), None, None
