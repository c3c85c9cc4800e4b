"""What a check says: a line of a table, and sentences about ranks and the machines where they run."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from penstock.cost import ClusterFile
from penstock.doctor.examine import Examination
from penstock.doctor.facts import ABSENT, Facts
from penstock.topology.rollcall import named

S = TypeVar("S")
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run needs. assumed: the cluster that its plan was made for, named `cluster_name`; None if not
    given. rank_bytes: memory of a rank; disk_bytes: of its checkpoints, in `disk`."""

    assumed: ClusterFile | None = None
    cluster_name: str = ""
    rank_bytes: int = 0
    disk_bytes: int = 0
    disk: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence: what is wrong where, and what to do. mend: else it is only worth knowing."""

    text: str
    mend: bool = True


@dataclass(frozen=True, kw_only=True)
class Check:
    """A line of the table."""

    name: str
    found: str
    findings: Sequence[Finding] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is to be mended."""
        return not any(finding.mend for finding in self.findings)


def by(found: Examination, key: Callable[[Facts], T]) -> dict[T, list[int]]:
    """The ranks by something of theirs."""
    return by_of(found.facts, key)


def by_of(things: Mapping[int, S], key: Callable[[S], T]) -> dict[T, list[int]]:
    """The same of anything that ranks have."""
    ranks: dict[T, list[int]] = defaultdict(list)
    for rank, thing in things.items():
        ranks[key(thing)].append(rank)
    return dict(ranks)


def differs(found: Examination, name: str) -> bool:
    """Whether ranks have different versions of it."""
    return len(by(found, lambda each: each.versions.get(name, ABSENT))) > 1


def who(found: Examination, ranks: Iterable[int]) -> str:
    """Such as `rank 3 (node07)`: where to go."""
    ranks = tuple(ranks)
    hosts = dict.fromkeys(found.facts[rank].host for rank in ranks if rank in found.facts)
    return f"{ranks_words(ranks, found)} ({', '.join(hosts)})" if hosts else ranks_words(ranks, found)


def ranks_words(ranks: Sequence[int], found: Examination) -> str:
    """Such as `ranks 0 and 2`, or `all ranks`."""
    if found.size > 1 and len(ranks) == found.size:
        return "all ranks"
    return named(tuple(ranks))


def capital(text: str) -> str:
    """The sentence that begins with it."""
    return text[:1].upper() + text[1:]


def are_named(found: Examination, ranks: Iterable[int]) -> bool:
    """Whether all of them are told their interface."""
    return all(found.facts[rank].interface for rank in ranks)


def several_machines(found: Examination) -> bool:
    """Whether some ranks reach each other over a network only."""
    return len({each.machine for each in found.facts.values()}) > 1


def is_loopback(address: str) -> bool:
    """Whether an address is for the machine itself alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False
