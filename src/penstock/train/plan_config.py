"""Section `[plan]`: who decides how a step is cut and ordered, and how that is kept right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import ConfigError
from penstock.plan.effort import check_budget
from penstock.plan.tuner import TunerName

GIVEN, AUTO = "given", "auto"
DROPPED_STEPS = 2
"""The first steps behind a change of plan: they allocate, and caches are cold."""


def given_schedule(overrides: Sequence[str]) -> Sequence[str]:
    """What `section.key=value` settings mean for the plan: to name a part of section [schedule] is to decide.

    `schedule.name=sequential` would otherwise be overruled by a configuration that plans.
    `schedule.refine_after` decides nothing, and whoever sets plan.source says it all.
    """
    keys = [override.partition("=")[0].strip() for override in overrides]
    decides = any(key.startswith("schedule.") and key != "schedule.refine_after" for key in keys)
    return [*overrides, f"plan.source={GIVEN}"] if decides and "plan.source" not in keys else overrides


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Section `[plan]`.

    source: "given" = section [schedule] says; "auto" = measured, searched and explained at the start; else
    the path of a plan file to be run as it is. cluster: a cluster file, by name or path; none = measure.
    profile_s: how long to measure at the start, and again when links have changed. budget: how many times as
    much as usual a search looks at, counted in simulated tasks and not in seconds. trials: so many of the
    most promising plans are run for some steps each, and the fastest is kept; 1 = the prediction decides.
    tuner: what tunes the size of all-reduce chunks while training; none = nothing does. samples: how many
    sizes it tries, sample_steps: how many steps with each.
    watch: notice when steps take another time than they did. drift_threshold: by which part they must
    differ; drift_steps: over how many steps.
    """

    source: str = GIVEN
    cluster: str | None = None
    profile_s: float = 15.0
    budget: float = 1.0
    trials: int = 3
    tuner: TunerName | None = None
    samples: int = 8
    sample_steps: int = 10
    watch: bool = True
    drift_threshold: float = 0.15
    drift_steps: int = 8

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("source", self.source, "names nothing", "Use given, auto, or a plan file.")
        for key, least, why in (
            ("trials", 1, "the chosen plan itself is one"),
            ("samples", 2, "one sample compares nothing"),
            ("sample_steps", DROPPED_STEPS + 1, f"the first {DROPPED_STEPS} of them do not count"),
            ("drift_steps", 4, "so few steps are noise"),
        ):
            if getattr(self, key) < least:
                raise ConfigError(key, getattr(self, key), why, f"Use {least} or more.")
        if not 0 < self.profile_s < math.inf:
            why = "measuring takes time, and has to end"
            raise ConfigError("profile_s", self.profile_s, why, "Use 15.")
        check_budget("budget", self.budget)
        if not self.drift_threshold > 0:
            why = "every step differs a little from the one before"
            raise ConfigError("drift_threshold", self.drift_threshold, why, "Use 0.15.")

    @property
    def is_saved(self) -> bool:
        """Whether a run leaves its plan as a file: not where section [schedule] says it all."""
        return self.source != GIVEN or self.tuner is not None

    @property
    def file(self) -> Path | None:
        """The plan file to be replayed, if there is one."""
        return None if self.source in (GIVEN, AUTO) else Path(self.source)
