"""The stages, in the order in which they run: each needs no more than those before it have shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.doctor.gpu import curves, facts, faults, groups, lanes, numerics, prediction, races, waits
from penstock.doctor.gpu.here import Here
from penstock.doctor.gpu.outcome import Outcome, together


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        title: What it checks, in a few words.
        run: Runs it on a rank.
        timeout_s: Seconds after which its processes are ended.
        needs: Stages that must not have failed.
        judge: Makes one outcome of those of all ranks.
        joins: Whether ranks connect before it.
        breaks: Whether it breaks connections on purpose.
    """

    name: str
    title: str
    run: Callable[[Here], Outcome]
    timeout_s: float
    needs: tuple[str, ...] = ()
    judge: Callable[[Mapping[int, Outcome]], Outcome] = together
    joins: bool = field(default=True, kw_only=True)
    breaks: bool = field(default=False, kw_only=True)


JOIN: Final = ("join",)
_STAGES: Final = (
    Stage(
        "facts", "cards, versions, network cards, environment", facts.run, 60, (), facts.judge, joins=False
    ),
    Stage("join", "every communicator of every layout, used once", groups.run, 300),
    Stage("lanes", "two lanes of communication at once, tasks late by chance", lanes.run, 180, JOIN),
    Stage(
        "numerics",
        "steps of every schedule and main option against a plain reference",
        numerics.run,
        900,
        JOIN,
    ),
    Stage("races", "steps under random delays and in poisoned memory, bit for bit", races.run, 300, JOIN),
    Stage("waits", "what the host waits for, and how far it is ahead of the device", waits.run, 300, JOIN),
    Stage("curves", "collectives, products, contention: a cluster file", curves.run, 600, JOIN),
    Stage(
        "prediction",
        "schedules predicted from these curves, and measured",
        prediction.run,
        600,
        (*JOIN, "curves"),
    ),
    Stage(
        "faults",
        "one rank fails: what the others say, and when",
        faults.run,
        180,
        JOIN,
        faults.judge,
        breaks=True,
    ),
)
STAGES: Final = {stage.name: stage for stage in _STAGES}
"""By name."""
