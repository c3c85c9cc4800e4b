"""Names of contenders: schedule, what moves, the dispatch, shares of updates, as in `penstock+zero1`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final, get_args

from penstock.config import ConfigError
from penstock.decision import PlacementConfig
from penstock.features.dispatch import DISPATCHES
from penstock.features.expert_replicas.feature import ExpertMoves
from penstock.features.sample_placement.feature import SampleMoves
from penstock.moe import MoEConfig
from penstock.schedule import SCHEDULES
from penstock.train.optimizer import OptimizerConfig, ZeroStage

AUTO: Final = "auto"
"""Name among schedules for the plan that the joint search chooses, whatever its schedule."""

STAYS: Final = "none"
SAMPLES: Final[tuple[SampleMoves, ...]] = tuple(name for name in get_args(SampleMoves) if name != STAYS)
EXPERTS: Final[tuple[ExpertMoves, ...]] = tuple(name for name in get_args(ExpertMoves) if name != STAYS)


SHARDED, GRADIENTS = "zero1", "zero2"
"""Stages of ZeRO: shares of the optimiser, and of gradients, too."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """One contender by its name.

    samples, experts: as section [placement] calls them. dispatch: none = as section [moe] says. shares: the
    parts of the update that ranks share; "" = nothing.
    """

    schedule: str
    dispatch: str | None = None
    shares: str = ""
    samples: SampleMoves = STAYS
    experts: ExpertMoves = STAYS

    @staticmethod
    def of(name: str) -> Named:
        """Parse a name.

        Raises ConfigError for a part that is unknown, or of a kind that the name has already.
        """
        schedule, *moves = name.split("+")
        found = Named(schedule=schedule)
        if schedule not in SCHEDULES and not (schedule == AUTO and not moves):
            near = get_close_matches(schedule, [*SCHEDULES, AUTO], n=1)
            nearest = f"Nearest: {near[0]}. " if near else ""
            hint = f"{nearest}Use some of {', '.join(SCHEDULES)}, {AUTO}."
            raise ConfigError("schedules", name, f"no schedule is called {schedule}", hint)
        for move in moves:
            found = found._with(move, name)
        return found

    @property
    def moves(self) -> bool:
        """Whether something moves, or rows have a dispatch of their own."""
        return (self.dispatch, self.samples, self.experts) != (None, STAYS, STAYS)

    def optimizer(self, given: OptimizerConfig) -> OptimizerConfig:
        """Return section [optimizer] with this contender's shares of the update."""
        stages: dict[str, ZeroStage] = {"": 0, SHARDED: 1, GRADIENTS: 2}
        return replace(given, zero_stage=stages[self.shares])

    def placement(self, given: PlacementConfig) -> PlacementConfig:
        """Return section [placement] with what this contender moves."""
        return replace(given, samples=self.samples, experts=self.experts)

    def moe(self, given: MoEConfig) -> MoEConfig:
        """Return section [moe] with this contender's dispatch."""
        return given if self.dispatch is None else replace(given, dispatch=self.dispatch)

    def _with(self, move: str, name: str) -> Named:
        if move in DISPATCHES and self.dispatch is None:
            return replace(self, dispatch=move)
        if move in (SHARDED, GRADIENTS) and not self.shares:
            return replace(self, shares=move)
        for samples in SAMPLES:
            if samples == move and self.samples == STAYS:
                return replace(self, samples=samples)
        for experts in EXPERTS:
            if experts == move and self.experts == STAYS:
                return replace(self, experts=experts)
        known = (*SAMPLES, *EXPERTS, *DISPATCHES, SHARDED, GRADIENTS)
        if move in known:
            why = (
                "samples can be moved in one way only, experts too, rows have one dispatch, "
                "and updates one owner"
            )
            raise ConfigError("schedules", name, why, "Name one of each at most.")
        hint = f"After a + use one of {', '.join(known)}."
        raise ConfigError("schedules", name, f"nothing is moved by {move!r}", hint)
