"""The reference: a plain single-process PyTorch decoder with an MoE layer, none of Penstock's parts.

It sees the whole batch of all ranks. Microbatches matter to it only where they matter to the mathematics:
capacity is counted per microbatch, and so is the balance loss of the group "microbatch".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the mathematics depends on. pieces: lists of sample numbers that form one microbatch."""

    num_layers: int
    num_heads: int
    moe_layers: frozenset[int]
    num_experts: int
    top_k: int
    swiglu: bool
    renormalise: bool
    capacity_factor: float | None
    min_capacity: int
    aux_coeff: float
    aux_global: bool
    z_coeff: float
    pieces: list[list[int]]


def reference_loss(weights: Weights, settings: Settings, tokens_BL: Tensor, labels_BL: Tensor) -> Tensor:
    """Mean token loss over valid labels plus balance and z losses, summed over layers."""
    h = weights["token_embedding.weight"][tokens_BL]
    h = h + weights["position_embedding.weight"][: tokens_BL.shape[1]]
    extra = h.new_zeros(())
    for layer in range(settings.num_layers):
        w = {k.removeprefix(f"blocks.{layer}."): v for k, v in weights.items() if f"blocks.{layer}." in k}
        h = h + _attention(_norm(h, w, "attention_norm"), w, settings.num_heads)
        x = _norm(h, w, "feed_forward_norm")
        if layer in settings.moe_layers:
            out, more = _moe(x, w, settings)
            h, extra = h + out, extra + more
        else:
            h = h + F.gelu(x @ w["feed_forward.up.weight"].T) @ w["feed_forward.down.weight"].T
    logits = _norm(h, weights, "final_norm") @ weights["output.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten(), ignore_index=-100) + extra


def _norm(x: Tensor, w: Weights, name: str) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _attention(x: Tensor, w: Weights, heads: int) -> Tensor:
    batch, length, hidden = x.shape
    q, k, v = (x @ w["attention.qkv.weight"].T).chunk(3, dim=-1)
    q, k, v = (t.reshape(batch, length, heads, -1).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(hidden // heads)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(batch, length, hidden) @ w["attention.out.weight"].T


def _moe(x: Tensor, w: Weights, s: Settings) -> tuple[Tensor, Tensor]:
    """Token by token, choice by choice. Returns the layer's output and its share of the extra losses."""
    logits = x @ w["feed_forward.router.gate"].T
    probability = logits.softmax(-1)
    out = torch.zeros_like(x)
    chosen = torch.zeros(len(s.pieces), s.num_experts, dtype=x.dtype)
    for p, samples in enumerate(s.pieces):
        _route_piece(x, probability, out, chosen[p], samples, w, s)
    tokens = x.shape[0] * x.shape[1]
    z = logits.logsumexp(-1).square().sum() / tokens
    return out, s.aux_coeff * _balance(probability, chosen, s) + s.z_coeff * z


def _route_piece(
    x: Tensor, probability: Tensor, out: Tensor, chosen: Tensor, samples: list[int], w: Weights, s: Settings
) -> None:
    places = [(b, t) for b in samples for t in range(x.shape[1])]
    slots = math.inf
    if s.capacity_factor is not None:
        wanted = Decimal(str(s.capacity_factor)) * s.top_k * len(places) / s.num_experts
        slots = max(s.min_capacity, math.ceil(wanted))
    taken = [0] * s.num_experts
    best = {place: probability[place].topk(s.top_k) for place in places}
    for choice in range(s.top_k):
        for place in places:
            expert = int(best[place].indices[choice])
            chosen[expert] += 1
            taken[expert] += 1
            if taken[expert] > slots:
                continue
            weight = best[place].values[choice]
            if s.renormalise:
                weight = weight / best[place].values.sum()
            out[place] = out[place] + weight * _expert(x[place], w, expert, s.swiglu)


def _expert(x: Tensor, w: Weights, expert: int, swiglu: bool) -> Tensor:
    name = "feed_forward.experts"
    up = x @ w[f"{name}.w_up"][expert]
    hidden = F.silu(x @ w[f"{name}.w_gate"][expert]) * up if swiglu else F.gelu(up)
    return hidden @ w[f"{name}.w_down"][expert]


def _balance(probability: Tensor, chosen: Tensor, s: Settings) -> Tensor:
    """E * sum_e f_e P_e, over the whole batch or as a token-weighted mean over microbatches."""
    groups = [list(range(len(s.pieces)))] if s.aux_global else [[p] for p in range(len(s.pieces))]
    total, tokens = probability.new_zeros(()), probability.shape[0] * probability.shape[1]
    for group in groups:
        share = chosen[group].sum(0) / chosen[group].sum()
        mine = probability[[b for p in group for b in s.pieces[p]]].flatten(0, 1)
        total = total + s.num_experts * (share * mine.mean(0)).sum() * len(mine) / tokens
    return total
