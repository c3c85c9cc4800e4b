"""Families of models: places of their parts, how layers add experts' outputs, and one entry for each family.

Everything else (attention, positions, norms, masks, caches, routers) is the model's own code, which runs
unchanged.
Shapes: B samples, L tokens per sample, M hidden size, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.families.experts import STACKED, ExpertForm, FlatForm, WeighedForm

Finish = Callable[[Any, Tensor, Tensor], Tensor]
"""Maps layer, its output where experts return zeros and the MoE block's output to its output, [B, L, M]."""

Shared = Callable[[Any, Tensor], Tensor]
"""Maps an MoE block and tokens [T, M] to the output of its shared experts [T, M]."""


def add(layer: Any, residual_BLM: Tensor, out_BLM: Tensor) -> Tensor:
    """Add the output of the MoE block to the residual stream, as most layers do."""
    del layer
    return residual_BLM + out_BLM


@dataclass(frozen=True, kw_only=True)
class AttentionCut:
    """How ranks share the attention of a family: each has some heads (tensor parallelism).

    Everything else is whole on every rank.

    Attributes:
        norm: Path of the norm before attention in a layer; None = there is none.
        module: Path of attention in a layer, which calls it with `hidden_states`, normed, and with what it is
            called with itself.
        rows: Linear layers that are cut by what they return; those that a model lacks are passed over.
        columns: Linear layers that are cut by what they get; they return parts of a sum.
        heads: Parameters that have a number for each head.
        narrowed: Norms over all heads together: they stay whole, with the projections before them, and every
            rank computes them for all heads and goes on with its own.
        counts: Settings that are numbers of heads.
    """

    norm: str | None = "input_layernorm"
    module: str = "self_attn"
    rows: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    columns: tuple[str, ...] = ("o_proj",)
    heads: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()
    counts: tuple[str, ...] = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Models of one architecture in transformers.

    Attributes:
        name: `model_type` of its configuration.
        base: Path of the decoder in the model.
        layers: Path of the list of layers in the decoder.
        norm: Path of the norm after them in the decoder.
        block: Path of the MoE block in a layer.
        router: Path of the router in a block.
        experts: Path of the experts in a block.
        shared_module: Path of the shared experts in a block; None = there are none, or they run with
            attention.
        shared: What shared experts add; None = what they return.
        finish: What a layer does with the output of its block.
        coefficient: The model's name for the weight of its router loss; None = its weighting is not known.
        form: How experts are called and multiply.
        only: Settings of the configuration, the only values with which the model can be scheduled, and the
            reasons.
        attention: How ranks share attention; None = they cannot.
        uncut: Why they cannot.
        separates_documents: Whether tokens whose positions begin anew attend to none before them.
    """

    name: str
    base: str = "model"
    layers: str = "layers"
    norm: str = "norm"
    block: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    shared_module: str | None = None
    shared: Shared | None = None
    finish: Finish = add
    coefficient: str | None = "router_aux_loss_coef"
    form: ExpertForm = STACKED
    only: tuple[tuple[str, object, str], ...] = ()
    attention: AttentionCut | None = None
    uncut: str = "how heads lie in its attention is not described"
    separates_documents: bool = True

    def decoder(self, model: nn.Module) -> Any:
        """Return the part of the model with the layers."""
        return model.get_submodule(self.base)

    def block_of(self, layer: nn.Module) -> Any:
        """Return the MoE block of a layer; None in a dense layer."""
        block = _find(layer, self.block)
        return block if block is not None and _find(block, self.experts) is not None else None

    def experts_of(self, block: nn.Module) -> Any:
        """Return the module of experts in a block, inside any wrappers of peft."""
        return block.get_submodule(self.experts)

    def shared_output(self, block: nn.Module, x_TM: Tensor) -> Tensor:
        """Return what the shared experts of a block add for tokens [T, M]."""
        if self.shared is not None:
            return self.shared(block, x_TM)
        assert self.shared_module is not None, "it has shared experts"
        out_TM: Tensor = block.get_submodule(self.shared_module)(x_TM)
        return out_TM

    def router_of(self, block: nn.Module) -> Any:
        """Return the router of a block, inside any wrappers of peft."""
        return block.get_submodule(self.router)


def _find(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def _gated_shared_expert(block: Any, x_TM: Tensor) -> Tensor:
    """Weigh the output of the shared expert by its own gate (Qwen)."""
    out_TM: Tensor = F.sigmoid(block.shared_expert_gate(x_TM)) * block.shared_expert(x_TM)
    return out_TM


def _through(norm: str) -> Finish:
    """Return what adds the output of a block through a norm, by its path in the layer."""

    def finish(layer: Any, residual_BLM: Tensor, out_BLM: Tensor) -> Tensor:
        normed_BLM: Tensor = attrgetter(norm)(layer)(out_BLM)
        return residual_BLM + normed_BLM

    return finish


def _scaled_by(factor: str) -> Finish:
    """Return what scales the output of a block before adding it, by the path of the factor in the layer."""
    return lambda layer, residual_BLM, out_BLM: residual_BLM + out_BLM * float(attrgetter(factor)(layer))


def _averaged(layer: Any, residual_BLM: Tensor, out_BLM: Tensor) -> Tensor:
    """Add half of the output where the block takes the mean of routed and shared experts (Cohere 2)."""
    block = layer.mlp
    halves = block.num_shared_experts > 0 and block.shared_expert_combination_strategy == "average"
    return residual_BLM + (out_BLM / 2 if halves else out_BLM)


def _normed_by_depth(layer: Any, residual_BLM: Tensor, out_BLM: Tensor) -> Tensor:
    """Add the output through a norm, by a share that becomes smaller from layer to layer (Beam)."""
    normed_BLM: Tensor = layer.post_feedforward_layernorm(out_BLM * layer.mlp.routed_scaling_factor)
    return residual_BLM + normed_BLM / math.sqrt(layer.mlp_residual_add_idx)


def _from_latent(layer: Any, residual_BLM: Tensor, out_BLM: Tensor) -> Tensor:
    """Add the output through the projection from the width of experts, where they have one (Nemotron-H)."""
    weight = getattr(layer.mixer.fc2_latent_proj, "weight", None)
    return residual_BLM + (out_BLM if weight is None else F.linear(out_BLM, weight))


def _dropped(layer: Any, residual_BLM: Tensor, out_BLM: Tensor) -> Tensor:
    """Add the block's output with dropout (DBRX)."""
    return residual_BLM + F.dropout(out_BLM, layer.resid_pdrop, layer.training)


