"""The meaning of every op, before anything runs. Pure Python: no torch."""

from penstock.ops import blocks, loads, optimizer, replicas, samples, shards, sums, tensor, transfers
from penstock.ops.base import OPS, Backward, Kind, OpSpec, register, spec_of
from penstock.ops.names import Op
from penstock.ops.work import Sizes, Work

__all__ = [
    "OPS",
    "Backward",
    "Kind",
    "Op",
    "OpSpec",
    "Sizes",
    "Work",
    "blocks",
    "loads",
    "optimizer",
    "register",
    "replicas",
    "samples",
    "shards",
    "spec_of",
    "sums",
    "tensor",
    "transfers",
]
