"""The MoE layer alone, with drawn weights, as the tests of tests/moe/ use it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.moe import MoEConfig, MoELayer, build_layer
from penstock.moe.layer import LayerLosses

HIDDEN, EXPERTS, SAMPLES, LENGTH = 6, 4, 3, 5
AUX, Z = 0.3, 0.07
CAPACITY = {"capacity_factor": 0.75, "min_capacity": 1}
KINDS: dict[str, dict[str, Any]] = {
    "softmax sort": {},
    "softmax merged": {"one_copy_per_rank": True},
    "softmax index": CAPACITY,
    "softmax einsum": {"permutation": "einsum", **CAPACITY},
    "raw softmax": {"norm_topk_prob": False, "shared_ffn_hidden_size": 3},
    "cosine": {"gate": "cosine", "gate_proj_size": 5},
    "deepseek": {
        "gate": "sigmoid",
        "num_groups": 2,
        "group_top_k": 1,
        "routed_scaling_factor": 2.5,
        "expert_bias_rate": 0.1,
        "shared_ffn_hidden_size": 3,
    },
    "expert choice": {"gate": "expert_choice", **CAPACITY},
    "soft": {"gate": "soft", "slots_per_expert": 3},
}


def config_of(kind: str, **more: Any) -> MoEConfig:
    return MoEConfig(**{"num_experts": EXPERTS, "top_k": 2, "moe_ffn_hidden_size": 5, **KINDS[kind], **more})


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(module: nn.Module, seed: int = 3) -> Any:
    """The module in float64, with weights large enough that every gradient matters."""
    module = module.double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed + number))
    return module


def layer_of(config: MoEConfig) -> MoELayer:
    layer: MoELayer = drawn(build_layer(HIDDEN, config))
    return layer


def states(seed: int = 1) -> Tensor:
    return numbers(SAMPLES, LENGTH, HIDDEN, seed=seed).requires_grad_()


def tokens(count: int) -> Tensor:
    """Without samples."""
    return numbers(count, HIDDEN, seed=1).requires_grad_()


def padding() -> Tensor:
    """Uneven over samples, in the middle too, and one sample of nothing else."""
    valid = torch.ones(SAMPLES, LENGTH, dtype=torch.bool)
    valid[0, 1] = valid[1, 3:] = False
    valid[2] = False
    return valid


def losses_of(layer: MoELayer) -> LayerLosses:
    assert layer.losses is not None
    return layer.losses


def total_loss(layer: MoELayer, out: Tensor) -> Tensor:
    losses = losses_of(layer)
    return weighted(out) + AUX * losses.balance + Z * losses.z


def weighted(out: Tensor) -> Tensor:
    return (out * numbers(*out.shape, seed=9)).sum()


def gradients(loss: Tensor, variables: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, variables, materialize_grads=True)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
