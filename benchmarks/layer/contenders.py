"""Whole MoE layers with the same weights: Penstock's, transformers' Mixtral block, a plain loop over experts.

Shapes: T tokens, M hidden size, H expert hidden size, E experts, k choices per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config import ConfigError
from penstock.models.huggingface import layer_from_hugging_face

PENSTOCK, LOOP, EAGER, GROUPED = "penstock", "loop", "mixtral eager", "mixtral grouped_mm"
IMPLEMENTATIONS: Final = {EAGER: "eager", GROUPED: "grouped_mm"}
"""How transformers is told to run experts."""

MAJOR: Final = "5"
INSTALL: Final = "pip install 'transformers>=5.0,<6'"
TOLERANCE: Final = 1e-4
"""Most that two contenders may differ, over the largest number of the first."""


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """T, M, H, E and k of one comparison."""

    tokens: int
    hidden_size: int
    ffn_hidden_size: int
    experts: int
    top_k: int = 2


Step = Callable[[Tensor], Tensor]
"""x [T, M] -> output [T, M]."""


def require_transformers() -> str:
    """Return the version of transformers.

    Raises:
        ConfigError: If it is not usable; says how to install it.
    """
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        why = "the comparison needs it, and it is not installed"
        raise ConfigError("package", "transformers", why, f"Run {INSTALL}.") from None
    if installed.split(".")[0] != MAJOR:
        why = f"the comparison needs version {MAJOR}, and {installed} is installed"
        raise ConfigError("package", "transformers", why, f"Run {INSTALL}.")
    return installed


class ExpertLoop(nn.Module):
    """What one writes down first: every expert takes its tokens, and adds its weighted outputs.

    Every expert has matrices of its own. Cut out of stacked ones, autograd would fill a gradient for all
    experts once per expert.
    """

    def __init__(self, router_EM: Tensor, gate_up_EJM: Tensor, down_EMH: Tensor, top_k: int) -> None:
        super().__init__()
        self.top_k, self.router = top_k, nn.Parameter(router_EM.detach().clone())
        halves = gate_up_EJM.chunk(2, dim=1)
        self.gate, self.up, self.down = (_matrices(stack) for stack in (*halves, down_EMH))

    def forward(self, x_TM: Tensor) -> Tensor:
        weights_Tk, experts_Tk = F.linear(x_TM, self.router).softmax(dim=-1).topk(self.top_k)
        weights_Tk = weights_Tk / weights_Tk.sum(dim=-1, keepdim=True)
        out_TM = torch.zeros_like(x_TM)
        for number, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            tokens, choices = torch.where(experts_Tk == number)
            x_RM = x_TM[tokens]
            hidden_RH = F.silu(F.linear(x_RM, gate)) * F.linear(x_RM, up)
            made_RM = F.linear(hidden_RH, down) * weights_Tk[tokens, choices].unsqueeze(1)
            out_TM = out_TM.index_add_(0, tokens, made_RM)
        return out_TM


def _matrices(stack: Tensor) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(matrix.detach().clone()) for matrix in stack])


def build_contenders(size: LayerSize, seed: int = 0) -> dict[str, nn.Module]:
    """Return all contenders by name, with the same weights. Every one maps x [T, M] to its output [T, M].

    Raises:
        ConfigError: If transformers is missing.
    """
    require_transformers()
    blocks = {name: _mixtral(size, how) for name, how in IMPLEMENTATIONS.items()}
    draw_weights(blocks[EAGER], seed)
    source: Any = blocks[EAGER]
    blocks[GROUPED].load_state_dict(source.state_dict())
    stacks = source.gate.weight, source.experts.gate_up_proj, source.experts.down_proj
    return {
        PENSTOCK: layer_from_hugging_face(source),
        **{name: OneSample(block) for name, block in blocks.items()},
        LOOP: ExpertLoop(*stacks, size.top_k),
    }


class OneSample(nn.Module):
    """A block that wants [B, L, M], given [T, M]."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_TM: Tensor) -> Tensor:
        out_1TM: Tensor = self.block(x_TM.unsqueeze(0))
        return out_1TM.squeeze(0)


def _mixtral(size: LayerSize, implementation: str) -> nn.Module:
    # By name: nothing in Penstock imports transformers, and mypy need not have it.
    mixtral = import_module("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=size.hidden_size,
        intermediate_size=size.ffn_hidden_size,
        num_local_experts=size.experts,
        num_experts_per_tok=size.top_k,
        experts_implementation=implementation,
    )
    block: nn.Module = mixtral.MixtralSparseMoeBlock(config)
    return block


@torch.no_grad()
def draw_weights(module: nn.Module, seed: int) -> None:
    """Draw normal weights that keep the size of what passes through."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def check_agreement(contenders: Mapping[str, nn.Module], x_TM: Tensor, grad_TM: Tensor) -> None:
    """Raise RuntimeError if an output or a gradient of x differs from the first contender's."""
    outcomes = {name: outcome(contender, x_TM, grad_TM) for name, contender in contenders.items()}
    first, wanted = next(iter(outcomes.items()))
    for name, tensors in outcomes.items():
        for what, ours, theirs in zip(("output", "gradient of the input"), wanted, tensors, strict=True):
            distance = float((ours - theirs).abs().max() / ours.abs().max())
            if not distance <= TOLERANCE:
                raise RuntimeError(f"{first} and {name} differ by {distance:.1e} in the {what}")


def outcome(contender: nn.Module, x_TM: Tensor, grad_TM: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and gradient of x of one step, whose gradients are dropped again."""
    x_TM = x_TM.detach().requires_grad_()
    out_TM = contender(x_TM)
    out_TM.backward(grad_TM)
    contender.zero_grad()
    assert x_TM.grad is not None
    return out_TM.detach(), x_TM.grad
