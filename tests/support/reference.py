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
    """What the mathematics depends on. pieces: lists of sample numbers that form one microbatch.
    expert_slots: the samples by which slots of each are counted. shares: the positions of a sample that are
    routed together; none = all.

    key_value_heads, head_size, theta, eps: of attention and norms.
    gate: its name. groups: how many, and how many a token may use. modules: experts are modules of their own.
    padding: bool [B, L], True where a token counts for nothing. documents: which places of every sample are
    one document; none = a sample is one.
    """

    num_layers: int
    num_heads: int
    key_value_heads: int
    head_size: int
    theta: float
    eps: float
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
    expert_slots: list[int]
    shares: list[range] = field(default_factory=list)
    documents: list[list[range]] | None = None


def reference_loss(weights: Weights, settings: Settings, tokens_BL: Tensor, labels_BL: Tensor) -> Tensor:
    """Mean token loss over valid labels plus balance and z losses, summed over layers."""
    h = weights["model.embed_tokens.weight"][tokens_BL]
    batch, length = tokens_BL.shape
    documents = settings.documents or [[range(length)]] * batch
    extra = h.new_zeros(())
    for layer in range(settings.num_layers):
        mine = f"model.layers.{layer}."
        w = {name.removeprefix(mine): weight for name, weight in weights.items() if name.startswith(mine)}
        h = h + _attention(_norm(h, w["input_layernorm.weight"], settings.eps), w, settings, documents)
        x = _norm(h, w["post_attention_layernorm.weight"], settings.eps)
        if layer in settings.moe_layers:
            here = {name.removeprefix("mlp."): v for name, v in w.items() if name.startswith("mlp.")}
            out, more = moe_layer(x, here, settings, layer)
            h, extra = h + out, extra + more
        else:
            gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
            h = h + gate / (1 + torch.exp(-gate)) * up @ w["mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])  # they may be one matrix
    logits = _norm(h, weights["model.norm.weight"], settings.eps) @ head.T
    return F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten(), ignore_index=-100) + extra


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def _attention(x: Tensor, w: Weights, s: Settings, documents: list[list[range]]) -> Tensor:
    """Document by document; samples that are one each at once."""
    if all(len(parts) == 1 for parts in documents):
        return _attend(x, w, s)
    samples = []
    for x_1LM, parts in zip(x.split(1), documents, strict=True):
        found = [_attend(x_1LM[:, part.start : part.stop], w, s) for part in parts]
        samples.append(torch.cat(found, dim=1))
    return torch.cat(samples)


def _attend(x: Tensor, w: Weights, s: Settings) -> Tensor:
    """A head of keys and values serves several of queries, one after the other."""
    length = x.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, s.head_size)).transpose(1, 2)
        for name in "qkv"
    )
    q, k = (_norm(each, w[f"self_attn.{name}_norm.weight"], s.eps) for name, each in (("q", q), ("k", k)))
    k, v = (each.repeat_interleave(s.num_heads // s.key_value_heads, dim=1) for each in (k, v))
    scores = _rotated(q, s.theta) @ _rotated(k, s.theta).transpose(-1, -2) / math.sqrt(s.head_size)
    mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T


def _rotated(x: Tensor, theta: float) -> Tensor:
    """Pairs of numbers turned by the place of their token; angles are float32, as in transformers."""
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = 1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angles = torch.outer(torch.arange(length).float(), rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
