"""The check that parameters of all ranks are equal; it rides on a sum that every forward makes anyway.

Ranks drift apart silently where something scales or updates the parameters that they share differently: a
norm of the gradients that a rank holds, averages that were left out. Losses look plausible for long.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.runtime.expert_parallel.dtensors import is_dtensor

MODULUS = 262_139
"""A prime below 2^18: sums of squares of remainders stay exact in float64 on up to 2^17 ranks."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

DIFFERENT = (
    "the gate's parameters differ between ranks that train them together: their gradients were not averaged, "
    "or were scaled differently. Average them (DistributedDataParallel(penstock.ignore_experts(model)), and "
    "call what it returns; or fully_shard), and clip with penstock.clip_grad_norm_(model, ...): "
    "torch.nn.utils.clip_grad_norm_ finds another norm on every rank. Trainer of Hugging Face calls that by "
    "default: set max_grad_norm=0 and clip in a callback, as docs/integrations.md shows. Scale losses by "
    "ShardedGradScaler: with torch.amp.GradScaler some ranks leave out steps that others take"
)


@torch.no_grad()
def fingerprint(parameters: Iterable[Tensor]) -> Tensor:
    """Return a hash of all bits, below `MODULUS`, exact in any order of addition, and its square, [2]."""
    found = [p.detach() for p in parameters if not is_dtensor(p)]
    sums = [p.contiguous().view(BITS[p.element_size()]).sum(dtype=torch.int64) for p in found]
    if not sums:
        return torch.zeros(2, dtype=torch.float64)
    mark = torch.stack(sums).cumsum(0).sum().remainder(MODULUS).double()  # cumsum: their order counts
    return torch.stack([mark, mark.square()])


def are_alike(total: Tensor, ranks: int) -> bool:
    """Return whether all ranks have the same number. total: its sum and that of its square, float64 [2]."""
    mark, square = (int(number) for number in total.tolist())
    return mark**2 == square * ranks


def require_alike(total: Tensor, ranks: int) -> None:
    """Raise ValueError, on all ranks, if their fingerprints differ. total: the sum of all fingerprints."""
    if not are_alike(total, ranks):
        raise ValueError(DIFFERENT)
