"""Reordering of blocks of rows: at the experts' side, and between the legs of a dispatch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.moe.sizes import reordered


def by_expert(rows_RM: Tensor, received: Sequence[Sequence[int]]) -> Tensor:
    """Reorder rows sorted by (source rank, expert) to rows sorted by (expert, source rank). One copy."""
    return _transpose_blocks(rows_RM, received)


def by_source(rows_RM: Tensor, received: Sequence[Sequence[int]]) -> Tensor:
    """Undo `by_expert`: rows sorted by (source rank, expert) again."""
    return _transpose_blocks(rows_RM, list(zip(*received, strict=True)))


def _transpose_blocks(rows_RM: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    outer, inner = len(sizes), len(sizes[0])
    if outer == 1 or inner == 1:  # already in the wanted order: no copy
        return rows_RM
    flat = [size for row in sizes for size in row]
    return reordered(rows_RM, flat, [o * inner + i for i in range(inner) for o in range(outer)])
