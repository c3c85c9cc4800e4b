"""Shared experts (DeepSeekMoE, Qwen): a network that every token passes, whatever its gate says."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.moe.experts.base import Experts


class SharedExpert(nn.Module):
    """One expert of any kind over all tokens. Several shared experts are one network of their summed width.

    It waits for no transfer: in a stack it is a task of its own that runs while rows are in transit.
    """

    def __init__(self, expert: Experts) -> None:
        super().__init__()
        self.expert = expert

    def forward(self, x_TM: Tensor) -> Tensor:
        out_TM: Tensor = self.expert(x_TM, [len(x_TM)])
        return out_TM