JITTER = "experts would get other numbers than those that the layer goes on with"
WEIGHED = "what a token's experts get is multiplied by their scores, and a token is sent once"

USUAL = AttentionCut()
"""Attention of queries, keys and values, whose norms, where there are any, are those of single heads."""

LATENT = AttentionCut(rows=("q_proj", "q_b_proj", "kv_b_proj"))
"""Attention of DeepSeek: latent vectors are whole on every rank, and heads are made from them."""

NORMED = AttentionCut(rows=("v_proj",), narrowed=("q_norm", "k_norm"))
"""Attention of OLMoE, with norms of queries and keys over all heads together."""

LINEAR = "some of its layers mix tokens without heads that could be cut"

FAMILIES = {
    family.name: family
    for family in (
        Family(name="mixtral", attention=USUAL, only=(("router_jitter_noise", 0.0, JITTER),)),
        Family(name="qwen3_moe", attention=USUAL),
        Family(name="qwen2_moe", attention=USUAL, shared_module="shared_expert", shared=_gated_shared_expert),
        *(
            Family(
                name=name,
                uncut=LINEAR,
                shared_module="shared_expert",
                shared=_gated_shared_expert,
                separates_documents=False,
            )
            for name in ("qwen3_next", "qwen3_5_moe_text")
        ),
        Family(name="olmoe", attention=NORMED),
        Family(
            name="flex_olmo",
            attention=replace(NORMED, norm=None),
            finish=_through("post_feedforward_layernorm"),
        ),
        Family(name="deepseek_v2", attention=LATENT, shared_module="shared_experts"),
        Family(name="deepseek_v3", attention=LATENT, shared_module="shared_experts"),
        Family(name="glm4_moe", attention=USUAL, shared_module="shared_experts"),
        Family(name="dots1", attention=USUAL, shared_module="shared_experts"),
        Family(name="ernie4_5_moe", attention=USUAL, shared_module="shared_experts"),
        Family(
            name="gpt_oss",
            attention=AttentionCut(heads=("sinks",)),
            router="router",
            separates_documents=False,  # with sinks transformers makes no mask of positions
        ),
        Family(name="phimoe", attention=USUAL, router="router", only=(("input_jitter_noise", 0.0, JITTER),)),
        *(
            Family(
                name=name,
                attention=USUAL,
                block="block_sparse_moe",
                router="router",
                finish=_scaled_by("residual_multiplier"),
            )
            for name in ("granitemoe", "granitemoeshared")
        ),
        *(
            Family(
                name=name,
                block="block_sparse_moe",
                router="router",
                finish=_scaled_by("residual_multiplier"),
                separates_documents=name == "granitemoe_swa",
            )
            for name in ("granitemoe_swa", "granitemoehybrid")
        ),
        Family(name="beam", finish=_normed_by_depth),
        Family(
            name="minimax",
            uncut=LINEAR,
            finish=_scaled_by("mlp_beta_factor"),  # the residual stream is scaled already
            only=(("router_jitter_noise", 0.0, JITTER),),
            separates_documents=False,
        ),
        Family(
            name="jamba",
            uncut=LINEAR,
            norm="final_layernorm",
            block="feed_forward",
            router="router",
            separates_documents=False,
        ),
        Family(
            name="dbrx",
            base="transformer",
            layers="blocks",
            norm="norm_f",
            block="ffn",
            router="router",
            form=FlatForm(),
            finish=_dropped,
        ),
        Family(
            name="llama4_text",
            block="feed_forward",
            router="router",
            form=WeighedForm(),
            only=(("num_experts_per_tok", 1, WEIGHED),),
        ),
        Family(
            name="afmoe",
            router="router",
            shared_module="shared_experts",
            finish=_through("post_mlp_layernorm"),
            separates_documents=False,  # its masks are made without positions
        ),
        Family(name="kolibri1", shared_module="shared_experts", finish=_through("post_mlp_layernorm")),
        Family(name="axk1", shared_module="shared_experts", finish=_through("mlp.post_mlp_layernorm")),
        Family(name="cohere2_moe", finish=_averaged),
        *(
            Family(name=name, finish=_scaled_by("mlp.routed_scaling_factor"))
            for name in ("minimax_m3_vl_text", "laguna")
        ),
        *(
            Family(name=name, shared_module="shared_experts")
            for name in ("exaone_moe", "glm4_moe_lite", "hy_v3", "solar_open")
        ),
        Family(name="minimax_m2"),
        Family(name="kimi_linear", uncut=LINEAR, separates_documents=False),
        Family(
            name="lfm2_moe",
            norm="embedding_norm",
            block="feed_forward",
            uncut=LINEAR,
            separates_documents=False,
        ),
        Family(
            name="nemotron_h",
            norm="norm_f",
            block="mixer",
            finish=_from_latent,
            uncut=LINEAR,
            separates_documents=False,
        ),
        Family(name="hunyuan_v1_moe", attention=USUAL, shared_module="shared_mlp"),
    )
}
"""Families by `model_type`."""


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a model of transformers; None if it is not known."""
    config: Any = getattr(model, "config", None)
    return FAMILIES.get(str(getattr(config, "model_type", "")))


def family_inside(model: nn.Module) -> Family | None:
    """Return the family of the text part of a model that also sees or hears; None if it is not known."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    family = FAMILIES.get(str(getattr(text, "model_type", "")))
    if family is None or text is config:
        return None
    for path, module in model.named_modules():
        if getattr(module, "config", None) is text and hasattr(module, family.layers):
            return replace(family, base=path, attention=None, uncut="its model also sees or hears")
    return None
