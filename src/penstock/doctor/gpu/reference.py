"""The plain model that steps are compared with: one process, the processor, float64, and no part of a stack.

It has what the small model of the stages has: grouped-query attention with normed and rotated heads, softmax
gates whose chosen weights sum to one, GELU experts, and no capacity, dropout or balance loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.models import ModelConfig

Weights = Mapping[str, Tensor]


def reference_loss(
    weights: Weights, model: ModelConfig, top_k: int, tokens_BL: Tensor, labels_BL: Tensor
) -> Tensor:
    """Return the mean loss over all tokens of the whole batch.

    weights: by their names in the model, experts by `name.EXPERT`.
    """
    h_BLM, eps = weights["model.embed_tokens.weight"][tokens_BL], model.rms_norm_eps
    for layer in range(model.num_layers):
        mine = f"model.layers.{layer}."
        block = {name.removeprefix(mine): each for name, each in weights.items() if name.startswith(mine)}
        h_BLM = h_BLM + _attention(_norm(h_BLM, block["input_layernorm.weight"], eps), block, model)
        h_BLM = h_BLM + _experts(_norm(h_BLM, block["post_attention_layernorm.weight"], eps), block, top_k)
    logits = _norm(h_BLM, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten())


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _attention(x_BLM: Tensor, weights: Weights, model: ModelConfig) -> Tensor:
    q, k, v = (
        (x_BLM @ weights[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, model.head_size))
        for name in "qkv"
    )
    q, k = (
        _rotated(_norm(each, weights[f"self_attn.{name}_norm.weight"], model.rms_norm_eps), model.rope_theta)
        for name, each in (("q", q), ("k", k))
    )
    times = model.num_heads // model.key_value_heads
    q, k, v = (each.transpose(1, 2) for each in (q, *(e.repeat_interleave(times, dim=2) for e in (k, v))))
    scores_BALL = q @ k.transpose(-1, -2) / math.sqrt(model.head_size)
    later = torch.ones(scores_BALL.shape[-2:], dtype=torch.bool).triu(1)
    mixed_BALK = scores_BALL.masked_fill(later, -math.inf).softmax(-1) @ v
    out_BLM: Tensor = mixed_BALK.transpose(1, 2).flatten(2) @ weights["self_attn.o_proj.weight"].T
    return out_BLM


def _rotated(x_BLAK: Tensor, theta: float) -> Tensor:
    """Turn pairs of numbers by the place of their token, by angles in float32."""
    length, size = x_BLAK.shape[1], x_BLAK.shape[-1]
    rates = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    angles_L1H = torch.outer(torch.arange(length).float(), rates).unsqueeze(1)
    cos, sin = angles_L1H.cos().to(x_BLAK.dtype), angles_L1H.sin().to(x_BLAK.dtype)
    a, b = x_BLAK.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _experts(x_BLM: Tensor, weights: Weights, top_k: int) -> Tensor:
    """Return the sum over each token's experts; every expert computes every token, so this has no routing."""
    scores_BLE = (x_BLM @ weights["mlp.gate.weight"].T).softmax(-1)
    top = scores_BLE.topk(top_k, dim=-1)
    chosen_BLE = torch.zeros_like(scores_BLE).scatter(-1, top.indices, top.values)
    shares_BLE = chosen_BLE / chosen_BLE.sum(-1, keepdim=True)
    out_BLM = torch.zeros_like(x_BLM)
    for expert in range(scores_BLE.shape[-1]):
        up, down = (weights[f"mlp.experts.{name}.{expert}"] for name in ("w_up", "w_down"))
        out_BLM = out_BLM + shares_BLE[..., expert : expert + 1] * (F.gelu(x_BLM @ up) @ down)
    return out_BLM
