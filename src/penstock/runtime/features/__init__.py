"""How features run on ranks; importing this registers their handlers."""

from penstock.runtime.features import (
    expert_sharding,
    recompute,
    sample_placement,
    tensor_parallel,
)
from penstock.runtime.features.expert_replicas import handlers as expert_replicas
from penstock.runtime.features.sharded_optimizer import updates as sharded_optimizer

__all__ = [
    "expert_replicas",
    "expert_sharding",
    "recompute",
    "sample_placement",
    "sharded_optimizer",
    "tensor_parallel",
]
