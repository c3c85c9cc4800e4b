"""Moving rows between token order and expert order: two gathers that are each other's transpose.

Shapes: T tokens, k choices, M hidden size, R rows in expert order (all chunks one after the other).
Every backward is a gather too: no scatter with atomics, so the same input gives the same bits on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowPlan:
    """Which token stands in which row.

    token_of_row_R: token of each row, -1 for padding. choice_of_row_R: index into [T * k], -1 for padding.
    row_of_choice_Tk: row of each (token, choice), -1 if it was dropped.
    padded: whether any -1 can occur (dropless plans need no masks).
    """

    token_of_row_R: Tensor
    choice_of_row_R: Tensor
    row_of_choice_Tk: Tensor
    padded: bool


def take_rows(source: Tensor, index: Tensor, padded: bool) -> Tensor:
    """source[index] along dimension 0; zeros where index is -1."""
    if not padded:
        return source.index_select(0, index)
    if source.shape[0] == 0:
        return source.new_zeros(index.shape[0], *source.shape[1:])
    taken = source.index_select(0, index.clamp(min=0))
    dead = (index < 0).view(-1, *[1] * (source.dim() - 1))
    return taken.masked_fill_(dead, 0)


class _ToRows(torch.autograd.Function):
    """x_TM -> rows_RM; its transpose adds the k rows of each token."""

    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, plan: RowPlan) -> Tensor:
        ctx.plan = plan
        return take_rows(x_TM, plan.token_of_row_R, plan.padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_RM,) = grads
        plan: RowPlan = ctx.plan
        tokens, choices = plan.row_of_choice_Tk.shape
        taken = take_rows(grad_RM, plan.row_of_choice_Tk.reshape(-1), plan.padded)
        return taken.unflatten(0, (tokens, choices)).sum(dim=1), None


class _FromRows(torch.autograd.Function):
    """rows_RM, weights_Tk -> weighted sums out_TM; its transpose spreads the gradient over the rows."""

    @staticmethod
    def forward(ctx: Any, rows_RM: Tensor, weights_Tk: Tensor, plan: RowPlan) -> Tensor:
        tokens, choices = plan.row_of_choice_Tk.shape
        taken_TkM = take_rows(rows_RM, plan.row_of_choice_Tk.reshape(-1), plan.padded)
        taken_TkM = taken_TkM.unflatten(0, (tokens, choices))
        ctx.plan = plan
        ctx.save_for_backward(taken_TkM, weights_Tk)
        return torch.bmm(weights_Tk.to(rows_RM.dtype).unsqueeze(1), taken_TkM).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_TM,) = grads
        taken_TkM, weights_Tk = ctx.saved_tensors
        plan: RowPlan = ctx.plan
        grad_weights = torch.bmm(taken_TkM, grad_TM.unsqueeze(2)).squeeze(2).to(weights_Tk.dtype)
        weight_R = take_rows(weights_Tk.reshape(-1), plan.choice_of_row_R, plan.padded)
        grad_rows = take_rows(grad_TM, plan.token_of_row_R, plan.padded)
        return grad_rows * weight_R.to(grad_rows.dtype).unsqueeze(1), grad_weights, None


def to_rows(x_TM: Tensor, plan: RowPlan) -> Tensor:
    """Order: every token once per choice, in expert order. Returns [R, M]."""
    return _ToRows.apply(x_TM, plan)  # type: ignore[no-any-return]  # apply is untyped in torch


def from_rows(rows_RM: Tensor, weights_Tk: Tensor, plan: RowPlan) -> Tensor:
    """Un-order: the weighted sum of each token's rows; dropped choices add nothing. Returns [T, M]."""
    return _FromRows.apply(rows_RM, weights_Tk, plan)  # type: ignore[no-any-return]  # as above
