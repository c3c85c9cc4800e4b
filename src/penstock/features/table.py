"""The table of all features. Loading it completes the registry of ops."""

from __future__ import annotations

from typing import Final

from penstock.features.dispatch.feature import FEATURE as DISPATCH
from penstock.features.expert_replicas.feature import FEATURE as EXPERT_REPLICAS
from penstock.features.expert_sharding.feature import FEATURE as EXPERT_SHARDING
from penstock.features.feature import Feature
from penstock.features.recompute.feature import FEATURE as RECOMPUTE
from penstock.features.routed import Routed
from penstock.features.sample_placement.feature import FEATURE as SAMPLE_PLACEMENT
from penstock.features.sharded_optimizer.feature import FEATURE as SHARDED_OPTIMIZER
from penstock.features.tensor_parallel.feature import FEATURE as TENSOR_PARALLEL
from penstock.ops.base import register

FEATURES: Final[tuple[Feature, ...]] = (
    RECOMPUTE,
    SAMPLE_PLACEMENT,
    DISPATCH,
    TENSOR_PARALLEL,
    EXPERT_SHARDING,
    EXPERT_REPLICAS,
    SHARDED_OPTIMIZER,
)
"""Every feature, in the order in which their passes of one stage run."""

register(*(spec for feature in FEATURES for spec in feature.ops))

ROUTED: Final[dict[str, Routed]] = {op: each for feature in FEATURES for op, each in feature.routed.items()}
"""By op of a feature, what its tasks do rank by rank once routing is known."""
