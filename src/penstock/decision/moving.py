"""Whether samples and experts move: section `[placement]`, and what a plan decides about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol, Self, get_args

from penstock.config import Within, check_bounds
from penstock.config.bounds import MOST_STEPS
from penstock.decision.field import Asked, Field, Movable
from penstock.dispatch import DISPATCHES
from penstock.step.shape import ExpertForm

SampleMoves = Literal["none", "netmoe"]
ExpertMoves = Literal["none", "pro_prophet", "shadowing", "least_loaded", "planned"]
Split = Literal["auto", "exact", "last_step"]
Solver = Literal["network_simplex", "kuhn_munkres"]
Prediction = Literal["next_gate", "conditional", "none"]
MOST_REPLICA_SLOTS = 64
LOCAL = ("pro_prophet", "shadowing")
"""Planners whose replicas compute only rows of their own ranks."""

SPLIT_WORDS = {"exact": "the loads of each step", "last_step": "the loads of the step before"}

ReplicaSlots = Annotated[
    int,
    Within(1, MOST_REPLICA_SLOTS, "every slot takes the memory of an expert and its gradients, per layer"),
]
EverySteps = Annotated[int, Within(1, MOST_STEPS, "steps are numbered with eight digits")]


class Choice(Protocol):
    """A decision, as far as other decisions depend on it. `Decision` is one."""

    @property
    def schedule(self) -> str: ...

    @property
    def dispatch(self) -> str: ...

    @property
    def samples(self) -> SampleMoves: ...

    @property
    def experts(self) -> ExpertMoves: ...

    @property
    def replica_slots(self) -> int: ...

    @property
    def split(self) -> Split: ...

    @property
    def form(self) -> ExpertForm:
        """How rows reach all shards of their experts."""
        ...


def _samples(asked: Asked, choice: Choice) -> Sequence[str]:
    return ("none",) if why_samples_stay(asked, choice) else asked.movable.samples


def _experts(asked: Asked, choice: Choice) -> Sequence[str]:
    return ("none",) if why_experts_stay(asked, choice) else asked.movable.experts


def why_samples_stay(asked: Asked, choice: Choice) -> str:
    """Return why samples cannot move with this choice; "" = they may."""
    if DISPATCHES[choice.dispatch].joins_rows:
        return f"moe.dispatch={choice.dispatch} sends one row for several experts"
    return asked.shape.sharing.why_samples_stay or why_experts_stay(asked, choice)


def why_experts_stay(asked: Asked, choice: Choice) -> str:
    """Return why experts cannot move with this choice; "" = they may."""
    if not any(asked.shape.moe_layers):
        return "no layer has experts"
    if not asked.shape.sharing.is_none and choice.form != "gather":
        return f"expert form {choice.form} sends rows to all shards of their experts at once"
    return ""


def must_move(asked: Asked) -> bool:
    """Return whether every plan has to move samples, or experts."""
    return "none" not in asked.movable.samples or "none" not in asked.movable.experts


def _replica_slots(asked: Asked, choice: Choice) -> Sequence[int]:
    return asked.movable.replica_slots if choice.experts != "none" else (1,)


def _expert_words(choice: Choice) -> str:
    if choice.experts == "none":
        return ""
    slots = "a replica slot" if choice.replica_slots == 1 else f"{choice.replica_slots} replica slots"
    split = "" if choice.split == "auto" else f", split by {SPLIT_WORDS[choice.split]}"
    return f"experts move ({choice.experts}, {slots} per rank{split})"


def why_not_exact(choice: Choice) -> str:
    """Return why rows of shared experts cannot be split by their own step's loads; "" = they can."""
    if choice.experts in LOCAL:
        return f"placement.experts={choice.experts} gives replicas the rows of their own ranks"
    if choice.samples != "none":
        return f"placement.samples={choice.samples} places samples by where their rows go"
    if choice.form not in ("gather", "s1"):
        return f"expert form {choice.form} gathers rows of several ranks before they leave"
    if DISPATCHES[choice.dispatch].joins_rows:
        return f"moe.dispatch={choice.dispatch} sends one row for several experts"
    return ""


SAMPLES = Field(
    values=_samples,
    words=lambda d: "" if d.samples == "none" else f"samples move ({d.samples})",
    head="samples",
    cell=lambda d: "-" if d.samples == "none" else d.samples,
    may_be_left_out=True,
)
EXPERTS = Field(
    values=_experts,
    words=_expert_words,
    head="experts",
    cell=lambda d: "-" if d.experts == "none" else d.experts.replace("_", " "),
    may_be_left_out=True,
)
REPLICA_SLOTS = Field(values=_replica_slots, may_be_left_out=True)
SPLIT = Field(values=lambda asked, choice: (asked.movable.split,), may_be_left_out=True)


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Section `[placement]`: what moves, and how its destination is decided."""

    samples: Literal["auto", "none", "netmoe"] = "auto"
    """What moves samples: "netmoe" = every MoE layer gives samples the homes that save the most traffic
    between nodes ([more](placement.md)); "none" = samples stay; "auto" = "none", unless `plan.mode=auto`
    finds that moving them pays."""
    experts: Literal["auto", "none", "pro_prophet", "shadowing", "least_loaded", "planned"] = "auto"
    """By which planner popular experts get replicas on other ranks; "none", "auto" as for samples."""
    replica_slots: ReplicaSlots = 1
    """Experts of other ranks that each rank has room for, per MoE layer, where experts move."""
    split: Split = "auto"
    """Where experts move, whether rows are shared among replicas by the loads of their own step ("exact") or
    those of the step before ("last_step"); "auto" = exactly where that can be."""
    every: EverySteps = 1
    """Steps between two plans of experts."""
    solver: Solver = "network_simplex"
    """What assigns samples that move; "kuhn_munkres" for comparison."""
    prediction: Prediction = "next_gate"
    """What samples are expected to need in the next layer: that layer's gate on the present input
    ("next_gate"), "conditional" (a table of which experts follow which), or "none"."""

    def __post_init__(self) -> None:
        check_bounds(self)

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

    def saying(self, choice: Choice) -> Self:
        """Return the section that stands for `choice`."""
        return replace(
            self,
            samples=choice.samples,
            experts=choice.experts,
            replica_slots=choice.replica_slots,
            split=choice.split,
        )
