"""Compression of rows in transit: encoded before a transfer, decoded after it; gradients likewise.

A gradient travels back in the form of the rows: what encodes rows in forward decodes gradients in backward.
Hooks keep no state between calls, so several microbatches may be in transit, and evaluation between them.
Shapes: R rows, M hidden size, W words (see `int8`).
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor

from penstock.moe.hooks import int8
from penstock.moe.hooks.base import Hook, two_way

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
        return self.arrive(rows_RM, self._working_type(rows_RM.device.type))

    def before_combine(self, rows_RM: Tensor) -> Tensor:
        return self.leave(rows_RM)

    def after_combine(self, rows_RM: Tensor) -> Tensor:
        return self.arrive(rows_RM, self._working_type(rows_RM.device.type))

    def _working_type(self, device: str) -> torch.dtype:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.like.dtype


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
        return two_way(rows_RM, int8.encode, self._decode(rows_RM.dtype))

    def scaled(self, rows: Tensor, by: float) -> Tensor:
        return int8.scaled(rows, by)

    def arrive(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        return two_way(encoded, self._decode(dtype), int8.encode)

    def _decode(self, dtype: torch.dtype) -> partial[Tensor]:
        return partial(int8.decode, hidden_size=self.hidden_size, dtype=dtype)
