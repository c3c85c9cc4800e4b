"""The stages, in the order in which they run: each needs no more than those before it have shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.doctor.gpu import facts
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
    )
}
"""By name."""
