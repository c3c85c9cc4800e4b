"""The balance loss of transformers: judged over all MoE layers together, not by layer.

aux = E * sum_e f_e * P_e, where f_e is the number of choices of expert e per token and layer, and P_e its
mean probability, both over the tokens of all MoE layers that the attention mask shows
(`load_balancing_loss_func`, Switch Transformer, equations 4-6).
Shapes: B samples of a microbatch, E experts, Y MoE layers.
"""

from __future__ import annotations

from torch import Tensor

from penstock.moe.balance import GlobalBalance


class BalanceOverLayers(GlobalBalance):
    """Balance judged as in transformers: over the batch of all ranks, and over all layers at once.

    top_k: choices of a token, from which the number of tokens follows: padding may have a label, and go to
    experts.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def by_layer(self, pieces_Y: Tensor, chosen_YE: Tensor, probability_YE: Tensor, tokens: Tensor) -> Tensor:
        """Return every layer's part of the single loss of all layers, [Y]."""
        del pieces_Y, tokens
        products_Y = (chosen_YE.sum(0) * probability_YE).sum(dim=1)
        return chosen_YE.shape[-1] * products_Y / self._rows(chosen_YE) ** 2

    def slope(self, chosen_BE: Tensor, chosen_YE: Tensor, layer: int, tokens: Tensor) -> Tensor:
        del layer, tokens
        factors_E = chosen_YE.shape[-1] * chosen_YE.sum(0) / self._rows(chosen_YE) ** 2
        return factors_E.expand(chosen_BE.shape)

    def _rows(self, chosen_YE: Tensor) -> Tensor:
        """Return the number of tokens of all MoE layers together."""
        return (chosen_YE.sum() / self._top_k).clamp(min=1)
