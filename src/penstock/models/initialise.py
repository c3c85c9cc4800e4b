"""Initial weights that depend on a parameter's name and the seed, and on nothing else.

Every expert is drawn by its number in the whole model, so the same seed gives the same model on any layout.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def fill_normal(tensor: Tensor, name: str, seed: int, std: float) -> None:
    """Normal numbers from a generator keyed by (seed, name), drawn on the CPU."""
    if tensor.is_meta:
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    with torch.no_grad():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
