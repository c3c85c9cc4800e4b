"""The reference of the MoE layer: loops over samples, tokens, choices and experts, plain PyTorch.

Of Penstock it uses the noise of the noisy gate alone, which is data like the weights.
"""

from __future__ import annotations

import math
from decimal import Decimal
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.moe.gates import FIRST_PLACE, normal
from penstock.moe.routers import SampleKeys

if TYPE_CHECKING:
    from tests.support.reference import Settings

Weights = dict[str, Tensor]
Place = tuple[int, int]
"""Sample and position."""


def moe_layer(x: Tensor, w: Weights, s: Settings, layer: int) -> tuple[Tensor, Tensor]:
    """x [B, L, M] to the layer's output and its balance and z-losses with their coefficients."""
    out, chosen = torch.zeros_like(x), torch.zeros(x.shape[0], s.num_experts, dtype=torch.float64)
    logits = _logits(x, w, s, layer)
    valid = torch.ones(x.shape[:2], dtype=torch.bool) if s.padding is None else ~s.padding
    shares = s.shares or [range(x.shape[1])]
    for (samples, expert_slots), share in product(zip(s.pieces, s.expert_slots, strict=True), shares):
        places = [(b, t) for b in samples for t in share if valid[b, t]]
        slots = _slots(expert_slots * len(shares[0]), s)
        if s.gate == "soft":
            _mix_slots(x, logits, out, places, samples, w, s)
            chosen[samples] = s.slots_per_expert
        elif s.gate == "expert_choice":
            _experts_choose(x, logits, out, chosen, int(slots), places, w, s)
        else:
            _tokens_choose(x, logits, out, chosen, slots, places, w, s)
    for b, t in [(b, t) for b in range(x.shape[0]) for t in range(x.shape[1])]:
        if any(name.startswith("shared.") for name in w):
            out[b, t] = out[b, t] + _feed_forward(x[b, t], _shared(w), s)
    tokens = valid.sum()
    z = (logits.flatten(2).logsumexp(-1).square() * valid).sum() / tokens
    return out, s.aux_coeff * _balance(_probability(logits, s), chosen, valid, s) + s.z_coeff * z


def _logits(x: Tensor, w: Weights, s: Settings, layer: int) -> Tensor:
    """[B, L, E], for a soft gate [B, L, E, S]."""
    gate = w["gate.weight"]
    if s.gate == "soft":
        rows = gate / gate.norm(dim=1, keepdim=True) * w["gate.logit_scale"]
        logits = (x / x.norm(dim=-1, keepdim=True)) @ rows.T
        by_slot: Tensor = logits.view(*x.shape[:2], s.num_experts, s.slots_per_expert)
        return by_slot
    if s.gate == "cosine":
        low, rows = x @ w["gate.projection"].T, gate / gate.norm(dim=1, keepdim=True)
        cosine: Tensor = (low / low.norm(dim=-1, keepdim=True)) @ rows.T
        return cosine / torch.exp(w["gate.log_temperature"])
    logits = x @ gate.T
    if s.gate == "noisy":
        keys = SampleKeys(s.seed, torch.arange(x.shape[0]))
        noise = normal(logits.shape, FIRST_PLACE + layer, keys).to(x.dtype)
        logits = logits + noise * torch.log1p(torch.exp(x @ w["gate.noise_weight"].T))
    return logits


def _scores(logits: Tensor, s: Settings) -> Tensor:
    return 1 / (1 + torch.exp(-logits)) if s.gate == "sigmoid" else logits.softmax(-1)


def _probability(logits: Tensor, s: Settings) -> Tensor | None:
    """What balance is judged by; None where experts are balanced by construction."""
    if s.gate in ("soft", "expert_choice"):
        return None
    scores = _scores(logits, s)
    return scores / scores.sum(-1, keepdim=True)


