"""What is compared, by name: a schedule, what moves, how rows travel: `penstock+planned+node_once`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, get_args

from penstock.config import ConfigError
from penstock.decision import PlacementConfig
from penstock.decision.moving import ExpertMoves, SampleMoves
from penstock.dispatch import DISPATCHES
from penstock.moe import MoEConfig
from penstock.schedule import SCHEDULES

AUTO: Final = "auto"
"""Among schedules: the plan that the joint search chooses, whatever schedule that has."""

STAYS: Final = "none"
SAMPLES: Final[tuple[SampleMoves, ...]] = tuple(name for name in get_args(SampleMoves) if name != STAYS)
EXPERTS: Final[tuple[ExpertMoves, ...]] = tuple(name for name in get_args(ExpertMoves) if name != STAYS)


@dataclass(frozen=True, kw_only=True)
class Named:
    """One contender by its name. samples, experts: as section [placement] calls them. dispatch: none = as
    section [moe] says."""

    schedule: str
    dispatch: str | None = None
    samples: SampleMoves = STAYS
    experts: ExpertMoves = STAYS

    @staticmethod
    def of(name: str) -> Named:
        """Raises ConfigError for a part that is unknown, or of a kind that stands there already."""
        schedule, *moves = name.split("+")
        found = Named(schedule=schedule)
        if schedule not in SCHEDULES and not (schedule == AUTO and not moves):
            hint = f"Use some of {', '.join(SCHEDULES)}, {AUTO}."
            raise ConfigError("schedules", name, f"no schedule is called {schedule}", hint)
        for move in moves:
            found = found._with(move, name)
        return found

    def placement(self, given: PlacementConfig) -> PlacementConfig:
        """Section [placement], but for what moves."""
        return replace(given, samples=self.samples, experts=self.experts)

    def moe(self, given: MoEConfig) -> MoEConfig:
        """Section [moe], but for how rows travel."""
        return given if self.dispatch is None else replace(given, dispatch=self.dispatch)

    def _with(self, move: str, name: str) -> Named:
        if move in DISPATCHES and self.dispatch is None:
            return replace(self, dispatch=move)
        for samples in SAMPLES:
            if samples == move and self.samples == STAYS:
                return replace(self, samples=samples)
        for experts in EXPERTS:
            if experts == move and self.experts == STAYS:
                return replace(self, experts=experts)
        if move in (*SAMPLES, *EXPERTS, *DISPATCHES):
            why = "samples can be moved in one way only, experts too, and rows have one dispatch"
            raise ConfigError("schedules", name, why, "Name one of each at most.")
        hint = f"After a + use one of {', '.join((*SAMPLES, *EXPERTS, *DISPATCHES))}."
        raise ConfigError("schedules", name, f"nothing is moved by {move!r}", hint)
