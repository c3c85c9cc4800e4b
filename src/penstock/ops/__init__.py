"""The meaning of ops, before anything runs: the core's here, a feature's in its folder. No torch."""

from penstock.ops import core
from penstock.ops.base import OPS, Backward, Kind, Op, OpSpec, register, spec_of
from penstock.ops.work import Sizes, Work

__all__ = [
    "OPS",
    "Backward",
    "Kind",
    "Op",
    "OpSpec",
    "Sizes",
    "Work",
    "core",
    "register",
    "spec_of",
]
