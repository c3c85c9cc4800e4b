"""The result of a check: a line of a table, and sentences about ranks and the machines where they run.

Also why a rank does not reach the others at all, in the order in which it can go wrong.
"""

from __future__ import annotations

import ipaddress
import platform
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from penstock.cost import ClusterFile
from penstock.doctor.examine import Examination
from penstock.doctor.facts import ABSENT, Facts
from penstock.topology import ProcessInfo
from penstock.topology.faults import named
from penstock.topology.meeting_point import look_at

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


def why_unreachable(info: ProcessInfo, host: str, port: int, error: str) -> str:
    """Return one sentence for a rank that could not reach the store at `host` and `port`: what to fix."""
    who = f"rank {info.rank} of {info.world_size} ({platform.node()})"
    found = look_at(host, port)
    if found.kind == "unresolved":
        return (
            f"{who} cannot resolve {host}, the host at which ranks meet ({found.why}): add it to /etc/hosts "
            "or DNS, or give its IP address (torchrun --rdzv-endpoint with --local-addr, or MASTER_ADDR)."
        )
    if info.rank == 0:
        return (
            f"{who} cannot open the port {port} of {host} ({error}): choose a free port (MASTER_PORT, "
            "torchrun --rdzv-endpoint)."
        )
    if is_loopback(found.ip) and found.kind != "accepts":
        return (
            f"{who} was told to meet the others at {host} ({found.ip}), which is this machine itself, and "
            "nobody is there: give the network address of rank 0's machine (torchrun --rdzv-endpoint and "
            "--local-addr, or MASTER_ADDR)."
        )
    if found.kind == "accepts":
        return (
            f"{who} reaches {host}:{port}, where something else than the ranks' store answers ({error}): "
            "choose another port."
        )
    return (
        f"{who} finds nobody at {host}:{port} ({found.ip}): look whether rank 0 was started there, and "
        "whether a firewall lets the port through."
    )
