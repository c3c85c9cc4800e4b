"""What each op means, before anything runs. Pure Python: no torch."""

from penstock.ops import blocks, sums, transfers
from penstock.ops.base import OPS, Backward, Kind, OpSpec, register, spec_of
from penstock.ops.names import Op

__all__ = ["OPS", "Backward", "Kind", "Op", "OpSpec", "blocks", "register", "spec_of", "sums", "transfers"]
