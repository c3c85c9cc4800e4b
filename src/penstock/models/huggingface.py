"""MoE blocks of Hugging Face transformers (5.x) as Penstock layers with the same weights.

transformers is never imported: a block is recognised by the name of its class and read by its attributes.
Shapes: M hidden size, H expert hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.decoder import on_meta
from penstock.moe import (
    ExpertBias,
    ExpertGroups,
    MoELayer,
    SharedExpert,
    SigmoidRouter,
    SoftmaxRouter,
    SortPermutation,
    SwiGLUExperts,
    TokenRouter,
)
from penstock.moe.exchange import Exchange
from penstock.placement import ExpertPlacement

AS_IN = "it must be as in transformers 5.23"
SILU = ("SiLU", "SiLUActivation")
"""Classes of the activation that SwiGLU experts have: torch's and transformers'."""


def layer_from_hugging_face(block: nn.Module, *, exchange: Exchange | None = None) -> MoELayer:
    """Return a layer that computes what `block` does: the same mathematics, with copied weights.

    Every rank must have the same block. Without an exchange all experts are on this rank. Supported are the
    blocks of Mixtral, Qwen3-MoE, OLMoE and DeepSeek-V3. Taken over are the router (top_k, renormalisation,
    scaling factor, groups, correction bias), the experts and the shared experts, each with its dtype and
    device and whether it is frozen, and the block's train or eval mode. Nothing is dropped and no memory is
    shared. DeepSeek's correction bias steers the choice and stays constant, as in transformers; to let
    `update_expert_biases` move it, set `layer.gate.bias.rate`. The router computes in float32 at least. Those
    of transformers round float64 to float32, and Mixtral's, Qwen3-MoE's and OLMoE's compute logits in the
    type of the weights: in bfloat16 close choices can differ.

    Args:
        block: The MoE block.
        exchange: `penstock.ExpertParallel`, whose ranks share the experts: each copies its part of the
            block's.

    Returns:
        A layer that returns what the block returns and can replace it in the model; its `losses` are
        Penstock's own, and transformers records no router logits of the layer.

    Raises:
        ValueError: For any other class, and for features without a counterpart in the layer: other
            activations than silu, jitter noise, biases, adapters, quantised or sharded weights.
    """
    kind = BLOCKS.get(type(block).__name__)
    if kind is None:
        raise ValueError(f"{type(block).__name__} cannot be taken over; supported: {', '.join(BLOCKS)}")
    source: Any = block
    tensors, make_gate = kind
    # Any other tensor, such as a bias, an adapter or a scale of quantised weights, affects the output.
    named = chain(block.named_parameters(remove_duplicate=False), block.named_buffers(remove_duplicate=False))
    present = {name for name, _ in named}
    extra, missing = sorted(present - tensors), sorted(tensors - present)
    if extra:
        raise ValueError(f"{type(block).__name__} has {', '.join(extra)}, which a layer has no place for")
    if missing:
        raise ValueError(f"{type(block).__name__} has no {', '.join(missing)}; {AS_IN}")
    experts, hidden = source.gate.weight.shape
    width = source.experts.down_proj.shape[-1]
    for name, wanted in (
        ("gate_up_proj", (experts, 2 * width, hidden)),
        ("down_proj", (experts, hidden, width)),
    ):
        shape = tuple(getattr(source.experts, name).shape)
        if shape != wanted:
            raise ValueError(
                f"experts.{name} has shape {shape}, and the gate's {experts} experts need {wanted}; "
                "if the weights are packed or spread over ranks, load the model whole"
            )
    layer = MoELayer(
        gate=make_gate(source),
        permutation=SortPermutation(len(source.gate.weight)),
        expert=_experts(source.experts, exchange),
        shared=_shared(source.shared_experts) if hasattr(source, "shared_experts") else None,
        exchange=exchange,
    )
    return layer.train(block.training)


# ---- routers -----------------------------------------------------------------------------------------------


def _softmax_router(block: Any) -> TokenRouter:
    """Return the gate of Mixtral, Qwen3-MoE and OLMoE; Mixtral's weights are always renormalised."""
    router, is_mixtral = block.gate, type(block).__name__ == MIXTRAL
    if is_mixtral and (jitter := _setting(block, "jitter_noise")):
        raise ValueError(f"jitter_noise = {jitter}: a layer has no multiplicative noise; set it to 0")
    renormalise = is_mixtral or bool(_setting(router, "norm_topk_prob"))
    experts, hidden = router.weight.shape
    with on_meta():
        gate = SoftmaxRouter(hidden, experts, _setting(router, "top_k"), renormalise=renormalise)
    gate.weight = _copy(router.weight, router.weight)
    return gate


