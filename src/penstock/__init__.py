"""Penstock: training of mixture-of-experts transformers on ordinary clusters, with the network hidden.

What needs torch is loaded when it is first asked for, so that planning and simulation stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.adapt import load_optimizer, load_pretrained, parallelize, save_checkpoint
    from penstock.moe import MoELayer
    from penstock.runtime import (
        ExpertParallel,
        ShardedAdamW,
        clip_grad_norm_,
        expert_parameters,
        ignore_experts,
    )

__version__ = "0.1.0"

__all__ = [
    "ExpertParallel",
    "MoELayer",
    "ShardedAdamW",
    "clip_grad_norm_",
    "expert_parameters",
    "ignore_experts",
    "load_optimizer",
    "load_pretrained",
    "parallelize",
    "save_checkpoint",
]

_HOMES = {
    "MoELayer": "penstock.moe",
    "ExpertParallel": "penstock.runtime",
    "ShardedAdamW": "penstock.runtime",
    "clip_grad_norm_": "penstock.runtime",
    "expert_parameters": "penstock.runtime",
    "ignore_experts": "penstock.runtime",
    "load_optimizer": "penstock.adapt",
    "load_pretrained": "penstock.adapt",
    "parallelize": "penstock.adapt",
    "save_checkpoint": "penstock.adapt",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
