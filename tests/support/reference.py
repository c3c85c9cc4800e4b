"""The reference: a plain single-process PyTorch decoder with an MoE layer, none of Penstock's parts.

It sees the whole batch of all ranks. Microbatches and layouts matter to it only where they matter to the
mathematics: capacity is counted per microbatch, and by every rank that routes tokens of its own; the balance
loss of the group "microbatch" is judged by microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.reference_moe import Weights, moe_layer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the mathematics depends on. pieces: lists of sample numbers that form one microbatch. seats: the
    samples by which slots of each are counted. shares: the positions of a sample that are routed together;
    none = all.

    gate: its name. groups: how many, and how many a token may use. modules: experts are modules of their own.
    padding: bool [B, L], True where a token counts for nothing. documents: which places of every sample are
    one document; none = a sample is one.
    """

    num_layers: int
    num_heads: int
    moe_layers: frozenset[int]
    num_experts: int
    top_k: int
    swiglu: bool
    renormalise: bool
    gate: str
    scale: float
    groups: tuple[int, int] | None
    slots_per_expert: int
    modules: bool
    seed: int
    padding: Tensor | None
    capacity_factor: float | None
    min_capacity: int
    aux_coeff: float
    aux_group: str
    z_coeff: float
    pieces: list[list[int]]
    seats: list[int]
    shares: list[range] = field(default_factory=list)
    documents: list[list[range]] | None = None


def reference_loss(weights: Weights, settings: Settings, tokens_BL: Tensor, labels_BL: Tensor) -> Tensor:
    """Mean token loss over valid labels plus balance and z losses, summed over layers."""
    h = weights["token_embedding.weight"][tokens_BL]
    batch, length = tokens_BL.shape
    documents = settings.documents or [[range(length)]] * batch
    places = [[place - each.start for each in sample for place in each] for sample in documents]
    h = h + weights["position_embedding.weight"][torch.tensor(places, dtype=torch.int64).view(batch, length)]
    extra = h.new_zeros(())
    for layer in range(settings.num_layers):
        w = {k.removeprefix(f"blocks.{layer}."): v for k, v in weights.items() if f"blocks.{layer}." in k}
        h = h + _attention(_norm(h, w, "attention_norm"), w, settings.num_heads, documents)
        x = _norm(h, w, "feed_forward_norm")
        if layer in settings.moe_layers:
            out, more = _moe(x, layer, w, settings)
            h, extra = h + out, extra + more
        else:
            h = h + F.gelu(x @ w["feed_forward.up.weight"].T) @ w["feed_forward.down.weight"].T
    head = weights.get("output.weight", weights["token_embedding.weight"])  # they may be one matrix
    logits = _norm(h, weights, "final_norm") @ head.T
    return F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten(), ignore_index=-100) + extra


def _norm(x: Tensor, w: Weights, name: str) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _attention(x: Tensor, w: Weights, heads: int, documents: list[list[range]]) -> Tensor:
    """Document by document."""
    samples = []
    for x_1LM, parts in zip(x.split(1), documents, strict=True):
        found = [_attend(x_1LM[:, part.start : part.stop], w, heads) for part in parts]
        samples.append(torch.cat(found, dim=1))
    return torch.cat(samples)


def _attend(x: Tensor, w: Weights, heads: int) -> Tensor:
    batch, length, hidden = x.shape
    q, k, v = (x @ w["attention.qkv.weight"].T).chunk(3, dim=-1)
    q, k, v = (t.reshape(batch, length, heads, -1).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(hidden // heads)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(batch, length, hidden) @ w["attention.out.weight"].T


def _moe(x: Tensor, layer: int, w: Weights, s: Settings) -> tuple[Tensor, Tensor]:
    """Token by token, choice by choice. Returns the layer's output and its share of the extra losses."""
    here = {k.removeprefix("feed_forward."): v for k, v in w.items() if k.startswith("feed_forward.")}
    return moe_layer(x, here, s, layer)
