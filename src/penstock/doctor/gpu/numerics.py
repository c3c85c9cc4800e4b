"""Whole steps of every schedule and main option, compared with a plain model on the processor.

The plain model is one process in float64, and no part of a stack. It has what the small model of the stages
has: grouped-query attention with normed and rotated heads, softmax gates whose chosen weights sum to one,
GELU experts, and no capacity, dropout or balance loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.doctor.gpu.groups import PAIR, fits
from penstock.doctor.gpu.here import (
    BATCH,
    LARGER,
    MODEL,
    OPTIMIZER,
    Case,
    Here,
    batch_of,
    logical,
    small_machinery,
    small_run,
)
from penstock.doctor.gpu.outcome import Outcome
from penstock.mesh import group_sizes, holders
from penstock.models import ModelConfig, MoEDecoder
from penstock.runtime import Machinery, PipelinedStack
from penstock.schedule import SCHEDULES
from penstock.sharding import shardings_of
from penstock.train.config import Precision

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors relative to the reference.

    Attributes:
        loss, norm: The errors of the loss and of the norm of its gradients.
        parameters: The error of the step of all parameters of this rank together.
        worst: The tensor whose step is farthest off.
    """

    loss: float
    norm: float
    parameters: float
    worst: str = ""

    @property
    def numbers(self) -> dict[str, float]:
        return {"loss": self.loss, "norm": self.norm, "parameters": self.parameters}

    def beyond(self, limits: Errors) -> str:
        """Return which error is beyond its limit, in words; "" if none is. What is no number is beyond."""
        allowed = limits.numbers
        wrong = {what: error for what, error in self.numbers.items() if not error <= allowed[what]}
        return ", ".join(f"{what} is off by {error:.1e}" for what, error in wrong.items())


LIMITS: Final[dict[Precision, Errors]] = {
    "float32": Errors(loss=1e-4, norm=1e-4, parameters=1e-4),
    "bfloat16": Errors(loss=0.02, norm=0.05, parameters=0.3),
}
"""By precision. bfloat16 has eight bits, and a token at the edge between two experts may go to the other."""

MOST_SHOWN: Final = 3
BOTH: Final = ("flowmoe", "penstock")
"""Schedules with which every option is tried: the usual one, and the one that is searched."""


def run(here: Here) -> Outcome:
    """Run every case that the number of ranks allows."""
    torch.set_float32_matmul_precision("highest")  # NVIDIA's containers choose TF32, which is off by 4e-4
    errors: list[tuple[Case, Errors]] = []
    by_layout: dict[tuple[object, ...], list[Case]] = {}
    for case in cases(here.world_size, here.node_size):
        by_layout.setdefault(tuple(sorted(case.parallel.items())), []).append(case)
    for same_layout in by_layout.values():
        machinery = small_machinery(here, same_layout[0])
        errors += [(case, check(here, case, machinery)) for case in same_layout]
        machinery.close()
    return outcome_of(errors)


def outcome_of(found: list[tuple[Case, Errors]]) -> Outcome:
    """Return the verdict on all cases."""
    wrong, lines = [], []
    for precision, limits in LIMITS.items():
        here = [(case, errors) for case, errors in found if case.precision == precision]
        wrong += [
            f"{case.name} in {precision}: {beyond} ({errors.worst})"
            for case, errors in here
            if (beyond := errors.beyond(limits))
        ]
        largest = max((errors.parameters for _, errors in here), default=0.0)
        lines.append(f"{precision}: {len(here)} cases, steps of parameters are off by {largest:.1e} at most")
    figures = {"cases": [_plain(case, errors) for case, errors in found]}
    more = f"; and {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
    return Outcome.of(lines, figures, wrong="; ".join(wrong[:MOST_SHOWN]) + more)


def _plain(case: Case, errors: Errors) -> dict[str, Any]:
    """Return the figures of a case; what is no number is None, as JSON has no other."""
    numbers = {what: each if math.isfinite(each) else None for what, each in errors.numbers.items()}
    about = {"case": case.name, "schedule": case.schedule, "precision": case.precision}
    return {**about, **numbers, "worst": errors.worst}


def cases(world_size: int, node_size: int) -> Iterator[Case]:
    """Yield all cases for so many ranks, in nodes of this size (0 = they differ), in both precisions."""
    for case in (*_schedules(), *_options(world_size)):
        for precision in LIMITS if fits(case.parallel, node_size) else ():
            yield replace(case, precision=precision)


def _schedules() -> Iterator[Case]:
    for name, system in SCHEDULES.items():
        shared = system.expert_form not in (None, "gather")  # it says how rows meet the shards of experts
        yield Case(name=name, schedule=name, parallel={"tp_size": 2, "etp_size": 2} if shared else {})


