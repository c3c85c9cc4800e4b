"""Graph transformations, one file each."""

from penstock.step.passes.chunks import Chunks
from penstock.step.passes.expert_shards import DealtSlots, FusedShards, GatheredShards, RepeatedRows
from penstock.step.passes.gathered_loads import GatheredLoads
from penstock.step.passes.gradient_pieces import GradientPieces
from penstock.step.passes.gradient_room import GradientRoom
from penstock.step.passes.hierarchical import Hierarchical
from penstock.step.passes.microbatches import Microbatches
from penstock.step.passes.packed_residual import PackedResidualPass
from penstock.step.passes.pairs import SimultaneousPair
from penstock.step.passes.recompute import Recompute
from penstock.step.passes.replicas import PlannedReplicas, ReplicaGradients, Replicas
from penstock.step.passes.sample_moves import SampleMoves
from penstock.step.passes.settle import Settle
from penstock.step.passes.sharded_optimizer import ShardedOptimizer
from penstock.step.passes.tensor_parallel import TensorParallel
from penstock.step.passes.transpose import Transpose
from penstock.step.passes.weight_gradients import WeightGradients

__all__ = [
    "Chunks",
    "DealtSlots",
    "FusedShards",
    "GatheredLoads",
    "GatheredShards",
    "GradientPieces",
    "GradientRoom",
    "Hierarchical",
    "Microbatches",
    "PackedResidualPass",
    "PlannedReplicas",
    "Recompute",
    "RepeatedRows",
    "ReplicaGradients",
    "Replicas",
    "SampleMoves",
    "Settle",
    "ShardedOptimizer",
    "SimultaneousPair",
    "TensorParallel",
    "Transpose",
    "WeightGradients",
]
