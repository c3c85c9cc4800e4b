"""The masks of the einsum order: which token is in which slot, as zeros and ones or as a mix.

Shapes: T tokens = B samples of L tokens, k choices, E experts (total), S slots per expert (and sample).
Where slots do not belong to samples, B = 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.moe.choices import Choice, ExpertChoice, SoftChoice, TokenChoice


@dataclass(frozen=True)
class Masks(ABC):
    """Masks of one microbatch. tokens: T. slots: of one expert, for all samples together (B * S)."""

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