def _deepseek_router(block: Any) -> TokenRouter:
    """Return DeepSeek-V3's gate: sigmoids; a bias and limited groups for the choice, not for the weights.

    Outside the best groups the choice sees minus infinity. transformers adds 1e-20 to the sum by which
    weights are divided, Penstock the smallest normal number: results differ only where all chosen logits are
    below -30.
    """
    router = block.gate
    experts, hidden = router.weight.shape
    with on_meta():
        gate = SigmoidRouter(
            hidden,
            experts,
            _setting(router, "top_k"),
            renormalise=bool(_setting(router, "norm_topk_prob")),
            scale=float(_setting(router, "routed_scaling_factor")),
            groups=ExpertGroups(
                groups=_setting(router, "num_group"), limit_to=_setting(router, "topk_group"), best=2
            ),
        )
    gate.weight = _copy(router.weight, router.weight)
    value_E = router.e_score_correction_bias
    gate.bias = ExpertBias(len(value_E), rate=0.0).to(value_E.device)
    gate.bias.value_E.copy_(value_E)
    return gate


# ---- experts -----------------------------------------------------------------------------------------------


def _experts(source: Any, exchange: Exchange | None) -> SwiGLUExperts:
    """Return this rank's experts. transformers stacks gate and up, [E, 2H, M], and has down as [E, M, H]."""
    _check_activation(source)
    experts, hidden, width = source.down_proj.shape
    ranks, rank = (1, 0) if exchange is None else (exchange.ep_size, exchange.ep_rank)
    held = ExpertPlacement.even(experts, ranks).held(rank)
    own = slice(held[0], held[-1] + 1)
    with on_meta():
        made = SwiGLUExperts(hidden, width, own.stop - own.start)
    gate_EHM, up_EHM = source.gate_up_proj[own].chunk(2, dim=1)
    made.w_gate = _copy(gate_EHM.transpose(1, 2), source.gate_up_proj)
    made.w_up = _copy(up_EHM.transpose(1, 2), source.gate_up_proj)
    made.w_down = _copy(source.down_proj[own].transpose(1, 2), source.down_proj)
    return made


def _shared(source: Any) -> SharedExpert:
    """Return the shared experts: ordinary linear layers of their summed width."""
    _check_activation(source)
    hidden, width = source.down_proj.weight.shape
    with on_meta():
        made = SwiGLUExperts(hidden, width, 1)
    for name in ("gate", "up", "down"):
        weight = getattr(source, f"{name}_proj").weight
        setattr(made, f"w_{name}", _copy(weight.t().unsqueeze(0), weight))
    return SharedExpert(made)


def _copy(view: Tensor, source: Tensor) -> nn.Parameter:
    """Return a copy of `view`, which is cut from `source`; frozen if `source` is."""
    copied = view.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copied, requires_grad=source.requires_grad)


# ---- what cannot be taken over -----------------------------------------------------------------------------


def _setting(module: Any, name: str) -> Any:
    """Return an attribute that transformers 5.23 has there; other versions may give it another meaning."""
    if not hasattr(module, name):
        raise ValueError(f"{type(module).__name__} has no {name}; {AS_IN}")
    return getattr(module, name)


def _check_activation(source: Any) -> None:
    name = type(_setting(source, "act_fn")).__name__
    if name not in SILU:
        raise ValueError(f"activation {name} of {type(source).__name__}: SwiGLU experts have silu only")


# ---- which blocks ------------------------------------------------------------------------------------------

ROUTED = frozenset({"gate.weight", "experts.gate_up_proj", "experts.down_proj"})
DEEPSEEK = ROUTED | {
    "gate.e_score_correction_bias",
    "shared_experts.gate_proj.weight",
    "shared_experts.up_proj.weight",
    "shared_experts.down_proj.weight",
}


MIXTRAL = "MixtralSparseMoeBlock"
BLOCKS: dict[str, tuple[frozenset[str], Callable[[Any], TokenRouter]]] = {
    MIXTRAL: (ROUTED, _softmax_router),
    "Qwen3MoeSparseMoeBlock": (ROUTED, _softmax_router),
    "OlmoeSparseMoeBlock": (ROUTED, _softmax_router),
    "DeepseekV3MoE": (DEEPSEEK, _deepseek_router),
}
"""Classes of transformers, with the names of all their parameters and buffers, and what makes their gate."""
