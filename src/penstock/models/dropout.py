"""Dropout from a counter-based generator, keyed by run, place in the model and sample.

The mask of an element is a hash of its place, not of what was drawn before it. So it does not depend on
microbatches, on the rank a sample lives on, or on the order of tasks.
Shapes: B samples, L tokens per sample, M hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from penstock.moe.counter import BITS, SampleKeys, uniform_bits


class CounterDropout(nn.Module):
    """Zeroes a share `p` of the elements in training, scales the rest by 1 / (1 - p). place: unique."""

    def __init__(self, p: float, place: int) -> None:
        super().__init__()
        self.p, self.place = p, place

    def forward(self, x_BLM: Tensor, keys: SampleKeys) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BLM
        keep_BLM = uniform_bits(x_BLM.shape, self.place, keys) >= round(self.p * 2**BITS)
        dropped_BLM: Tensor = x_BLM * keep_BLM / (1 - self.p)
        return dropped_BLM
