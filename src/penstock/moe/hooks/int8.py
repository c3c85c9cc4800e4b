"""Rows as bytes: symmetric, one scale per row, so that no row is coarser because of another one.

A row [M] becomes W float32 words: M bytes, padding up to a whole word, and its scale. Words, because autograd
gives no gradient to integers. As numbers they mean nothing: they may be copied, but not computed with.
Shapes: R rows, M hidden size, W = ceil(M / 4) + 1 words.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.moe.config import int8_row_bytes

STEPS = 127
"""Either side of zero. -128 is not used: a number and its negative are as far from zero."""
WORD_BYTES = 4
SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest scale with all its digits; rows that would need a smaller one count as zero."""
BLOCK = 1 << 18
"""Numbers that are encoded at a time: what is made on the way stays in the processor's second cache."""


def words(hidden_size: int) -> int:
    """W."""
    return int8_row_bytes(hidden_size) // WORD_BYTES


def encode(rows_RM: Tensor) -> Tensor:
    """Words [R, W] of rows of any floating type."""
    rows_RM = rows_RM.to(torch.float32)
    hidden = rows_RM.shape[1]
    words_RW = rows_RM.new_empty(rows_RM.shape[0], words(hidden))
    bytes_RB = words_RW.view(torch.int8)
    bytes_RB[:, hidden:-WORD_BYTES] = 0
    scale_R1 = words_RW[:, -1:]
    scale_R1.copy_(_scales(rows_RM))
    # A row of zeros has no inverse; one that holds an infinite number has 0, and with its scale no number
    # that is decoded is finite.
    inverse_R1 = scale_R1.reciprocal().masked_fill_(scale_R1 == 0, 0)
    _round(rows_RM, inverse_R1, bytes_RB[:, :hidden])
    return words_RW


def decode(words_RW: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Rows [R, M] of the given type."""
    bytes_RM = words_RW.view(torch.int8)[:, :hidden_size]
    return bytes_RM.to(torch.float32).mul_(words_RW[:, -1:]).to(dtype)


def scaled(words_RW: Tensor, by: float) -> Tensor:
    """Encoded rows times a positive number: their scales are."""
    found_RW = words_RW.clone()
    found_RW[:, -1] *= by
    return found_RW


def _scales(rows_RM: Tensor) -> Tensor:
    """The step between two bytes, [R, 1]: the largest number of a row is 127 steps."""
    most_R1 = torch.maximum(rows_RM.amax(1, keepdim=True), rows_RM.amin(1, keepdim=True).neg_())
    return F.threshold(most_R1 / STEPS, SMALLEST, 0.0)


def _round(rows_RM: Tensor, inverse_R1: Tensor, out_RM: Tensor) -> None:
    """rows / scale to the nearest whole number, into bytes."""
    rows = max(1, BLOCK // rows_RM.shape[1]) if rows_RM.device.type == "cpu" else max(1, len(rows_RM))
    scratch = rows_RM.new_empty(min(rows, len(rows_RM)), rows_RM.shape[1])
    parts = zip(rows_RM.split(rows), inverse_R1.split(rows), out_RM.split(rows), strict=True)
    for part, inverse, out in parts:
        out.copy_(torch.mul(part, inverse, out=scratch[: len(part)]).round_())
