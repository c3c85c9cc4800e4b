"""The handlers of Penstock's own ops, one family a file; importing them registers them."""

from penstock.runtime.ops import (
    blocks,
    experts,
    head,
    loads,
    optimizer,
    replicas,
    samples,
    shards,
    sums,
    tensor,
    transfers,
)

__all__ = [
    "blocks",
    "experts",
    "head",
    "loads",
    "optimizer",
    "replicas",
    "samples",
    "shards",
    "sums",
    "tensor",
    "transfers",
]
