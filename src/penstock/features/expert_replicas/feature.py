"""Expert replicas: hot experts are computed on other ranks, too, for a step."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.features.expert_replicas.ops import OPS
from penstock.features.expert_replicas.passes import PlannedReplicas, ReplicaGradients, Replicas
from penstock.features.expert_replicas.settings import EXPERTS, REPLICA_SLOTS, SPLIT
from penstock.features.feature import Feature
from penstock.mesh import Group
from penstock.step.shape import StepShape
from penstock.step.stages import Pass


def _passes(shape: StepShape) -> Sequence[Pass]:
    if not (shape.replica_slots and any(shape.moe_layers)):
        return ()
    moving: tuple[Pass, ...] = (Replicas(shape.replica_pieces), ReplicaGradients(shape.replica_pieces))
    shards = shape.sharing.etp_size > 1
    planned = PlannedReplicas(Group.EXPERT_SHARDS if shards else Group.EXPERT)
    return (*moving, planned) if shape.gathers_loads else moving


def _why_not(shape: StepShape) -> str:
    if not (shape.replica_slots and any(shape.moe_layers)) or shape.exchange_counts:
        return ""
    return (
        "replica_slots: every expert has a fixed number of rows from every rank, whoever computes them, "
        "so replicas would spare nothing. Use dropless routing, or set placement.experts=none"
    )


FEATURE = Feature(
    name="expert_replicas",
    title="holds replicas of hot experts where their rows are, planned ahead and moved beside other work",
    source="Pro-Prophet; FasterMoE for shadowing",
    ops=OPS,
    passes=_passes,
    why_not=_why_not,
    fields={"experts": EXPERTS, "replica_slots": REPLICA_SLOTS, "split": SPLIT},
)
