"""Expert replicas: hot experts are computed on other ranks, too, for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from penstock.config import Within
from penstock.features.expert_replicas.ops import OPS
from penstock.features.expert_replicas.passes import PlannedReplicas, ReplicaGradients, Replicas
from penstock.features.expert_replicas.prices import ROUTED
from penstock.features.feature import Feature
from penstock.features.field import Asked, Choice, Field
from penstock.mesh import Group
from penstock.step.passes import GatheredLoads
from penstock.step.shape import StepShape
from penstock.step.stages import Pass

ExpertMoves = Literal["none", "pro_prophet", "shadowing", "least_loaded", "planned"]
Split = Literal["auto", "exact", "last_step"]
MOST_REPLICA_SLOTS = 64

SPLIT_WORDS = {"exact": "the loads of each step", "last_step": "the loads of the step before"}

ReplicaSlots = Annotated[
    int,
    Within(1, MOST_REPLICA_SLOTS, "every slot takes the memory of an expert and its gradients, per layer"),
]


def why_experts_stay(asked: Asked, choice: Choice) -> str:
    """Return why experts cannot move with this choice; "" = they may."""
    if not any(asked.shape.moe_layers):
        return "no layer has experts"
    if not asked.shape.sharing.is_none and choice.form != "gather":
        return f"expert form {choice.form} sends rows to all shards of their experts at once"
    return ""


def _experts(asked: Asked, choice: Choice) -> Sequence[str]:
    return ("none",) if why_experts_stay(asked, choice) else asked.movable.experts


def _expert_words(choice: Choice) -> str:
    if choice.experts == "none":
        return ""
    slots = "a replica slot" if choice.replica_slots == 1 else f"{choice.replica_slots} replica slots"
    split = "" if choice.split == "auto" else f", split by {SPLIT_WORDS[choice.split]}"
    return f"experts move ({choice.experts}, {slots} per rank{split})"


EXPERTS = Field(
    values=_experts,
    words=_expert_words,
    head="experts",
    cell=lambda d: "-" if d.experts == "none" else d.experts.replace("_", " "),
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)
REPLICA_SLOTS = Field(
    values=lambda asked, choice: asked.movable.replica_slots if choice.experts != "none" else (1,),
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)
SPLIT = Field(
    values=lambda asked, choice: (asked.movable.split,),
    affects=("cut", "cost", "memory"),
    may_be_left_out=True,
)


def _passes(shape: StepShape) -> Sequence[Pass]:
    if not (shape.replica_slots and any(shape.moe_layers)):
        return ()
    moving: tuple[Pass, ...] = (Replicas(shape.replica_pieces), ReplicaGradients(shape.replica_pieces))
    shards = shape.sharing.etp_size > 1
    planned = PlannedReplicas(Group.EXPERT_SHARDS if shards else Group.EXPERT)
    return (*moving, GatheredLoads(), planned) if shape.gathers_loads else moving


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
    routed=ROUTED,
)
