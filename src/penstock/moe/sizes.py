"""Sizes of groups of rows: numbers on the host, which products and permutations also need on the device.

Shapes: R rows, N groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from penstock.device import device_of, on_device
from penstock.routing.routes import GroupSizes


def ends_of(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Return where each group ends, int32 [N], as `torch.nn.functional.grouped_mm` reads it.

    Whoever multiplies with the same `GroupSizes` several times (a SwiGLU expert has three matrices, backward
    and a second run of forward multiply again) copies the ends once.
    """
    kept = sizes if isinstance(sizes, GroupSizes) else GroupSizes(sizes)
    if kept.ends is None or kept.ends.device != device:
        kept.ends = on_device(list(accumulate(kept)), device, torch.int32)
    ends: Tensor = kept.ends
    return ends


VIEWS = 16
"""Blocks from which a device gathers rows by index: a view and its node in autograd cost the host some
microseconds."""


def is_for_views(rows: Tensor, blocks: int) -> bool:
    """Return whether this number of blocks is put in order as views that are concatenated, and not by
    index."""
    return not device_of(rows).is_gpu or blocks < VIEWS


def reordered(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return blocks of rows in another order, in one copy.

    On a CPU the blocks are views that are concatenated: they are copied as wholes. A device gathers rows by
    an index, made there from two numbers per block: five launches, where views take two or three per block.

    Args:
        rows: [R, ...].
        sizes: Rows of every block, as they lie.
        order: The block that comes first, second, ...; each block once, those without rows may be left out.
    """
    if is_for_views(rows, len(order)):
        blocks = rows.split(list(sizes))
        return torch.cat([blocks[block] for block in order])
    gathered: Tensor = _Gathered.apply(rows, *permutation(sizes, order, rows.device))
    return gathered


def permutation(sizes: Sequence[int], order: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for every row of reordered blocks where it lay, and for every row where it comes to lie; int64
    [R]."""
    starts = list(accumulate(sizes, initial=0))
    lengths = [sizes[block] for block in order]
    goes_to = dict(zip(order, accumulate(lengths, initial=0), strict=False))
    ahead = [starts[block] - goes_to[block] for block in order]
    there = [goes_to.get(block, 0) - starts[block] for block in range(len(sizes))]
    total = sum(lengths)
    here_R = torch.arange(total, device=device)
    forth, back = (
        on_device([lengths, ahead], device, torch.int64),
        on_device([sizes, there], device, torch.int64),
    )
    return (
        here_R + torch.repeat_interleave(forth[1], forth[0], output_size=total),
        here_R + torch.repeat_interleave(back[1], back[0], output_size=total),
    )


class _Gathered(torch.autograd.Function):
    """Rows by index. Its backward gathers by the inverse; that of `index_select` would add, row by row."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, rows: Tensor, index_R: Tensor, inverse_R: Tensor
    ) -> Tensor:
        ctx.inverse_R = inverse_R  # type: ignore[attr-defined]  # integers that nothing else changes
        return rows.index_select(0, index_R)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse_R), None, None  # type: ignore[attr-defined]
