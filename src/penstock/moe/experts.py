"""Experts: feed-forward networks over rows that are sorted by expert.

Shapes: R rows, M hidden size, H expert hidden size, E local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.moe.config import MoEConfig

Product = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""rows [R, M], weights [E, M, H], rows per expert -> [R, H]."""

ROW_ALIGNMENT_BYTES = 16
GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_product(rows_RM: Tensor, weight_EMH: Tensor, sizes: Sequence[int]) -> Tensor:
    """rows of expert e times weight e, for all experts at once. sizes: rows per expert. Returns [R, H].

    Equal sizes become one batched product, uneven ones PyTorch's grouped product; only what that does not
    take (float64, rows that are not a multiple of 16 bytes) is multiplied expert by expert.
    """
    weight_EMH = weight_EMH.to(rows_RM.dtype)  # under autocast rows are in half precision
    if len(set(sizes)) == 1:
        return torch.bmm(rows_RM.unflatten(0, (len(sizes), sizes[0])), weight_EMH).flatten(0, 1)
    if rows_RM.dtype in GROUPED_TYPES and _aligned(weight_EMH):
        ends = torch.tensor(sizes, device=rows_RM.device).cumsum(0).to(torch.int32)
        return F.grouped_mm(rows_RM, weight_EMH, offs=ends)
    parts = rows_RM.split(list(sizes))
    return torch.cat([part @ weight for part, weight in zip(parts, weight_EMH.unbind(0), strict=True)])


def _aligned(weight_EMH: Tensor) -> bool:
    return all(size * weight_EMH.element_size() % ROW_ALIGNMENT_BYTES == 0 for size in weight_EMH.shape[1:])


class GeluExperts(nn.Module):
    """Two matrices per expert with GELU between (GPT)."""

    def __init__(self, hidden_size: int, config: MoEConfig, local_experts: int) -> None:
        super().__init__()
        ffn = config.moe_ffn_hidden_size
        self.w_up = nn.Parameter(torch.empty(local_experts, hidden_size, ffn))
        self.w_down = nn.Parameter(torch.empty(local_experts, ffn, hidden_size))

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        hidden_RH = F.gelu(product(rows_RM, self.w_up, sizes))
        return product(hidden_RH, self.w_down, sizes)


class SwiGLUExperts(nn.Module):
    """Three matrices per expert: silu(x W_gate) * (x W_up), then W_down (Mixtral)."""

    def __init__(self, hidden_size: int, config: MoEConfig, local_experts: int) -> None:
        super().__init__()
        ffn = config.moe_ffn_hidden_size
        self.w_gate = nn.Parameter(torch.empty(local_experts, hidden_size, ffn))
        self.w_up = nn.Parameter(torch.empty(local_experts, hidden_size, ffn))
        self.w_down = nn.Parameter(torch.empty(local_experts, ffn, hidden_size))

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        gate_RH = F.silu(product(rows_RM, self.w_gate, sizes))
        return product(gate_RH * product(rows_RM, self.w_up, sizes), self.w_down, sizes)


def build_experts(hidden_size: int, config: MoEConfig, local_experts: int) -> GeluExperts | SwiGLUExperts:
    """The experts that `config.expert` names."""
    if config.expert == "gelu":
        return GeluExperts(hidden_size, config, local_experts)
    return SwiGLUExperts(hidden_size, config, local_experts)


def by_expert(rows_RM: Tensor, received: Sequence[Sequence[int]]) -> Tensor:
    """Rows sorted by (source rank, expert) to rows sorted by (expert, source rank). One copy."""
    return _transpose_blocks(rows_RM, received)


def by_source(rows_RM: Tensor, received: Sequence[Sequence[int]]) -> Tensor:
    """The inverse of `by_expert`."""
    return _transpose_blocks(rows_RM, list(zip(*received, strict=True)))


def _transpose_blocks(rows_RM: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    outer, inner = len(sizes), len(sizes[0])
    if outer == 1 or inner == 1:  # already in the wanted order: no copy
        return rows_RM
    blocks = rows_RM.split([size for row in sizes for size in row])
    return torch.cat([blocks[o * inner + i] for i in range(inner) for o in range(outer)])
