"""The plain model that steps are compared with: one process, the processor, float64, and no part of a stack.

It has what the small model of the stages has: learnt positions, norms with biases, softmax gates whose chosen
weights sum to one, GELU experts, and no capacity, dropout or balance loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


def reference_loss(
    weights: Weights, layers: int, heads: int, top_k: int, tokens_BL: Tensor, labels_BL: Tensor
) -> Tensor:
    """Return the mean loss over all tokens of the whole batch.

    weights: by their names in the model, experts by `name.EXPERT`.
    """
    length = tokens_BL.shape[1]
    h_BLM = weights["token_embedding.weight"][tokens_BL] + weights["position_embedding.weight"][:length]
    for layer in range(layers):
        block = {name.removeprefix(f"blocks.{layer}."): each for name, each in weights.items()}
        h_BLM = h_BLM + _attention(_norm(h_BLM, block, "attention_norm"), block, heads)
        h_BLM = h_BLM + _experts(_norm(h_BLM, block, "feed_forward_norm"), block, top_k)
    logits = _norm(h_BLM, weights, "final_norm") @ weights["output.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten())


def _norm(x_BLM: Tensor, weights: Weights, name: str) -> Tensor:
    return F.layer_norm(x_BLM, x_BLM.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def _attention(x_BLM: Tensor, weights: Weights, heads: int) -> Tensor:
    qkv_BLN = x_BLM @ weights["attention.qkv.weight"].T
    q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in qkv_BLN.chunk(3, dim=-1))
    scores_BALL = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    later = torch.ones(scores_BALL.shape[-2:], dtype=torch.bool).triu(1)
    mixed_BALK = scores_BALL.masked_fill(later, -math.inf).softmax(-1) @ v
    out_BLM: Tensor = mixed_BALK.transpose(1, 2).flatten(2) @ weights["attention.out.weight"].T
    return out_BLM


def _experts(x_BLM: Tensor, weights: Weights, top_k: int) -> Tensor:
    """Return the sum over each token's experts; every expert computes every token, so this has no routing."""
    scores_BLE = (x_BLM @ weights["feed_forward.gate.weight"].T).softmax(-1)
    top = scores_BLE.topk(top_k, dim=-1)
    chosen_BLE = torch.zeros_like(scores_BLE).scatter(-1, top.indices, top.values)
    shares_BLE = chosen_BLE / chosen_BLE.sum(-1, keepdim=True)
    out_BLM = torch.zeros_like(x_BLM)
    for expert in range(scores_BLE.shape[-1]):
        up, down = (weights[f"feed_forward.experts.{name}.{expert}"] for name in ("w_up", "w_down"))
        out_BLM = out_BLM + shares_BLE[..., expert : expert + 1] * (F.gelu(x_BLM @ up) @ down)
    return out_BLM
