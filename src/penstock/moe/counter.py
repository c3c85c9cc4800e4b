"""Random numbers from a counter: a hash of where a number is used, not of what was drawn before it.

So the numbers do not depend on microbatches, on the rank a sample lives on, or on the order of tasks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = 32
_MASK = 0xFFFFFFFF
_PLACE_STEP = 0x9E3779B1  # odd, so no two places coincide


@dataclass(frozen=True)
class SampleKeys:
    """The keys of random numbers, and what attention must know of samples.

    seed: of the run. sample_ids_B: one number per sample, unique over the run. first_token: the place in its
    sample of the first token that is here, where ranks share the tokens of a sample. documents_BL: int64, for
    every token of a sample, here or not, the place in the sample where its document begins; None = a sample
    is one document.
    """

    seed: int
    sample_ids_B: Tensor
    first_token: int = 0
    documents_BL: Tensor | None = None


def uniform_bits(shape: torch.Size, place: int, keys: SampleKeys) -> Tensor:
    """Return independent uniform numbers in [0, 2**32), int64 [B, L, ...]. place: unique in the model."""
    ids_B = keys.sample_ids_B
    start = _mix(torch.full((), (keys.seed * 0x85EBCA6B + place * _PLACE_STEP) & _MASK, device=ids_B.device))
    low, high = ids_B & _MASK, (ids_B >> BITS) & _MASK
    sample_B = _mix(_mix(start ^ low) ^ high)
    count = shape[1:].numel()
    counter = torch.arange(count, device=ids_B.device) + keys.first_token * shape[2:].numel()
    return _mix(_mix(sample_B.unsqueeze(1) + counter) ^ sample_B.unsqueeze(1)).view(shape)


def normal(shape: torch.Size, place: int, keys: SampleKeys) -> Tensor:
    """Return independent standard normal numbers, float64 [B, ...] (Box and Muller). Uses two places."""
    radius, angle = (
        (uniform_bits(shape, 2 * place + half, keys).double() + 0.5) / (_MASK + 1) for half in (0, 1)
    )
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()


def _mix(x: Tensor) -> Tensor:
    """Hash 32-bit integers in int64 arithmetic: every input bit affects every output bit."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x46A56C5D) & _MASK
    return x ^ (x >> 16)
