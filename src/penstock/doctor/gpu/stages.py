"""The stages, in the order in which they run: each needs no more than those before it have shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.doctor.gpu import curves, facts, faults, groups, lanes, numerics, prediction, races, waits
from penstock.doctor.gpu.here import Here
from penstock.doctor.gpu.outcome import Outcome, together


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage. run: on every rank. judge: makes one outcome of those of all ranks. title: for people.

    timeout_s: after which its processes are ended. needs: stages that must not have failed. joins: whether
    ranks connect before. breaks: whether connections are broken afterwards, on purpose.
    """

    name: str
    title: str
    run: Callable[[Here], Outcome]
    judge: Callable[[Mapping[int, Outcome]], Outcome] = together
    timeout_s: float
    needs: tuple[str, ...] = ()
    joins: bool = True
    breaks: bool = False


STAGES: Final[dict[str, Stage]] = {
    each.name: each
    for each in (
        Stage(
            name="facts",
            title="cards, versions, network cards, environment",
            run=facts.run,
            judge=facts.judge,
            timeout_s=60,
            joins=False,
        ),
        Stage(
            name="join",
            title="every communicator of every layout, used once",
            run=groups.run,
            timeout_s=300,
        ),
        Stage(
            name="lanes",
            title="two lanes of communication at once, tasks late by chance",
            run=lanes.run,
            timeout_s=180,
            needs=("join",),
        ),
        Stage(
            name="numerics",
            title="steps of every schedule and main option against a plain reference",
            run=numerics.run,
            timeout_s=900,
            needs=("join",),
        ),
        Stage(
            name="races",
            title="steps under random delays and in poisoned memory, bit for bit",
            run=races.run,
            timeout_s=300,
            needs=("join",),
        ),
        Stage(
            name="waits",
            title="what the host waits for, and how far it is ahead of the device",
            run=waits.run,
            timeout_s=300,
            needs=("join",),
        ),
        Stage(
            name="curves",
            title="collectives, products, contention: a cluster file",
            run=curves.run,
            timeout_s=600,
            needs=("join",),
        ),
        Stage(
            name="prediction",
            title="schedules predicted from these curves, and measured",
            run=prediction.run,
            timeout_s=600,
            needs=("join", "curves"),
        ),
        Stage(
            name="faults",
            title="one rank fails: what the others say, and when",
            run=faults.run,
            judge=faults.judge,
            timeout_s=180,
            needs=("join",),
            breaks=True,
        ),
    )
}
"""By name."""
