"""Penstock: training of mixture-of-experts transformers on ordinary clusters, with the network hidden.

What needs torch is loaded when it is first asked for, so that planning and simulation stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.adapt import load_optimizer, load_pretrained, parallelize, save_checkpoint
    from penstock.config import ConfigError
    from penstock.decision import ScheduleConfig
    from penstock.models import ModelConfig
    from penstock.moe import MoEConfig, MoELayer
    from penstock.own_loop import Session, session
    from penstock.runtime import (
        ExpertParallel,
        ShardedAdamW,
        clip_grad_norm_,
        expert_parameters,
        ignore_experts,
    )
    from penstock.topology import ParallelConfig
    from penstock.train.config import RunConfig

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "penstock.config",
    "ExpertParallel": "penstock.runtime",
    "MoEConfig": "penstock.moe",
    "MoELayer": "penstock.moe",
    "ModelConfig": "penstock.models",
    "ParallelConfig": "penstock.topology",
    "RunConfig": "penstock.train.config",
    "ScheduleConfig": "penstock.decision",
    "Session": "penstock.own_loop",
    "ShardedAdamW": "penstock.runtime",
    "clip_grad_norm_": "penstock.runtime",
    "expert_parameters": "penstock.runtime",
    "ignore_experts": "penstock.runtime",
    "load_optimizer": "penstock.adapt",
    "load_pretrained": "penstock.adapt",
    "parallelize": "penstock.adapt",
    "save_checkpoint": "penstock.adapt",
    "session": "penstock.own_loop",
}

__all__ = [
    "ConfigError",
    "ExpertParallel",
    "MoEConfig",
    "MoELayer",
    "ModelConfig",
    "ParallelConfig",
    "RunConfig",
    "ScheduleConfig",
    "Session",
    "ShardedAdamW",
    "clip_grad_norm_",
    "expert_parameters",
    "ignore_experts",
    "load_optimizer",
    "load_pretrained",
    "parallelize",
    "save_checkpoint",
    "session",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
