"""Rows as int8: symmetric, with one scale per row, so that no row is coarser because of another one.

A row [M] becomes W float32 words: M bytes, padding up to a whole word, and its scale. Words are used because
autograd gives no gradient to integers. Their values mean nothing: they may be copied, not computed with.
Shapes: R rows, M hidden size, W = ceil(M / 4) + 1 words.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.device import device_of
from penstock.moe.config import int8_row_bytes

STEPS = 127
"""Steps on either side of zero. -128 is not used: the range is symmetric."""
WORD_BYTES = 4
SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest scale with all its digits; rows that would need a smaller one count as zero."""
BLOCK = 1 << 18
"""Numbers that are encoded at a time: their intermediate results stay in the processor's L2 cache."""


def words(hidden_size: int) -> int:
    """Return W, the number of words of a row."""
    return int8_row_bytes(hidden_size) // WORD_BYTES


def encode(rows_RM: Tensor) -> Tensor:
    """Encode rows of any floating type as words [R, W]."""
    rows_RM = rows_RM.to(torch.float32)
    hidden = rows_RM.shape[1]
    words_RW = rows_RM.new_empty(rows_RM.shape[0], words(hidden))
    bytes_RB = words_RW.view(torch.int8)
    bytes_RB[:, hidden:-WORD_BYTES] = 0
    scale_R1 = words_RW[:, -1:]
    # The largest number of a row is 127 steps.
    most_R1 = torch.maximum(rows_RM.amax(1, keepdim=True), rows_RM.amin(1, keepdim=True).neg_())
    scale_R1.copy_(F.threshold(most_R1 / STEPS, SMALLEST, 0.0))
    # The scale of a row of zeros has no inverse; that of a row with an infinite number has inverse 0, and no
    # number decoded with that scale is finite.
    inverse_R1 = scale_R1.reciprocal().masked_fill_(scale_R1 == 0, 0)
    # Rows / scale, rounded to the nearest whole number, as bytes.
    rows = max(1, BLOCK // rows_RM.shape[1] if device_of(rows_RM).is_cpu else len(rows_RM))
    scratch = rows_RM.new_empty(min(rows, len(rows_RM)), rows_RM.shape[1])
    parts = zip(rows_RM.split(rows), inverse_R1.split(rows), bytes_RB[:, :hidden].split(rows), strict=True)
    for part, inverse, out in parts:
        out.copy_(torch.mul(part, inverse, out=scratch[: len(part)]).round_())
    return words_RW


def decode(words_RW: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Decode words to rows [R, M] of the given type."""
    bytes_RM = words_RW.view(torch.int8)[:, :hidden_size]
    return bytes_RM.to(torch.float32).mul_(words_RW[:, -1:]).to(dtype)


def scaled(words_RW: Tensor, by: float) -> Tensor:
    """Multiply encoded rows by a positive number, through their scales."""
    found_RW = words_RW.clone()
    found_RW[:, -1] *= by
    return found_RW
