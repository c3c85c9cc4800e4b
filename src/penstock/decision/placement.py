"""Section `[placement]`: whether samples and experts move, and how their destination is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from penstock.config import Checked, Within
from penstock.config.bounds import MOST_STEPS
from penstock.features.expert_replicas.feature import MOST_REPLICA_SLOTS, ExpertMoves, ReplicaSlots, Split
from penstock.features.field import Movable
from penstock.features.sample_placement.feature import Prediction, SampleMoves, Solver

EverySteps = Annotated[int, Within(1, MOST_STEPS, "steps are numbered with eight digits")]


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Checked):
    """Section `[placement]`: what moves, and how its destination is decided."""

    samples: Literal["auto", "none", "netmoe"] = "auto"
    """What moves samples: "netmoe" = every MoE layer gives samples the homes that save the most traffic
    between nodes ([more](placement.md)); "none" = nothing; "auto" = "none", unless `plan.mode=auto` finds
    that moving them pays."""
    experts: Literal["auto", "none", "pro_prophet", "shadowing", "least_loaded", "planned"] = "auto"
    """By which planner popular experts get replicas on other ranks; "none", "auto" as for samples."""
    replica_slots: ReplicaSlots = 1
    """Experts of other ranks that each rank has room for, per MoE layer, where experts move."""
    split: Split = "auto"
    """Where experts move, whether rows are shared among replicas by the loads of their own step ("exact") or
    those of the step before ("last_step"); "auto" = "exact" where that can be."""
    every: EverySteps = 1
    """Steps between two plans of experts."""
    solver: Solver = "network_simplex"
    """What assigns samples that move; "kuhn_munkres" for comparison."""
    prediction: Prediction = "next_gate"
    """What samples are expected to need in the next layer: that layer's gate on the present input
    ("next_gate"), "conditional" (a table of which experts follow which), or "none"."""

    @property
    def movable(self) -> Movable:
        """What a search may choose from before anything is known of loads: "auto" waits for evidence."""
        return Movable(
            samples=("none" if self.samples == "auto" else self.samples,),
            experts=("none" if self.experts == "auto" else self.experts,),
            replica_slots=(self.replica_slots,),
            split=self.split,
        )

    @property
    def weighed(self) -> Movable:
        """What is compared once loads are known."""
        return Movable(
            samples=get_args(SampleMoves) if self.samples == "auto" else (self.samples,),
            experts=get_args(ExpertMoves) if self.experts == "auto" else (self.experts,),
            replica_slots=self._weighed_slots,
            split=self.split,
        )

    @property
    def _weighed_slots(self) -> tuple[int, ...]:
        """The given number; where the planner is left open, also twice the number, for drifting loads."""
        twice = min(2 * self.replica_slots, MOST_REPLICA_SLOTS)
        return tuple(
            dict.fromkeys((self.replica_slots, twice if self.experts == "auto" else self.replica_slots))
        )
