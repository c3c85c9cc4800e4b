"""Hooks: functions of the rows, called at six places of the layer. Autograd derives their backward.

    x ─[before_moe_start]─ gate, permutation ─[before_dispatch]─ dispatch ─[after_dispatch]─ experts
    ─[before_combine]─ combine ─[after_combine]─ unpermute ─[before_moe_end]─ out

Shapes: T tokens, M hidden size, R rows, W words of an encoded row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.device import device_of
from penstock.routing.sizes import int8_row_bytes

Moment = Literal[
    "before_moe_start",
    "before_dispatch",
    "after_dispatch",
    "before_combine",
    "after_combine",
    "before_moe_end",
]


class Hook(nn.Module):
    """A hook that does nothing at any of the six places; a subclass overrides the methods that it needs.

    A change to the width or the type of rows between `before_dispatch` and `after_dispatch` (or
    `before_combine` and `after_combine`) has to be undone there: rows meet experts and weights as [R, M].

    Attributes:
        encodes_rows: Whether this hook makes such a change.
    """

    encodes_rows: bool = False

    def before_moe_start(self, x_TM: Tensor) -> Tensor:
        """Return the tokens for the gate, at home."""
        return x_TM

    def before_dispatch(self, rows_RM: Tensor) -> Tensor:
        """Return the rows to send, in expert order."""
        return rows_RM

    def after_dispatch(self, rows_RM: Tensor) -> Tensor:
        """Return the rows that have come to this rank's experts, sorted by source rank."""
        return rows_RM

    def before_combine(self, rows_RM: Tensor) -> Tensor:
        """Return the outputs of this rank's experts that are about to leave."""
        return rows_RM

    def after_combine(self, rows_RM: Tensor) -> Tensor:
        """Return the outputs for this rank's tokens, in expert order."""
        return rows_RM

    def before_moe_end(self, out_TM: Tensor) -> Tensor:
        """Return the layer's output, back in token order."""
        return out_TM

    def scaled(self, rows: Tensor, by: float) -> Tensor:
        """Multiply gradients in transit, encoded as this hook encodes rows, by a number.

        Called by expert form `baseline` only.

        Raises:
            ValueError: If the hook encodes rows and does not override this method.
        """
        if self.encodes_rows:
            raise ValueError(
                f"{type(self).__name__} encodes rows and does not say how encoded gradients are scaled; "
                "expert_form = baseline needs that. Override `scaled`, or set schedule.expert_form=gather"
            )
        return rows * by


def scaled_by(hooks: Iterable[Hook], rows: Tensor, by: float) -> Tensor:
    """Multiply gradients in transit between these hooks by a number."""
    encoding = next((hook for hook in hooks if hook.encodes_rows), None)
    return rows * by if encoding is None else encoding.scaled(rows, by)


def two_way(
    tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `forward(tensor)`, whose gradient is `backward` of the gradient that comes back."""
    out: Tensor = _TwoWay.apply(tensor, forward, backward)
    return out


class _TwoWay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.backward_of = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_of(grads[0]), None, None


# ---- compression of rows in transit: encoded before a transfer, decoded after it; gradients likewise ------
#
# A gradient travels back in the form of the rows: what encodes rows in forward decodes gradients in backward.
# Hooks keep no state between calls, so several microbatches may be in transit, and evaluation between them.


HALF_BYTES = 2


class EncodedRows(Hook):
    """Rows that are encoded before they leave and decoded when they arrive.

    Decoded rows have autocast's type under autocast, otherwise that of the layer (`layer.to(dtype)`).
    """

    encodes_rows = True
    like: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("like", torch.empty(0), persistent=False)  # is cast with the layer

    @abstractmethod
    def leave(self, rows_RM: Tensor) -> Tensor:
        """Encode rows for the transfer; backward decodes."""

    @abstractmethod
    def arrive(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode rows [R, M] to the given type; backward encodes."""

    def before_dispatch(self, rows_RM: Tensor) -> Tensor:
        return self.leave(rows_RM)

    def after_dispatch(self, rows_RM: Tensor) -> Tensor:
        kind = rows_RM.device.type
        as_autocast = torch.is_autocast_enabled(kind)
        return self.arrive(rows_RM, torch.get_autocast_dtype(kind) if as_autocast else self.like.dtype)

    before_combine, after_combine = before_dispatch, after_dispatch


class Bfloat16Rows(EncodedRows):
    """Two bytes per number. Rows of two bytes per number or fewer are not encoded.

    A number changes by no more than 2^-8 of its value each way: it is rounded to 8 binary digits.
    """

    def leave(self, rows_RM: Tensor) -> Tensor:
        # The backward of a cast is the cast back, as is needed here and below.
        return rows_RM if rows_RM.element_size() <= HALF_BYTES else rows_RM.to(torch.bfloat16)

    def arrive(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return encoded.to(dtype)

    def scaled(self, rows: Tensor, by: float) -> Tensor:
        return rows * by


class Int8Rows(EncodedRows):
    """One byte per number and a float32 scale per row: `int8_row_bytes(hidden_size)` bytes.

    A number changes by no more than half a step each way, max |row| / 254 (besides float32's own rounding).
    A row with an infinite number or NaN arrives with no finite number. Rows in transit look like float32
    numbers but are not: `torch.autograd.detect_anomaly` may find NaN among them.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def leave(self, rows_RM: Tensor) -> Tensor:
        if rows_RM.shape[1] != self.hidden_size:
            raise ValueError(
                f"Int8Rows(hidden_size={self.hidden_size}) met rows of {rows_RM.shape[1]} numbers"
            )
        return two_way(rows_RM, encode_int8, self._decode(rows_RM.dtype))

    def scaled(self, rows: Tensor, by: float) -> Tensor:
        return scale_int8(rows, by)

    def arrive(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return two_way(encoded, self._decode(dtype), encode_int8)

    def _decode(self, dtype: torch.dtype) -> partial[Tensor]:
        return partial(decode_int8, hidden_size=self.hidden_size, dtype=dtype)


# ---- rows as int8: symmetric, with one scale per row, so that no row is coarser because of another one ----
#
# A row [M] becomes W = ceil(M / 4) + 1 float32 words: M bytes, padding up to a whole word, and its scale.
# Words are used because autograd gives no gradient to integers. Their values mean nothing: they may be
# copied, not computed with.


STEPS = 127
"""Steps on either side of zero. -128 is not used: the range is symmetric."""
WORD_BYTES = 4
SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest scale with all its digits; rows that would need a smaller one count as zero."""
BLOCK = 1 << 18
"""Numbers that are encoded at a time: their intermediate results stay in the processor's L2 cache."""


def encode_int8(rows_RM: Tensor) -> Tensor:
    """Encode rows of any floating type as words [R, W]."""
    rows_RM = rows_RM.to(torch.float32)
    hidden = rows_RM.shape[1]
    words_RW = rows_RM.new_empty(rows_RM.shape[0], int8_row_bytes(hidden) // WORD_BYTES)
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


def decode_int8(words_RW: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Decode words to rows [R, M] of the given type."""
    bytes_RM = words_RW.view(torch.int8)[:, :hidden_size]
    return bytes_RM.to(torch.float32).mul_(words_RW[:, -1:]).to(dtype)


def scale_int8(words_RW: Tensor, by: float) -> Tensor:
    """Multiply encoded rows by a positive number, through their scales."""
    scaled_RW = words_RW.clone()
    scaled_RW[:, -1] *= by
    return scaled_RW
