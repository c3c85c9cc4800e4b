"""How features run on ranks, one folder each; importing this registers their handlers."""

from penstock.runtime.features.expert_replicas import handlers as expert_replicas
from penstock.runtime.features.expert_sharding import handlers as expert_sharding
from penstock.runtime.features.recompute import handlers as recompute
from penstock.runtime.features.sample_placement import handlers as sample_placement
from penstock.runtime.features.sharded_optimizer import handlers as sharded_optimizer
from penstock.runtime.features.tensor_parallel import handlers as tensor_parallel

__all__ = [
    "expert_replicas",
    "expert_sharding",
    "recompute",
    "sample_placement",
    "sharded_optimizer",
    "tensor_parallel",
]
