"""What a row is: one of a layer's tokens, or its residual stream, which comes back with the experts' outputs.

Where samples move (NetMoE), the residual stream has to come to a token's new home, since the token's outputs
are added to it there. The token's rows pass the experts' ranks on the way, so they bring it: a row leaves
home with the residual stream r instead of its norm, the weight w of the choice, and a number c that is 1 in
the row of the first choice and 0 in all others; at the experts the row becomes w * E(norm(r)) + c * r. The
sum of a token's rows is then the whole output of the block, whatever the weights add up to, and no additional
row has travelled.
Shapes: T tokens, M hidden size, k choices, R rows, N columns of a row: M and those beside the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.features.sample_placement.ops import PACKED_COLUMNS
from penstock.moe.choices import Choice, TokenChoice, Tokens
from penstock.moe.permute.rows import RowPlan
from penstock.moe.permute.sort import Permutation, PermutationPlan, SortPermutation


@dataclass(frozen=True)
class OwnTokens:
    """Rows are the layer's tokens, and padding has none."""

    def chosen(self, choice: Choice, tokens: Tokens, home: int) -> Choice:
        """Return the choice by position, including whatever else has to travel."""
        del tokens, home
        return choice

    def rows(self, permutation: Permutation, x_TM: Tensor, choice: Choice, plan: PermutationPlan) -> Tensor:
        """Return the rows in expert order."""
        return permutation.permute(x_TM, choice, plan)


@dataclass(frozen=True)
class ResidualRows(OwnTokens):
    """Rows are those of the residual stream, with columns beside it; padding has one row per token."""

    residual_TM: Tensor

    def chosen(self, choice: Choice, tokens: Tokens, home: int) -> Choice:
        """Return the choice with padding sent to position `home` of its own rank, with a weight of 0."""
        assert isinstance(choice, TokenChoice), "samples move where tokens choose"
        if tokens.valid_T is None:
            return choice
        valid_T1 = tokens.valid_T.unsqueeze(1)
        carrier_1k = torch.full_like(choice.experts_Tk[:1], -1)
        carrier_1k[:, :1] = home
        return replace(
            choice,
            experts_Tk=torch.where(valid_T1, choice.experts_Tk, carrier_1k),
            weights=choice.weights.masked_fill(~valid_T1, 0),
        )

    def rows(self, permutation: Permutation, x_TM: Tensor, choice: Choice, plan: PermutationPlan) -> Tensor:
        """Return the rows in expert order, [R, N]."""
        del x_TM
        assert isinstance(permutation, SortPermutation) and isinstance(choice, TokenChoice), "see `chosen`"
        rows: RowPlan = plan.rows
        kept_RM = rows.take(self.residual_TM)
        weight_of_row_R = rows.weight_of_row_R
        weights_R = choice.weights.flatten().index_select(0, weight_of_row_R)
        first_R = weight_of_row_R % choice.weights.shape[1] == 0
        return torch.cat([kept_RM, *(each.to(kept_RM).unsqueeze(1) for each in (weights_R, first_R))], dim=1)


TOKENS = OwnTokens()


def given_back(
    rows_RN: Tensor, norm: Callable[[Tensor], Tensor], experts: Callable[[Tensor], Tensor], *, residual: bool
) -> Tensor:
    """Return what experts make of rows that carry the residual stream: w * E(norm(r)) + c * r, [R, M].

    residual: whether c * r is added here; of several ranks that compute a row, one adds it.
    """
    columns = [rows_RN.shape[1] - PACKED_COLUMNS, *[1] * PACKED_COLUMNS]
    kept_RM, weights_R1, first_R1 = (part.contiguous() for part in rows_RN.split(columns, dim=1))
    weighted_RM = experts(norm(kept_RM)) * weights_R1
    return torch.addcmul(weighted_RM, kept_RM, first_R1) if residual else weighted_RM
