"""Section `[plan]`: who decides how a step is cut and ordered, and how that plan is kept right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from penstock.config import ConfigError, Within, check_bounds, expanded
from penstock.config.bounds import MOST_STEPS, Name
from penstock.extras import install, is_there, needs
from penstock.plan.effort import MOST_BUDGET
from penstock.plan.tuner import TunerName
from penstock.step.shape import Recompute

Mode = Literal["fixed", "auto", "replay"]
FIXED, AUTO, REPLAY = get_args(Mode)
DROPPED_STEPS = 2
"""The first steps after a change of plan, which do not count: they allocate, and caches are cold."""

Seconds = Annotated[float, Within(0, 86400, "measuring takes some time, and must end", above=True)]
Trials = Annotated[int, Within(1, 64, "the chosen plan counts as one, and each trial takes six steps")]
Samples = Annotated[
    int, Within(2, 1000, "a comparison needs two samples, and all samples are fitted together")
]
SampleSteps = Annotated[
    int, Within(DROPPED_STEPS + 1, MOST_STEPS, f"the first {DROPPED_STEPS} of them do not count")
]
Threshold = Annotated[
    float, Within(0, 1000, "every step differs a little from the one before", above=True, hint="Use 0.15.")
]
DriftSteps = Annotated[int, Within(4, 10_000, "fewer steps are too noisy, and all are kept in memory")]


def given_schedule(overrides: Sequence[str]) -> Sequence[str]:
    """Return overrides with `plan.mode=fixed` added if they set a key of section [schedule].

    Otherwise a configuration that plans would ignore `schedule.name=sequential`. `schedule.refine_after` does
    not count, and nothing is added where plan.mode is set.
    """
    keys = [override.partition("=")[0].strip() for override in overrides]
    decides = any(key.startswith("schedule.") and key != "schedule.refine_after" for key in keys)
    return [*overrides, f"plan.mode={FIXED}"] if decides and "plan.mode" not in keys else overrides


Budget = Annotated[float, Within(0, MOST_BUDGET, "it multiplies the usual search effort", above=True)]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Section `[plan]`: how the plan of a step is chosen and kept right."""

    mode: Mode = "fixed"
    """What decides: "fixed" = run what `[schedule]` says; "auto" = measure, search and explain a plan at the
    start; "replay" = the plan of `file` ([more](training.md#how-the-plan-is-chosen))."""
    file: Name | None = None
    """The plan file to replay, such as `plan.json` of an earlier run or of `penstock plan --out`."""
    layout: Literal["given", "auto"] = "given"
    """Layout of the ranks: "given" = as `[parallel]` says; "auto" = chosen at the start, with
    `plan.mode=auto` ([more](training.md#which-ranks-share-what))."""
    comm_dtype: Literal["given", "auto"] = "given"
    """Format of rows in transit: "given" = as `moe.comm_dtype` says; "auto" = a search may round them to
    bfloat16 or int8, and says what it chose; refused with `plan.mode=fixed`."""
    recompute: Literal["auto", "none", "experts", "blocks"] = "auto"
    """What runs a second time before its backward, to save memory: "none", "experts", or "blocks" (attention,
    router and experts); "auto" = nothing, unless `plan.mode=auto` finds that nothing fits into memory
    otherwise."""
    cluster: Name | None = None
    """A cluster file by name or path; none = measure, with `mode = "auto"`."""
    profile_s: Seconds = 15.0
    """Seconds of measuring at the start, and again when links have changed."""
    budget: Budget = 1.0
    """Search effort as a multiple of the default, counted in simulated tasks and not in seconds
    ([more](planning.md#search))."""
    trials: Trials = 3
    """Number of promising plans that run for six steps each before the fastest is kept; trials take at most a
    tenth of a run's steps, so three need 180 steps or more; after 30 minutes no other plan is tried;
    with a plan that moves samples or experts it takes 120 steps or more; 1 = the prediction decides."""
    tuner: TunerName | None = None
    """What tunes the size of all-reduce pieces during training: "bayesian" (FlowMoE), "grid" or "random";
    none = nothing."""
    samples: Samples = 8
    """Number of sizes that the tuner tries."""
    sample_steps: SampleSteps = 10
    """Steps for each size that the tuner tries."""
    watch: bool = True
    """Name slow ranks and what has changed, and plan (or tune) again, when the step time changes."""
    drift_threshold: Threshold = 0.15
    """The fraction by which the step time must change for that."""
    drift_steps: DriftSteps = 8
    """The number of steps over which it must."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.file == "" or (self.file is None) == (self.mode == REPLAY):
            key, value = ("mode", self.mode) if self.file is None else ("file", self.file)
            why = f"a plan file and plan.mode = {REPLAY} belong together"
            raise ConfigError(key, value, why, f"Use plan.mode={REPLAY} plan.file=PATH, or leave both out.")
        if self.file is not None:
            expanded(self.file, "file")  # an invalid path is refused before anything starts
        if self.tuner == "bayesian" and not is_there("bayes_opt"):
            instead = f"{install('bayes_opt')} Or use grid or random."
            raise ConfigError("tuner", self.tuner, needs("bayes_opt"), instead)
        if self.layout == AUTO and self.mode != AUTO:
            why = f"a layout is chosen together with a plan, and plan.mode = {self.mode} searches for none"
            raise ConfigError("layout", self.layout, why, "Use plan.mode=auto, or plan.layout=given.")
        if self.comm_dtype == AUTO and self.mode == FIXED:
            why = "lets a search choose, and with plan.mode = fixed nothing is searched"
            raise ConfigError(
                "comm_dtype", AUTO, why, "Use plan.mode=auto, or say it: moe.comm_dtype=bfloat16."
            )

    @property
    def given_recompute(self) -> Recompute:
        """What is recomputed where no search decides."""
        return "none" if self.recompute == "auto" else self.recompute

    @property
    def open_recompute(self) -> tuple[Recompute, ...]:
        """What a search may let be recomputed, the fastest choice first."""
        return get_args(Recompute) if self.recompute == "auto" else (self.recompute,)

    @property
    def may_repeat_blocks(self) -> bool:
        """Whether blocks are recomputed, or will be if nothing fits otherwise."""
        return self.recompute == "blocks" or (self.recompute == AUTO and self.mode == AUTO)

    @property
    def is_saved(self) -> bool:
        """Whether a run saves its plan and cluster as files: not where section [schedule] alone decides."""
        return self.mode != FIXED or self.tuner is not None or self.cluster is not None

    @property
    def path(self) -> Path | None:
        """Where the plan file to be replayed lies; None if there is none."""
        return None if self.file is None else expanded(self.file, "plan.file")