def _options(world_size: int) -> Iterator[Case]:
    """Yield options with the usual schedules. Capacities have room for all tokens: none is dropped."""
    always: dict[str, dict[str, Mapping[str, object]]] = {
        "capacity": {"moe": {"capacity_factor": float(world_size)}},
        "bounded rows": {"moe": {"bound_factor": 2.0}},
        "recomputed blocks": {"plan": {"recompute": "blocks"}},
        "recomputed experts": {"plan": {"recompute": "experts"}},
    }
    pairs: dict[str, dict[str, Mapping[str, object]]] = {
        "replicas of experts": {"parallel": {"ep_size": holders(world_size, PAIR)}},
        "tensor parallel": {"parallel": {"tp_size": 2}},
        "tensor parallel, whole samples": {"parallel": {"tp_size": 2, "tokens": "replicated"}},
        "shards of experts": {"parallel": {"etp_size": 2}},
        "hierarchical": {
            "parallel": {"ranks_per_node": holders(world_size, PAIR)},
            "moe": {"dispatch": "hierarchical_2d"},
        },
        "one copy per node": {
            "parallel": {"ranks_per_node": holders(world_size, PAIR)},
            "moe": {"dispatch": "node_once"},
        },
        "sharded optimizer": {"optimizer": {"zero_stage": 1}},
        "sharded gradients": {"optimizer": {"zero_stage": 2}},
        "sums in order": {"optimizer": {"zero_stage": 1}, "parallel": {"reduce_scatter": "in_order"}},
        "samples move": {"placement": {"samples": "netmoe"}},
        "experts move": {"placement": {"experts": "least_loaded"}},
    }
    possible = {**always, **pairs} if PAIR in group_sizes(world_size) else always
    for name, settings in possible.items():
        for schedule in BOTH:
            yield Case(name=f"{schedule}, {name}", schedule=schedule, **settings)  # type: ignore[arg-type]


# ---- one case ----------------------------------------------------------------------------------------------


def check(here: Here, case: Case, machinery: Machinery) -> Errors:
    """Return how far a step of a case is from the reference.

    Args:
        machinery: The machinery of a case with the same layout.
    """
    ran = small_run(here, case, machinery)
    if case.learns_from_loads:
        ran.rehearse()
    before = ran.parameters()
    loss, norm = ran.step()
    after = ran.parameters()
    steps = {name: before[name] - after[name] for name in before}
    wanted = reference_step(ran.stack.moe.num_experts, machinery.layout.dp_size)
    parameters, worst = distance(ran.stack, steps, wanted.steps)
    return Errors(
        loss=abs(float(loss) - wanted.loss) / abs(wanted.loss),
        norm=abs(float(norm) - wanted.norm) / wanted.norm,
        parameters=parameters,
        worst=worst,
    )


@dataclass(frozen=True)
class Step:
    """A step of the reference: its loss, the norm of its gradients, and what parameters lost."""

    loss: float
    norm: float
    steps: Weights


@cache
def reference_step(num_experts: int, groups: int) -> Step:
    """Return the reference's step on the batch of so many groups of ranks."""
    case = Case(name="reference")
    moe = case.moe_config(num_experts)
    model = MoEDecoder(MODEL, moe)
    model.initialise(0)
    whole: Weights = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().double() * (LARGER if parameter.dim() >= 2 else 1.0)
        whole |= {each: part.clone().requires_grad_() for each, part in model.logical(name, tensor)}
    tokens, labels = batch_of(MODEL, BATCH * groups)
    loss = reference_loss(whole, MODEL, moe.top_k, tokens, labels)
    loss.backward()
    gradients = {name: each.grad for name, each in whole.items() if each.grad is not None}
    norm = float(torch.cat([each.flatten() for each in gradients.values()]).norm())
    limit = OPTIMIZER.clip_grad_norm or math.inf
    clipped = {name: each * min(1.0, limit / (norm + 1e-6)) for name, each in gradients.items()}
    # The first step of AdamW: both averages are corrected back to g and its square.
    steps = {name: OPTIMIZER.lr * g / (g.abs() + OPTIMIZER.eps) for name, g in clipped.items()}
    return Step(float(loss.detach()), norm, steps)


def distance(stack: PipelinedStack, ours: Weights, wanted: Weights) -> tuple[float, str]:
    """Return the error of all tensors of this rank relative to what is wanted, and the worst tensor."""
    shardings = shardings_of(stack.model)
    error, size, worst = 0.0, 0.0, (-1.0, "")
    for local, tensor in ours.items():
        for name, part in logical(stack, local, tensor):
            whole = wanted[name]
            own = shardings[local].part(whole) if local in shardings else whole
            off, right = float((part.double() - own).norm()), float(own.norm())
            error, size = error + off**2, size + right**2
            worst = max(worst, (off if math.isfinite(off) else math.inf, name))
    return (error / size) ** 0.5, worst[1]


Named = Mapping[str, Tensor]


def reference_loss(
    weights: Named, model: ModelConfig, top_k: int, tokens_BL: Tensor, labels_BL: Tensor
) -> Tensor:
    """Return the mean loss over all tokens of the whole batch.

    Args:
        weights: Weights by their names in the model, experts by `name.EXPERT`.
    """
    h_BLM, eps = weights["model.embed_tokens.weight"][tokens_BL], model.rms_norm_eps
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        block = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        h_BLM = h_BLM + _attention(_norm(h_BLM, block["input_layernorm.weight"], eps), block, model)
        h_BLM = h_BLM + _experts(_norm(h_BLM, block["post_attention_layernorm.weight"], eps), block, top_k)
    logits = _norm(h_BLM, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten())


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _attention(x_BLM: Tensor, weights: Named, model: ModelConfig) -> Tensor:
    q, k, v = (
        (x_BLM @ weights[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, model.head_size))
        for name in "qkv"
    )
    q, k = (
        _rotated(_norm(x, weights[f"self_attn.{name}_norm.weight"], model.rms_norm_eps), model.rope_theta)
        for name, x in (("q", q), ("k", k))
    )
    times = model.num_heads // model.key_value_heads
    q, k, v = (x.transpose(1, 2) for x in (q, *(e.repeat_interleave(times, dim=2) for e in (k, v))))
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


def _experts(x_BLM: Tensor, weights: Named, top_k: int) -> Tensor:
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
