"""What a stage finds on one rank, and what the ranks' findings make together.

Names of hosts and users, addresses and paths are removed from what is to be shown to others.
"""

from __future__ import annotations

import getpass
import ipaddress
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

import torch

import penstock

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
    """A stage on one rank.

    Attributes:
        verdict: How the stage ended.
        reason: Why it is not PASS; "" if it is.
        lines: What is printed for people.
        figures: What goes into the JSON.
    """

    verdict: Verdict
    reason: str = ""
    lines: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Sequence[str], figures: Mapping[str, Any], *, slow: str = "", wrong: str = "") -> Self:
        """Return the outcome of a stage that ran to its end.

        Args:
            slow: Why it is SLOW, "" if it is not.
            wrong: Why it is FAIL, "" if it is not.
        """
        verdict = Verdict.FAIL if wrong else Verdict.SLOW if slow else Verdict.PASS
        return cls(verdict=verdict, reason=wrong or slow, lines=tuple(lines), figures=figures)

    @classmethod
    def failed(cls, reason: str) -> Self:
        return cls(verdict=Verdict.FAIL, reason=reason)

    @classmethod
    def skipped(cls, reason: str) -> Self:
        return cls(verdict=Verdict.SKIPPED, reason=reason)


def together(outcomes: Mapping[int, Outcome]) -> Outcome:
    """Return what all ranks have found: the worst verdict, with its reasons, and the first rank's figures."""
    worst = max((outcome.verdict for outcome in outcomes.values()), key=SEVERITY.index)
    ranks: dict[str, list[int]] = {}
    for rank, outcome in sorted(outcomes.items()):
        if outcome.verdict is worst and outcome.reason:
            ranks.setdefault(outcome.reason, []).append(rank)
    said = [
        reason if len(where) == len(outcomes) else f"rank {', '.join(map(str, where))}: {reason}"
        for reason, where in ranks.items()
    ]
    if len(said) > MOST_REASONS:
        said = [*said[:MOST_REASONS], f"and {len(said) - MOST_REASONS} more"]
    first = next(
        (outcome for _, outcome in sorted(outcomes.items()) if outcome.figures), outcomes[min(outcomes)]
    )
    return Outcome(verdict=worst, reason="; ".join(said), lines=first.lines, figures=first.figures)


HOST_VARIABLES: Final = ("HOSTNAME", "MASTER_ADDR", "SLURMD_NODENAME", "SLURM_LAUNCH_NODE_IPADDR")
USER_VARIABLES: Final = ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT")
NO_NAMES: Final = frozenset({"", "localhost", "127.0.0.1"})

PATH: Final = re.compile(r"(?<![\w.<>/-])~?(?:/[^\s'\"`,:;(){}<>\[\]|]+)+")
ADDRESS: Final = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"
    r"|(?<![\w:])(?:[0-9a-fA-F]{0,4}:){2,8}(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}):?(?![\w:])"
)
PACKAGES: Final = {Path(module.__file__ or "").parent: module.__name__ for module in (penstock, torch)}
"""Folders whose files may be named, from the package on."""


def names_here() -> dict[str, str]:
    """Return what this machine and its user are called, and what stands for each."""
    stand_ins = dict.fromkeys((os.environ.get(name, "") for name in USER_VARIABLES), "<user>")
    with suppress(OSError, KeyError):
        stand_ins[getpass.getuser()] = "<user>"
    hosts = {platform.node(), *(os.environ.get(name, "") for name in HOST_VARIABLES)}
    hosts |= {host.partition(".")[0] for host in hosts if not ADDRESS.fullmatch(host)}
    stand_ins |= dict.fromkeys(hosts, "<host>")
    return {name: stands for name, stands in stand_ins.items() if name not in NO_NAMES}


def without_names(value: Any, names: Mapping[str, str]) -> Any:
    """Return plain data with every text in it cleaned, keys too.

    Args:
        value: The plain data.
        names: What to replace, and by what; see `names_here`.
    """
    if isinstance(value, str):
        longest_first = sorted(map(re.escape, names), key=len, reverse=True)
        text = ADDRESS.sub(_no_address, PATH.sub(_short, value))
        pattern = rf"(?<![\w<])(?:{'|'.join(longest_first)})(?![\w>])"
        return re.sub(pattern, lambda found: names[found[0]], text) if names else text
    if isinstance(value, Mapping):
        return {without_names(key, names): without_names(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(each, names) for each in value]
    return value


def _no_address(found: re.Match[str]) -> str:
    """Return what stands for an address, and anything else, such as a time of day, as it is."""
    for end in ("", ":"):  # a colon after an address may belong to the sentence
        with suppress(ValueError):
            ipaddress.ip_address(found[0].removesuffix(end))
            return f"<address>{end}"
    return found[0]


def _short(found: re.Match[str]) -> str:
    """Return `penstock/device.py` for a file of a known package, and no other path."""
    path = Path(found[0])
    for folder, name in PACKAGES.items():
        if ".." not in path.parts and path.is_relative_to(folder):
            return f"{name}/{path.relative_to(folder)}"
    return "<path>"
