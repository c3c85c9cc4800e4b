"""Rows of several slices in one transfer.

At home and at the experts rows lie slice by slice, so that either phase can take its own runs of them.
Under way they lie rank by rank, since a rank gets what is meant for it in one piece. A block is one slice's
rows for one rank. A chunk that is one slice lies the same either way, and nothing is copied.
Shapes: K slices of a chunk, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Sizes = Sequence[Sequence[int]]
"""Rows of every block, [K][P]."""


def to_ranks(slices: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """The slices' rows rank by rank, inside a rank slice by slice."""
    if len(slices) == 1:
        return slices[0]
    blocks = [rows.split(list(row)) for rows, row in zip(slices, sizes, strict=True)]
    return torch.cat([blocks[k][p] for p in range(len(sizes[0])) for k in range(len(sizes))])


def to_slices(rows: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """The inverse of `to_ranks`."""
    if len(sizes) == 1:
        return (rows,)
    blocks = rows.split([size for by_slice in zip(*sizes, strict=True) for size in by_slice])
    return tuple(torch.cat(blocks[k :: len(sizes)]) for k in range(len(sizes)))


def joined(slices: Sequence[Tensor]) -> Tensor:
    """One tensor, slice by slice."""
    return slices[0] if len(slices) == 1 else torch.cat(list(slices))
