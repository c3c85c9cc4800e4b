"""The load-balance loss, by the group of tokens over which balance is judged.

aux = E * sum_e f_e * P_e per layer; f_e is the share of (token, choice) pairs that chose expert e, before any
drop, P_e the mean gate probability. f_e has no gradient, so what backward needs is one factor per expert.
It is not a mean over tokens: judged on pieces it has another value and another gradient.
Shapes: E experts, Y MoE layers.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.moe.config import BalanceGroup


class Balance(Protocol):
    """The balance loss of one reduction group. `group` names it."""

    group: BalanceGroup

    def piece(self, chosen_E: Tensor, probability_E: Tensor) -> Tensor:
        """What one microbatch of one rank adds to the batch's sum, before division by its tokens."""
        ...

    def total(self, pieces: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        """The loss summed over layers, from sums over all ranks and microbatches."""
        ...

    def slope(self, chosen_E: Tensor, all_chosen_E: Tensor, tokens: Tensor) -> Tensor:
        """Derivative of `total` by a microbatch's summed probabilities, [E]; tokens: of the whole batch."""
        ...


class GlobalBalance:
    """Judged over the whole batch of all ranks: exact for any split into microbatches and ranks."""

    group: BalanceGroup = "global"

    def piece(self, chosen_E: Tensor, probability_E: Tensor) -> Tensor:
        del chosen_E
        return probability_E.new_zeros(())

    def total(self, pieces: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        del pieces
        return (_share(chosen_YE) * probability_YE).sum() * chosen_YE.shape[-1] / tokens

    def slope(self, chosen_E: Tensor, all_chosen_E: Tensor, tokens: Tensor) -> Tensor:
        return _share(all_chosen_E) * len(chosen_E) / tokens


class MicrobatchBalance:
    """Judged on each rank's microbatch by itself, averaged by tokens: what most frameworks compute."""

    group: BalanceGroup = "microbatch"

    def piece(self, chosen_E: Tensor, probability_E: Tensor) -> Tensor:
        return (_share(chosen_E) * probability_E).sum() * len(chosen_E)

    def total(self, pieces: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        del chosen_YE, probability_YE
        return pieces / tokens

    def slope(self, chosen_E: Tensor, all_chosen_E: Tensor, tokens: Tensor) -> Tensor:
        del all_chosen_E
        return _share(chosen_E) * len(chosen_E) / tokens


def build_balance(group: BalanceGroup) -> Balance:
    """The balance loss of the group that a configuration names."""
    return GlobalBalance() if group == "global" else MicrobatchBalance()


def _share(chosen: Tensor) -> Tensor:
    """Counts to shares along the last dimension, float64."""
    counts = chosen.double()
    return counts / counts.sum(dim=-1, keepdim=True).clamp(min=1)
