"""Initial weights that depend on a parameter's name and the seed, and on nothing else.

Every expert is drawn by its number in the whole model, so the same seed gives the same model on any layout.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from penstock.sharding import Sharding


def fill_normal(tensor: Tensor, name: str, seed: int, std: float, sharding: Sharding | None = None) -> None:
    """Fill a tensor with normal numbers from a generator keyed by (seed, name), drawn on the CPU.

    sharding: which part of a larger tensor this is; the whole tensor is drawn, so that ranks have parts of
    one.
    """
    if tensor.is_meta:
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    with torch.no_grad():
        whole = torch.randn(tensor.shape if sharding is None else sharding.shape, generator=generator) * std
        tensor.copy_(whole if sharding is None else sharding.part(whole))
