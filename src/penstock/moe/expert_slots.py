"""Targets of a layer's rows, and the experts that compute the rows that come here.

Without replicas an expert's rows go to where its placement says. While ranks hold others' experts as
replicas, a rank's rows of an expert are split among several positions, here or on the way, and a replica
computes them with parameters that were brought to it.

Shapes: T tokens, k choices, E experts (total), H positions among which an expert's rows are split, R rows, M
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from penstock.device import on_device
from penstock.features.sample_placement.feature import PACKED_COLUMNS
from penstock.moe.choices import Choice, TokenChoice, Tokens, placed
from penstock.moe.experts import Experts
from penstock.moe.permute.rows import RowPlan
from penstock.moe.permute.sort import Permutation, PermutationPlan, SortPermutation, places
from penstock.moe.products import Product, grouped_product
from penstock.placement import SPLIT, ExpertPlacement, Part, Replication
from penstock.routing.routes import GroupSizes

STRIDE = 2531
"""SPLIT divided by the golden ratio, made odd: any run of rows is shared among positions in the same way."""


@dataclass(frozen=True)
class OwnSlots:
    """Slots without replicas: every expert is where it is placed. rank: in the expert group."""

    permutation: Permutation
    experts: Experts
    placement: ExpertPlacement
    rank: int

    def placed(self, choice: Choice) -> Choice:
        """Return the choice by position instead of by expert."""
        return placed(choice, self.placement, self.rank)


@dataclass(frozen=True)
class SlotsWithReplicas:
    """Slots with replicas: some experts are on several ranks.

    permutation: by position, replicas among them. spread: of this rank's rows; None: rows stay by expert, and
    are split among its positions when the counts of all ranks are known.
    """

    permutation: Permutation
    experts: Experts
    spread: Spread | None

    def placed(self, choice: Choice) -> Choice:
        """Return the choice by position instead of by expert."""
        assert isinstance(choice, TokenChoice), "a permutation that takes replicas takes no others"
        return choice if self.spread is None else replace(choice, experts_Tk=self.spread(choice.experts_Tk))


class Spread:
    """Maps experts to positions, by the splits of one rank.

    Of the rows of an expert on this rank the n-th goes to the position that has part `n * STRIDE` modulo
    SPLIT. So the rows of any sample, chunk and microbatch are shared in about the same way.
    """

    def __init__(self, splits: Sequence[Sequence[Part]], device: torch.device) -> None:
        self._most = max(map(len, splits))
        ends = [[*accumulate(part.parts for part in parts)] for parts in splits]
        self._ends_EH = on_device([self._filled(row, SPLIT) for row in ends], device)
        positions = [[part.position for part in parts] for parts in splits]
        self._positions_EH = on_device([self._filled(row, -1) for row in positions], device)

    def __call__(self, experts_Tk: Tensor) -> Tensor:
        """Return positions for experts, [T, k]; -1 stays -1."""
        known_Tk = experts_Tk.clamp(min=0)
        positions_TkH = self._positions_EH[known_Tk]
        if self._most == 1:
            return positions_TkH.squeeze(2).masked_fill_(experts_Tk < 0, -1)
        phase_Tk = places(experts_Tk, len(self._ends_EH)) * STRIDE % SPLIT
        part_Tk = (phase_Tk.unsqueeze(2) >= self._ends_EH[known_Tk]).sum(dim=2)
        found_Tk1 = positions_TkH.gather(2, part_Tk.clamp(max=self._most - 1).unsqueeze(2))
        return found_Tk1.squeeze(2).masked_fill_(experts_Tk < 0, -1)

    def _filled(self, row: Sequence[int], value: int) -> list[int]:
        return [*row, *[value] * (self._most - len(row))]


class OwnAndReplicas(Experts):
    """A rank's own experts, then its replicas, as experts of one rank. Not a module of the model."""

    def __init__(self, own: Experts, replicas: Experts) -> None:
        super().__init__()
        self.num_local_experts = own.num_local_experts + replicas.num_local_experts
        self.shard = own.shard
        self.own, self.others = own, replicas

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        here = self.own.num_local_experts
        own, others = GroupSizes(sizes[:here]), GroupSizes(sizes[here:])
        if not any(others):
            out_RM: Tensor = self.own(rows_RM, own, product)
            return out_RM
        own_RM, others_RM = rows_RM.split([sum(own), sum(others)])
        return torch.cat([self.own(own_RM, own, product), self.others(others_RM, others, product)])

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, int, Tensor]]:
        raise AssertionError(f"{name} {list(tensor.shape)}: parameters are those of the layer's own experts")


def slots_with_replicas(
    own: Experts, replicas: Experts, permutation: Permutation, replication: Replication, spread: Spread | None
) -> SlotsWithReplicas:
    """Return the slots of a layer whose ranks hold replicas.

    Raises ValueError for a permutation that takes no replicas.
    """
    with_slots = (
        permutation
        if spread is None
        else permutation.with_slots(replication.placement.ranks, replication.slots)
    )
    return SlotsWithReplicas(with_slots, OwnAndReplicas(own, replicas), spread)


# ---- what a row is: one of a layer's tokens, or its residual stream, which comes back with the experts'
# outputs
#
# Where samples move (NetMoE), the residual stream has to come to a token's new home, since the token's
# outputs are added to it there. The token's rows pass the experts' ranks on the way, so they bring it: a row
# leaves home with the residual stream r instead of its norm, the weight w of the choice, and a number c that
# is 1 in the row of the first choice and 0 in all others; at the experts the row becomes w * E(norm(r)) + c *
# r. The sum of a token's rows is then the whole output of the block, whatever the weights add up to, and no
# additional row has travelled. Shapes: T tokens, M hidden size, k choices, R rows, N columns of a row: M and
# those beside the hidden state.


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
