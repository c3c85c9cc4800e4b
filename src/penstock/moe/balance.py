"""The load-balance loss, by the group of tokens over which balance is judged.

aux = E * sum_e f_e * P_e per layer; f_e is the share of (token, choice) pairs that chose expert e, before any
drop, P_e the mean gate probability. f_e has no gradient, so backward needs only one factor per expert.
The loss is not a mean over tokens: judged on pieces it has another value and another gradient.
Shapes: B samples of a microbatch, E experts, Y MoE layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor

from penstock.moe.config import BalanceGroup


class Balance(Protocol):
    """The balance loss of one reduction group. `group` names it."""

    group: BalanceGroup

    def piece(self, chosen_BE: Tensor, probability_BE: Tensor) -> Tensor:
        """Return what one microbatch of one rank adds to the batch's sum, before division by its tokens."""
        ...

    def by_layer(self, pieces_Y: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss of every layer, [Y], from sums over all ranks and microbatches."""
        ...

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        """Return the derivative of the losses' sum by a microbatch's summed probabilities, [B, E].

        chosen_YE, tokens: of the whole batch.
        """
        ...


class GlobalBalance:
    """Balance judged over the whole batch of all ranks: exact for any split into microbatches and ranks."""

    group: BalanceGroup = "global"

    def piece(self, chosen_BE: Tensor, probability_BE: Tensor) -> Tensor:
        del chosen_BE
        return probability_BE.new_zeros(())

    def by_layer(self, pieces_Y: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        del pieces_Y
        return (_share(chosen_YE) * probability_YE).sum(dim=1) * chosen_YE.shape[-1] / tokens

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        return (_share(chosen_YE[layer]) * chosen_YE.shape[-1] / tokens).expand(chosen_BE.shape)


class _PiecewiseBalance(ABC):
    """Balance judged on parts of the batch, averaged by their tokens. A subclass says what a part is."""

    @abstractmethod
    def _shares(self, chosen_BE: Tensor) -> Tensor:
        """Return the shares by which each sample's tokens are judged."""

    def piece(self, chosen_BE: Tensor, probability_BE: Tensor) -> Tensor:
        return (self._shares(chosen_BE) * probability_BE).sum() * chosen_BE.shape[-1]

    def by_layer(self, pieces_Y: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        del chosen_YE, probability_YE
        return pieces_Y / tokens

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        del chosen_YE, layer
        return self._shares(chosen_BE) * chosen_BE.shape[-1] / tokens


class MicrobatchBalance(_PiecewiseBalance):
    """Balance judged on each rank's microbatch by itself, as most frameworks do. Splitting changes it."""

    group: BalanceGroup = "microbatch"

    def _shares(self, chosen_BE: Tensor) -> Tensor:
        return _share(chosen_BE.sum(dim=0)).expand(chosen_BE.shape)


class SequenceBalance(_PiecewiseBalance):
    """Balance judged on every sample by itself (DeepSeek-V3): exact for any split, as samples stay whole."""

    group: BalanceGroup = "sequence"

    def _shares(self, chosen_BE: Tensor) -> Tensor:
        return _share(chosen_BE)


BALANCES: dict[BalanceGroup, Balance] = {
    balance.group: balance for balance in (GlobalBalance(), MicrobatchBalance(), SequenceBalance())
}


def _share(chosen: Tensor) -> Tensor:
    """Turn counts into shares along the last dimension, float64."""
    counts = chosen.double()
    return counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
