"""The balance loss of transformers: judged over all MoE layers together, and not by layer.

aux = E * sum_e f_e * P_e, where f_e is the number of choices of expert e per token and layer, and P_e its
mean probability, both over the tokens of all MoE layers (`load_balancing_loss_func`, Switch Transformer,
equations 4-6).
Shapes: B samples of a microbatch, E experts, Y MoE layers.
"""

from __future__ import annotations

from torch import Tensor

from penstock.moe.balance import GlobalBalance


class BalanceOverLayers(GlobalBalance):
    """As in transformers: over the batch of all ranks, and over all layers at once."""

    def total(self, pieces: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        del pieces
        rows = tokens * len(chosen_YE)
        return chosen_YE.shape[-1] * (chosen_YE.sum(0) * probability_YE.sum(0)).sum() / rows**2

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        del layer
        rows = tokens * len(chosen_YE)
        return (chosen_YE.shape[-1] * chosen_YE.sum(0) / rows**2).expand(chosen_BE.shape)
