"""Descriptions of families of models: places of their parts, and how layers add experts' outputs.

Everything else (attention, positions, norms, masks, caches, routers) is the model's own code, which runs
unchanged.
Shapes: B samples, L tokens per sample, M hidden size, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.families.forms import STACKED, ExpertForm

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

    norm, module: paths of the norm before attention (None: there is none) and of attention in a layer, which
    calls it with normed hidden states, by that name, and with what it is called with itself. rows, columns:
    linear layers that are cut by what they return, and by what they get: these return parts of a sum.
    `rows` that a model lacks are passed over. heads: parameters that have a number for each head. narrowed:
    norms over all heads together: they stay whole, with the projections before them, and every rank
    computes them for all heads and goes on with its own. counts: settings that are numbers of heads.
    Everything else is whole on every rank.
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

    name: `model_type` of its configuration. base: path of the decoder in the model; layers, norm: paths of
    its list of layers and of the norm after them. block: path of the MoE block in a layer; router, experts:
    paths of its router and its experts in a block. shared_module, shared: the module of shared experts in a
    block (None: there are none, or they run with attention), and what it adds (None: what it returns).
    finish: what a layer does with the output of its block. coefficient: the model's name for the weight of
    its router loss; None: its weighting is not known. form: how experts are called and multiply. only:
    settings of the configuration, the only values with which the model can be scheduled, and the reason.
    attention: how ranks share it; None: they cannot, and `uncut` says why. separates_documents: whether
    tokens whose positions begin anew attend to none before them.
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