def _tokens_choose(
    x: Tensor,
    logits: Tensor,
    out: Tensor,
    chosen: Tensor,
    slots: float,
    places: list[Place],
    w: Weights,
    s: Settings,
) -> None:
    scores = _scores(logits, s)
    best = {place: _best(scores[place].detach(), s) for place in places}
    taken = [0] * s.num_experts
    for choice in range(s.top_k):
        for place in places:
            expert = best[place][choice]
            chosen[place[0], expert] += 1
            taken[expert] += 1
            if taken[expert] > slots:
                continue
            weight = scores[place][expert]
            if s.renormalise:
                weight = weight / sum(scores[place][e] for e in best[place])
            out[place] = out[place] + s.scale * weight * _expert(x[place], w, expert, s)


def _best(scores: Tensor, s: Settings) -> list[int]:
    """The chosen experts of one token, best first."""
    allowed = list(range(s.num_experts))
    if s.groups is not None:
        groups, limit = s.groups
        size = s.num_experts // groups
        worth = [
            float(scores[g * size : (g + 1) * size].topk(min(2, size)).values.sum()) for g in range(groups)
        ]
        top = sorted(range(groups), key=lambda g: -worth[g])[:limit]
        allowed = [e for e in allowed if e // size in top]
    return sorted(allowed, key=lambda e: -float(scores[e]))[: s.top_k]


def _slots(tokens: int, s: Settings) -> float:
    """Slots per expert, counted with padding and for the longest share: they are as many on all ranks."""
    if s.capacity_factor is None:
        return math.inf
    wanted = Decimal(str(s.capacity_factor)) * s.top_k * tokens / s.num_experts
    return max(s.min_capacity, math.ceil(wanted))


def _experts_choose(
    x: Tensor,
    logits: Tensor,
    out: Tensor,
    chosen: Tensor,
    slots: int,
    places: list[Place],
    w: Weights,
    s: Settings,
) -> None:
    probability = logits.softmax(-1)
    for expert in range(s.num_experts):
        for place in sorted(places, key=lambda p: -float(probability[p][expert].detach()))[:slots]:
            chosen[place[0], expert] += 1
            weight = s.scale * probability[place][expert]
            out[place] = out[place] + weight * _expert(x[place], w, expert, s)


def _mix_slots(
    x: Tensor, logits: Tensor, out: Tensor, places: list[Place], samples: list[int], w: Weights, s: Settings
) -> None:
    for b in samples:
        tokens = [t for sample, t in places if sample == b]
        for expert in range(s.num_experts):
            for slot in range(s.slots_per_expert):
                mix = logits[b, tokens, expert, slot].softmax(0)
                made = _expert(mix @ x[b, tokens], w, expert, s)
                for t in tokens:
                    weight = logits[b, t].flatten().softmax(0).view(s.num_experts, -1)[expert, slot]
                    out[b, t] = out[b, t] + weight * made


def _expert(x: Tensor, w: Weights, expert: int, s: Settings) -> Tensor:
    if s.modules:
        mine = f"experts.expert_modules.{expert}"
        return torch.tanh(x @ w[f"{mine}.weight"].T + w[f"{mine}.bias"])
    names = ("w_gate", "w_up", "w_down")
    return _feed_forward(x, {n: w[f"experts.{n}"][expert] for n in names if f"experts.{n}" in w}, s)


def _shared(w: Weights) -> Weights:
    start = "shared.expert."
    return {name.removeprefix(start): v[0] for name, v in w.items() if name.startswith(start)}


def _feed_forward(x: Tensor, w: Weights, s: Settings) -> Tensor:
    up = x @ w["w_up"]
    hidden = F.silu(x @ w["w_gate"]) * up if s.swiglu else F.gelu(up)
    return hidden @ w["w_down"]


def _balance(probability: Tensor | None, chosen: Tensor, valid: Tensor, s: Settings) -> Tensor:
    """E * sum_e f_e P_e, over the group's tokens, as a token-weighted mean over groups."""
    if probability is None:
        return chosen.new_zeros(())
    everybody = [b for piece in s.pieces for b in piece]
    groups = {"global": [everybody], "microbatch": s.pieces, "sequence": [[b] for b in everybody]}[
        s.aux_group
    ]
    total = probability.new_zeros(())
    for group in groups:
        share = chosen[group].sum(0) / chosen[group].sum().clamp(min=1)
        mine = (probability[group] * valid[group].unsqueeze(-1)).flatten(0, 1).sum(0)
        total = total + s.num_experts * (share * mine).sum() / valid.sum()
    return total
