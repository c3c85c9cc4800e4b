"""How features run on ranks; importing this registers their handlers."""

from __future__ import annotations

import torch

from penstock.runtime.features import expert_sharding, tensor_parallel
from penstock.runtime.features.expert_replicas.manager import ExpertMoving, ExpertReplicas
from penstock.runtime.features.recompute import Recompute
from penstock.runtime.features.sample_placement import SampleMoving, SamplePlacement
from penstock.runtime.features.sharded_optimizer.updates import ShardedUpdates
from penstock.runtime.machinery import StackFeature
from penstock.step.shape import Updating
from penstock.topology import Layout

__all__ = ["expert_sharding", "features_of", "tensor_parallel"]


def features_of(
    layout: Layout,
    device: torch.device,
    *,
    moving: ExpertMoving | None,
    sample_moving: SampleMoving | None,
    updating: Updating | None,
) -> dict[type[StackFeature], StackFeature]:
    """Return the features that take part in a stack, by class, in the order in which they are asked."""
    features = (
        Recompute(),
        SamplePlacement(sample_moving),
        ExpertReplicas(layout, device, moving),
        ShardedUpdates(updating),
    )
    return {type(each): each for each in features}
