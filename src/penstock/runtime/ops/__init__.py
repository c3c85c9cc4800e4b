"""The handlers of the core's own ops, one kind a file; importing them registers them."""

from penstock.runtime.ops import blocks, experts, sums, transfers

__all__ = ["blocks", "experts", "sums", "transfers"]
