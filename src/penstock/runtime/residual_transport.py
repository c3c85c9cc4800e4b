"""How the residual stream of a token gets to where its experts' outputs are added to it.

Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.moe import ChunkRoute, Product, Tokens
from penstock.moe.layer import RoutedTokens
from penstock.runtime.parts import Layer


class ResidualTransport(Protocol):
    """What leaves the ranks of tokens, and what their experts' ranks send.

    separate_bytes: bytes, per number of the residual stream, that follow a sample beside its rows.
    """

    @property
    def separate_bytes(self) -> int: ...

    def route(
        self, layer: Layer, residual_BLM: Tensor, x_TM: Tensor, tokens: Tokens, slices: int
    ) -> RoutedTokens:
        """Choose experts for tokens x, and order rows of the tokens or of the residual stream."""
        ...

    def compute(self, layer: Layer, rows: Tensor, route: ChunkRoute, product: Product) -> Tensor:
        """Return what goes home for rows that have come to this rank's experts, [R, M]."""
        ...


@dataclass(frozen=True)
class SeparateResidual:
    """The residual stream stays at home, or follows its sample. wire_dtype: of rows; None = unchanged."""

    wire_dtype: torch.dtype | None = None
    separate_bytes = torch.float32.itemsize

    def route(
        self, layer: Layer, residual_BLM: Tensor, x_TM: Tensor, tokens: Tokens, slices: int
    ) -> RoutedTokens:
        del residual_BLM
        return layer.experts.route(in_dtype(x_TM, self.wire_dtype), tokens, slices)

    def compute(self, layer: Layer, rows: Tensor, route: ChunkRoute, product: Product) -> Tensor:
        return layer.experts.expert_rows(rows, route, product)


def in_dtype(x_TM: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return x in another type; None = unchanged."""
    return x_TM if dtype is None else x_TM.to(dtype)
