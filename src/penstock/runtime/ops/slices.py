"""Rows of several slices in one transfer.

At home and at the experts rows lie slice by slice, so that either phase can take its own runs of slices. In
transit they lie rank by rank, since a rank gets what is meant for it in one piece. A block is one slice's
rows for one rank. A chunk that is one slice lies the same either way, and nothing is copied.

Where rows are split among several homes of their expert when counts are known, they lie at home by expert,
and leave by position.

Shapes: K slices of a chunk, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Sizes = Sequence[Sequence[int]]
"""Rows of every block, [K][P]."""


def to_ranks(slices: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """Return the slices' rows rank by rank, inside a rank slice by slice."""
    if len(slices) == 1:
        return slices[0]
    blocks = [rows.split(list(row)) for rows, row in zip(slices, sizes, strict=True)]
    return torch.cat([blocks[k][p] for p in range(len(sizes[0])) for k in range(len(sizes))])


def to_slices(rows: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """Return rows slice by slice: the inverse of `to_ranks`."""
    if len(sizes) == 1:
        return (rows,)
    blocks = rows.split([size for by_slice in zip(*sizes, strict=True) for size in by_slice])
    return tuple(torch.cat(blocks[k :: len(sizes)]) for k in range(len(sizes)))


def joined(slices: Sequence[Tensor]) -> Tensor:
    """Return one tensor of all slices, slice by slice."""
    return slices[0] if len(slices) == 1 else torch.cat(list(slices))


def by_position(rows: Tensor, sent: Sequence[Sequence[int]], home: Sequence[int]) -> Tensor:
    """Return a slice's rows, which lie in the order `home`, by position. sent: by rank and slot there."""
    return _turned(rows, _filled(sent, home), _filled(sent, sorted(home)))


def as_at_home(rows: Tensor, sent: Sequence[Sequence[int]], home: Sequence[int]) -> Tensor:
    """Return a slice's rows in the order `home`: the inverse of `by_position`."""
    return _turned(rows, _filled(sent, sorted(home)), _filled(sent, home))


def _filled(sent: Sequence[Sequence[int]], positions: Sequence[int]) -> dict[int, int]:
    """Return the sizes of the blocks that have rows, in the order of `positions`."""
    sizes = [size for of_rank in sent for size in of_rank]
    return {position: sizes[position] for position in positions if sizes[position]}


def _turned(rows: Tensor, lie: dict[int, int], wanted: dict[int, int]) -> Tensor:
    """Return blocks in another order; without a copy where they lie in it already."""
    if list(lie) == list(wanted):
        return rows
    blocks = dict(zip(lie, rows.split(list(lie.values())), strict=True))
    return torch.cat([blocks[position] for position in wanted])
