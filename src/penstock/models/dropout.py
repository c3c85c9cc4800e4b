"""Dropout from a counter-based generator, keyed by run, place in the model and sample.

The mask of an element is a hash of where it is, not of what was drawn before it. So it does not depend on
microbatches, on the rank a sample lives on, or on the order in which tasks run.
Shapes: B samples, L tokens per sample, M hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock.runtime import SampleKeys

_MASK = 0xFFFFFFFF
_PLACE_STEP = 0x9E3779B1  # odd, so places never fall together


class CounterDropout(nn.Module):
    """Zeroes a share `p` of the elements in training, scales the rest by 1 / (1 - p). place: unique."""

    def __init__(self, p: float, place: int) -> None:
        super().__init__()
        self.p, self.place = p, place

    def forward(self, x_BLM: Tensor, keys: SampleKeys) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BLM
        keep_BLM = uniform_bits(x_BLM.shape, self.place, keys) >= round(self.p * (_MASK + 1))
        return x_BLM * keep_BLM / (1 - self.p)


def uniform_bits(shape: torch.Size, place: int, keys: SampleKeys) -> Tensor:
    """int64 tensor [B, ...] of independent uniform numbers in [0, 2**32)."""
    start = _mix(torch.tensor((keys.seed * 0x85EBCA6B + place * _PLACE_STEP) & _MASK))
    ids_B = keys.sample_ids_B
    low, high = ids_B & _MASK, (ids_B >> 32) & _MASK
    sample_B = _mix(_mix(start.to(ids_B.device) ^ low) ^ high)
    count = shape[1:].numel()
    counter = torch.arange(count, device=ids_B.device)
    return _mix(_mix(sample_B.unsqueeze(1) + counter) ^ sample_B.unsqueeze(1)).view(shape)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash in int64 arithmetic: every input bit moves every output bit."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x46A56C5D) & _MASK
    return x ^ (x >> 16)
