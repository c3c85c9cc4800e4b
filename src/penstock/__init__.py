"""Penstock: training of mixture-of-experts transformers on ordinary clusters, with the network hidden.

What needs torch is loaded when it is first asked for, so that planning and simulation stay light.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers know it; `typing` takes longer to load than all that hears a Ctrl-C

if TYPE_CHECKING:
    from typing import Any

    from penstock.adapt import load_optimizer, load_pretrained, parallelize, save_checkpoint
    from penstock.config import ConfigError
    from penstock.cost import ClusterConfig
    from penstock.data import DataConfig
    from penstock.decision import PlacementConfig, ScheduleConfig
    from penstock.models import ModelConfig
    from penstock.moe import MoEConfig, MoELayer
    from penstock.own_loop import Session, session
    from penstock.plan.plan_config import PlanConfig
    from penstock.runtime import (
        ExpertParallel,
        ShardedAdamW,
        clip_grad_norm_,
        expert_parameters,
        ignore_experts,
    )
    from penstock.topology import ParallelConfig
    from penstock.train.config import MetricsConfig, OutputConfig, RunConfig, TrainConfig
    from penstock.train.optimizer import OptimizerConfig

__version__ = "0.1.0"

_HOMES = {
    "ClusterConfig": "penstock.cost",
    "ConfigError": "penstock.config",
    "DataConfig": "penstock.data",
    "ExpertParallel": "penstock.runtime",
    "MetricsConfig": "penstock.train.config",
    "MoEConfig": "penstock.moe",
    "MoELayer": "penstock.moe",
    "ModelConfig": "penstock.models",
    "OptimizerConfig": "penstock.train.optimizer",
    "OutputConfig": "penstock.train.config",
    "ParallelConfig": "penstock.topology",
    "PlacementConfig": "penstock.decision",
    "PlanConfig": "penstock.plan.plan_config",
    "RunConfig": "penstock.train.config",
    "ScheduleConfig": "penstock.decision",
    "Session": "penstock.own_loop",
    "ShardedAdamW": "penstock.runtime",
    "TrainConfig": "penstock.train.config",
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
    "ClusterConfig",
    "ConfigError",
    "DataConfig",
    "ExpertParallel",
    "MetricsConfig",
    "MoEConfig",
    "MoELayer",
    "ModelConfig",
    "OptimizerConfig",
    "OutputConfig",
    "ParallelConfig",
    "PlacementConfig",
    "PlanConfig",
    "RunConfig",
    "ScheduleConfig",
    "Session",
    "ShardedAdamW",
    "TrainConfig",
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
