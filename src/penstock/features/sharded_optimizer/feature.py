"""The sharded optimiser: every rank updates its share of the parameters, as tasks of the step."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.feature import Feature
from penstock.features.sharded_optimizer.ops import OPS
from penstock.features.sharded_optimizer.passes import GradientRoom, ShardedOptimizer
from penstock.step.shape import StepShape
from penstock.step.stages import Pass


def _passes(shape: StepShape) -> Sequence[Pass]:
    updating = shape.updating
    if updating is None:
        return ()
    sharded = ShardedOptimizer(updating.clips, updating.edp)
    return (sharded, GradientRoom(updating.edp)) if updating.releases else (sharded,)


FEATURE = Feature(
    name="sharded_optimizer",
    title="sums gradients in shares, updates each share on one rank, and gathers parameters in the next step",
    source="ZeRO, stages 1 and 2",
    ops=OPS,
    passes=_passes,
)
