"""Rows bring the residual stream of samples that move, so that nothing else of a token follows its sample.

Shapes: B samples, L tokens per sample, M hidden size, T = B * L tokens, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from penstock.moe import ChunkRoute, Product, Tokens
from penstock.moe.layer import RoutedTokens
from penstock.moe.packed_residual import ResidualRows, given_back
from penstock.runtime.parts import BlockParts, Layer, ModelParts
from penstock.runtime.residual_transport import in_dtype


@dataclass(frozen=True)
class PackedResidual:
    """Rows bring the residual stream: see `penstock.moe.packed_residual`. wire_dtype: of tokens for the
    gate."""

    wire_dtype: torch.dtype | None = None
    separate_bytes = 0

    def route(
        self, layer: Layer, residual_BLM: Tensor, x_TM: Tensor, tokens: Tokens, slices: int
    ) -> RoutedTokens:
        carried = ResidualRows(residual_BLM.flatten(0, 1))
        return layer.experts.route(in_dtype(x_TM, self.wire_dtype), tokens, slices, carried)

    def compute(self, layer: Layer, rows: Tensor, route: ChunkRoute, product: Product) -> Tensor:
        moe = layer.experts
        through = partial(moe.expert_rows, route=route, product=product)
        return given_back(rows, row_norm(layer.block), through, residual=moe.experts.shard.rank == 0)


def row_norm(block: BlockParts) -> nn.Module:
    """Return the norm that experts read. Raises ValueError where rows cannot carry the residual stream."""
    norm = block.row_norm
    if norm is None:
        raise ValueError(
            "rows carry the residual stream of samples that move (placement.samples) in a step planned for "
            "blocks that have only a LayerNorm or an RMSNorm before their experts and a sum after them, and "
            "one has more: dropout, hooks, or a norm or methods of its own. Build the stack with them, which "
            "plans another step, or let samples stay (placement.samples=none)"
        )
    return norm


def may_pack(parts: ModelParts) -> bool:
    """Return whether rows of every MoE layer can carry the residual stream."""
    return all(block.row_norm is not None for block in _with_experts(parts))


def check_packs(parts: ModelParts, autocast_dtype: torch.dtype | None) -> None:
    """Raise ValueError where rows cannot carry the residual stream, or it would be rounded on the way."""
    if autocast_dtype is not None:
        dtype = str(autocast_dtype).removeprefix("torch.")
        raise ValueError(
            "rows carry the residual stream of samples that move (placement.samples) in a step planned for "
            f"exact rows, and this stack computes under autocast in {dtype}, which would round it. Make the "
            "plan for this precision (train.precision), or let samples stay (placement.samples=none)"
        )
    for block in _with_experts(parts):
        row_norm(block)


def _with_experts(parts: ModelParts) -> list[BlockParts]:
    return [block for block in parts.parts if block.moe is not None]
