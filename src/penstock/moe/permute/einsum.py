"""The einsum permutation, and its masks: which token is in which slot, as zeros and ones or as a mix.

Shapes: T tokens = B samples of L tokens, M hidden size, k choices, E experts (total), S slots per expert (and
sample), N of all samples, R rows. Where slots do not belong to samples, B = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.moe.permute.slots import chunk_rows
from penstock.moe.permute.sort import Permutation, PermutationPlan
from penstock.moe.routers import Choice, ExpertChoice, SoftChoice, TokenChoice
from penstock.routing.sizes import capacity_slots, split_sizes


@dataclass(frozen=True)
class Masks(ABC):
    """Masks of one microbatch.

    Attributes:
        tokens: T.
        slots: Of one expert, for all samples together (B * S).
    """

    tokens: int
    slots: int

    @abstractmethod
    def dispatch(self, choice: Choice, dtype: torch.dtype) -> Tensor:
        """Return how much of each token is in each slot, [B, L, E, S]."""

    @abstractmethod
    def combine(self, weights: Tensor) -> Tensor:
        """Return how much of each slot is in each token's output, [B, L, E, S], differentiable."""


@dataclass(frozen=True)
class TokenMasks(Masks):
    """Masks where tokens choose, kept as T * k * (E + S) booleans: a full mask exists in one product only."""

    expert_TkE: Tensor
    slot_TkS: Tensor

    @staticmethod
    def of(choice: TokenChoice, num_experts: int, slots: int) -> TokenMasks:
        """Fill slots: first choices before second choices, earlier tokens before later ones."""
        expert_TkE = one_hot(choice.experts_Tk, num_experts)
        chosen_kTE = expert_TkE.transpose(0, 1)
        queue_kTE = chosen_kTE.flatten(0, 1).cumsum(0).view(chosen_kTE.shape)
        place_Tk = (queue_kTE * chosen_kTE).sum(dim=2).t() - 1  # -1 for padding: it is in no slot
        return TokenMasks(len(place_Tk), slots, expert_TkE, one_hot(place_Tk, slots))

    def dispatch(self, choice: Choice, dtype: torch.dtype) -> Tensor:
        del choice
        return torch.einsum("tke,tks->tes", self.expert_TkE.to(dtype), self.slot_TkS.to(dtype)).unsqueeze(0)

    def combine(self, weights: Tensor) -> Tensor:
        weight_TkE = weights.unsqueeze(2) * self.expert_TkE
        return torch.einsum("tke,tks->tes", weight_TkE, self.slot_TkS.to(weights.dtype)).unsqueeze(0)


@dataclass(frozen=True)
class ExpertMasks(Masks):
    """Masks where experts choose."""

    token_EST: Tensor

    @staticmethod
    def of(choice: ExpertChoice) -> ExpertMasks:
        slots = choice.tokens_ES.shape[1]
        return ExpertMasks(choice.tokens, slots, one_hot(choice.tokens_ES, choice.tokens))

    def dispatch(self, choice: Choice, dtype: torch.dtype) -> Tensor:
        del choice
        return self.token_EST.to(dtype).permute(2, 0, 1).unsqueeze(0)

    def combine(self, weights: Tensor) -> Tensor:
        return (weights.unsqueeze(2) * self.token_EST).permute(2, 0, 1).unsqueeze(0)


@dataclass(frozen=True)
class SoftMasks(Masks):
    """Masks of a soft gate (SoftMoE), which makes both."""

    @staticmethod
    def of(choice: SoftChoice) -> SoftMasks:
        samples, length, _, slots = choice.mix_BLES.shape
        return SoftMasks(samples * length, samples * slots)

    def dispatch(self, choice: Choice, dtype: torch.dtype) -> Tensor:
        assert isinstance(choice, SoftChoice), choice
        return choice.mix_BLES.to(dtype)

    def combine(self, weights: Tensor) -> Tensor:
        return weights


def one_hot(values: Tensor, size: int) -> Tensor:
    """Return True at each value along a new last dimension, False throughout for values outside 0 ...

    size - 1.
    """
    return values.unsqueeze(-1) == torch.arange(size, device=values.device)


# ---- the einsum permutation (GShard, Lepikhin et al. 2021): dispatch and combine are products with masks --
#
# A mask has one number for every token and slot, T * E * S in all, and every product needs M times that
# number of multiplications, nearly all with zero: this is GShard's cost, and the reason for the other
# permutations. It is the only permutation for SoftMoE, whose masks have no zeros (there S slots are of one
# sample and a mask L * E * S).


class EinsumPermutation(Permutation):
    """Rows are mask^T x, outputs are (mask * weights) rows; autograd derives backward.

    Where tokens choose, slots are filled as in `IndexPermutation`, and the same choices are dropped. A chunk
    is a range of an expert's slots; with samples, they are the slots of sample 0, then those of sample 1, ...

    Attributes:
        num_experts, capacity_factor, min_capacity: As in `IndexPermutation`.
    """

    name, kinds, dynamic = "einsum", ("token", "expert", "soft"), False

    def __init__(self, num_experts: int, *, capacity_factor: float = 1.0, min_capacity: int = 4) -> None:
        self.num_experts = num_experts
        self.capacity_factor, self.min_capacity = capacity_factor, min_capacity

    def plan(self, choice: Choice, chunks: int) -> PermutationPlan:
        masks: Masks
        match choice:
            case TokenChoice():
                count, choices = choice.counted, choice.experts_Tk.shape[1]
                slots = capacity_slots(
                    count, self.num_experts, choices, self.capacity_factor, self.min_capacity
                )
                masks = TokenMasks.of(choice, self.num_experts, slots)
            case ExpertChoice():
                masks = ExpertMasks.of(choice)
            case SoftChoice():
                masks = SoftMasks.of(choice)
        sizes = split_sizes(masks.slots, chunks)
        return PermutationPlan(masks.tokens, chunk_rows(sizes, self.num_experts), None, sizes, masks)

    def permute(self, x_TM: Tensor, choice: Choice, plan: PermutationPlan) -> Tensor:
        masks: Masks = plan.rows
        mask_BLES = masks.dispatch(choice, x_TM.dtype)
        x_BLM = x_TM.unflatten(0, mask_BLES.shape[:2])
        rows_ENM = torch.einsum("bles,blm->ebsm", mask_BLES, x_BLM).flatten(1, 2)
        assert plan.slots is not None
        return torch.cat([rows.flatten(0, 1) for rows in rows_ENM.split(plan.slots, dim=1)])

    def unpermute(self, rows_RM: Tensor, weights: Tensor, plan: PermutationPlan) -> Tensor:
        masks: Masks = plan.rows
        assert plan.slots is not None
        mask_BLES = masks.combine(weights.to(rows_RM.dtype))
        chunks = zip(rows_RM.split(plan.chunk_rows), plan.slots, strict=True)
        rows_ENM = torch.cat([rows.unflatten(0, (self.num_experts, size)) for rows, size in chunks], dim=1)
        rows_EBSM = rows_ENM.unflatten(1, (mask_BLES.shape[0], mask_BLES.shape[3]))
        return torch.einsum("bles,ebsm->blm", mask_BLES, rows_EBSM).flatten(0, 1)
