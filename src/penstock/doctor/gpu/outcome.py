"""What a stage finds on one rank, and what the ranks' findings make together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

MOST_REASONS = 3
"""Reasons of different ranks in one result; more say nothing new."""


class Verdict(StrEnum):
    """How a stage ended. SLOW: right, and slower than it should be."""

    PASS = "PASS"
    SLOW = "SLOW"
    FAIL = "FAIL"
    SKIPPED = "SKIPPED"


SEVERITY = (Verdict.SKIPPED, Verdict.PASS, Verdict.SLOW, Verdict.FAIL)
"""From the least to the worst: where one rank is slow, all are."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A stage on one rank. reason: why it is not PASS. lines: for people. figures: for the JSON."""

    verdict: Verdict
    reason: str = ""
    lines: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Sequence[str], figures: Mapping[str, Any], *, slow: str = "", wrong: str = "") -> Self:
        """Return the outcome of a stage that ran to its end. slow, wrong: the reason, "" if it is not."""
        verdict = Verdict.FAIL if wrong else Verdict.SLOW if slow else Verdict.PASS
        return cls(verdict=verdict, reason=wrong or slow, lines=tuple(lines), figures=figures)

    @classmethod
    def failed(cls, reason: str) -> Self:
        return cls(verdict=Verdict.FAIL, reason=reason)

    @classmethod
    def skipped(cls, reason: str) -> Self:
        return cls(verdict=Verdict.SKIPPED, reason=reason)

    @staticmethod
    def read(plain: Mapping[str, Any]) -> Outcome:
        """Return what `dataclasses.asdict` and JSON have made plain."""
        return Outcome(
            verdict=Verdict(plain["verdict"]),
            reason=plain["reason"],
            lines=tuple(plain["lines"]),
            figures=plain["figures"],
        )


def together(outcomes: Mapping[int, Outcome]) -> Outcome:
    """Return what all ranks have found: the worst verdict, with its reasons, and the first rank's figures."""
    worst = max((each.verdict for each in outcomes.values()), key=SEVERITY.index)
    ranks: dict[str, list[int]] = {}
    for rank, each in sorted(outcomes.items()):
        if each.verdict is worst and each.reason:
            ranks.setdefault(each.reason, []).append(rank)
    said = [
        reason if len(where) == len(outcomes) else f"rank {', '.join(map(str, where))}: {reason}"
        for reason, where in ranks.items()
    ]
    if len(said) > MOST_REASONS:
        said = [*said[:MOST_REASONS], f"and {len(said) - MOST_REASONS} more"]
    first = next((each for _, each in sorted(outcomes.items()) if each.figures), outcomes[min(outcomes)])
    return Outcome(verdict=worst, reason="; ".join(said), lines=first.lines, figures=first.figures)
