"""The result of a check: a line of a table, and sentences about ranks and the machines where they run."""

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
from penstock.topology.faults import named

S = TypeVar("S")
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run needs.

    assumed: the cluster for which its plan was made, named `cluster_name`; None if not given. rank_bytes:
    memory of a rank; disk_bytes: of its checkpoints, in `disk`.
    """

    assumed: ClusterFile | None = None
    cluster_name: str = ""
    rank_bytes: int = 0
    disk_bytes: int = 0
    disk: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence: what is wrong where, and what to do. mend: False if it is only worth knowing."""

    text: str
    mend: bool = True


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table."""

    name: str
    found: str
    findings: Sequence[Finding] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing needs to be fixed."""
        return not any(finding.mend for finding in self.findings)


def by(found: Examination, key: Callable[[Facts], T]) -> dict[T, list[int]]:
    """Return the ranks grouped by a key of their facts."""
    return by_of(found.facts, key)


def by_of(things: Mapping[int, S], key: Callable[[S], T]) -> dict[T, list[int]]:
    """Return the ranks grouped by a key of what each of them has."""
    ranks: dict[T, list[int]] = defaultdict(list)
    for rank, thing in things.items():
        ranks[key(thing)].append(rank)
    return dict(ranks)


def differs(found: Examination, name: str) -> bool:
    """Tell whether ranks have different versions of a package."""
    return len(by(found, lambda each: each.versions.get(name, ABSENT))) > 1


def who(found: Examination, ranks: Iterable[int]) -> str:
    """Return ranks and their hosts, such as `rank 3 (node07)`."""
    ranks = tuple(ranks)
    hosts = dict.fromkeys(found.facts[rank].host for rank in ranks if rank in found.facts)
    return f"{ranks_words(ranks, found)} ({', '.join(hosts)})" if hosts else ranks_words(ranks, found)


def ranks_words(ranks: Sequence[int], found: Examination) -> str:
    """Return ranks in words, such as `ranks 0 and 2`, or `all ranks`."""
    if found.size > 1 and len(ranks) == found.size:
        return "all ranks"
    return named(tuple(ranks))


def capital(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def are_named(found: Examination, ranks: Iterable[int]) -> bool:
    """Tell whether all of these ranks have their interface set."""
    return all(found.facts[rank].interface for rank in ranks)


def several_machines(found: Examination) -> bool:
    """Tell whether some ranks reach each other only over a network."""
    return len({each.machine for each in found.facts.values()}) > 1


def is_loopback(address: str) -> bool:
    """Tell whether an address reaches only the machine itself."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False
