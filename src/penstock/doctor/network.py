"""Checks what is between ranks: clocks, interfaces, names, links, an exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from penstock.doctor.examine import Examination, Link
from penstock.doctor.findings import (
    Check,
    Finding,
    Wanted,
    are_named,
    by,
    by_of,
    capital,
    is_loopback,
    ranks_words,
    several_machines,
    who,
)
from penstock.doctor.wire import Clock
from penstock.words import counted, milliseconds

CLOCK_S: Final = 0.1
"""Clocks that differ by more put traces, logs and files of several machines into a wrong order."""

SLOW: Final = 0.8
"""A link with less than this share of what a plan assumes is slow."""

UNLIKE: Final = 0.5
"""Where no plan is given, a link with less than this share of the median link is slow."""

FAST: Final = 1.5
"""A plan was made for another network if links have more than this times the rate that it assumes."""


def clocks(found: Examination) -> Check:
    """Compare clocks, once per machine, since its ranks have one clock."""
    off: dict[str, tuple[int, Clock]] = {}
    for rank, clock in found.clocks.items():
        off.setdefault(found.facts[rank].machine, (rank, clock))
    findings = []
    for rank, clock in off.values():
        if abs(clock.offset_s) - clock.round_trip_s / 2 > CLOCK_S:
            side = "ahead of" if clock.offset_s > 0 else "behind"
            findings.append(
                Finding(
                    text=f"The clock of {who(found, (rank,))} is {abs(clock.offset_s):.2f} s {side} that of "
                    f"rank {found.reference}: let all machines follow one time server (chrony, ntpd, "
                    "timedatectl set-ntp true)."
                )
            )
    if not off:
        return Check(name="clocks", found="one machine, one clock")
    most = max(abs(clock.offset_s) for _, clock in off.values())
    error_s = max(clock.round_trip_s for _, clock in off.values()) / 2
    return Check(
        name="clocks",
        found=f"at most {milliseconds(most)} from rank {found.reference}'s (± {milliseconds(error_s)})",
        findings=findings,
    )


def interfaces(found: Examination) -> Check:
    """Check the interface that Gloo is to use, and the address at which others would reach it."""
    findings = []
    for problem, ranks in by(found, lambda each: each.problem).items():
        if problem:
            findings.append(
                f"The machine of {who(found, ranks)} {problem}: name one that all others reach in "
                "GLOO_SOCKET_IFNAME."
            )
    several = several_machines(found)
    loose = [rank for rank, each in found.facts.items() if several and is_loopback(each.address)]
    if loose:
        how = (
            "GLOO_SOCKET_IFNAME is the loopback interface" if are_named(found, loose) else "ranks meet there"
        )
        findings.append(
            f"{capital(who(found, loose))} would be reached at a loopback address ({how}), which other "
            "machines cannot use: name the network's interface in GLOO_SOCKET_IFNAME."
        )
    used = by(found, lambda each: each.interface or "not given")
    words = ", ".join(f"{name} ({ranks_words(ranks, found)})" for name, ranks in used.items())
    text = next(iter(used)) if len(used) == 1 else words
    given = "" if all(each.interface for each in found.facts.values()) else "; Gloo uses the host name's"
    return Check(
        name="interface",
        found=f"GLOO_SOCKET_IFNAME: {text}{given if several else ''}",
        findings=[Finding(text=each) for each in findings],
    )


def names(found: Examination) -> Check:
    """Check that host names resolve: without a given interface Gloo takes the one of the host's name."""
    findings = []
    unnamed = {rank: each for rank, each in found.facts.items() if not each.interface}
    if several_machines(found):
        for host, ranks in by_of(unnamed, lambda each: each.host).items():
            ip = unnamed[ranks[0]].host_ip
            if ip and not is_loopback(ip):
                continue
            what = f"resolves to {ip}, which other machines cannot use" if ip else "does not resolve"
            findings.append(
                f"On the machine of {ranks_words(ranks, found)} its own name {host} {what}: name the "
                "interface in GLOO_SOCKET_IFNAME, or give the name its address in /etc/hosts."
            )
    hosts = by(found, lambda each: each.host)
    resolved = sum(bool(found.facts[ranks[0]].host_ip) for ranks in hosts.values())
    return Check(
        name="host names",
        found=f"{resolved} of {counted(len(hosts), 'name')} resolve on their own machine",
        findings=[Finding(text=each) for each in findings],
    )


def links(found: Examination, wanted: Wanted) -> Check:
    """Check who reaches whom, and how fast, compared with what a plan assumes or with other links."""
    findings = [
        Finding(
            text=f"{capital(who(found, (link.pair.asks,)))} does not reach "
            f"{who(found, (link.pair.answers,))} ({link.problem}): look at cables, routes "
            "and firewalls between them, and at GLOO_SOCKET_IFNAME."
        )
        for link in found.links
        if link.rates is None
    ]
    measured = [(link, _slower(link)) for link in found.links if link.rates is not None]
    if not measured:
        return Check(name="links", found="none measured", findings=findings)
    for inside in (False, True):
        here = [(link, rate) for link, rate in measured if link.pair.inside == inside]
        if here:
            findings += _rate_findings(here, wanted, inside=inside)
    return Check(name="links", found="; ".join(_link_words(measured, wanted)), findings=findings)


def _rate_findings(here: Sequence[tuple[Link, float]], wanted: Wanted, *, inside: bool) -> Iterator[Finding]:
    assumed = _assumed(wanted, inside=inside)
    usual = median(rate for _, rate in here)
    for link, rate in here:
        if assumed is not None and rate < SLOW * assumed:
            yield Finding(
                text=f"The link {link.pair.words} carries {_mb(rate)}, and {wanted.cluster_name} assumes "
                f"{_mb(assumed)}: mend it, or measure again with penstock profile and plan for what there is."
            )
        elif assumed is None and rate < UNLIKE * usual:
            yield Finding(
                text=f"The link {link.pair.words} carries {_mb(rate)}, half of the links {_mb(usual)} or "
                "more: look at its cable, its port's speed and what else uses it."
            )
    if assumed is not None and usual > FAST * assumed:
        where = "inside nodes" if inside else "between nodes"
        yield Finding(
            text=f"Links {where} carry {_mb(usual)}, and {wanted.cluster_name} assumes {_mb(assumed)}: a "
            "plan from a new penstock profile may be faster.",
            mend=False,
        )


def _link_words(measured: Sequence[tuple[Link, float]], wanted: Wanted) -> Iterator[str]:
    for inside in (False, True):
        here = [(link, rate) for link, rate in measured if link.pair.inside == inside]
        if not here:
            continue
        slowest, quickest = min(rate for _, rate in here), max(rate for _, rate in here)
        trips = max(link.rates.round_trip_s for link, _ in here if link.rates is not None)
        where = "inside nodes" if inside else "between nodes"
        rates = _mb(slowest) if len(here) == 1 else f"{_mb(slowest)} to {_mb(quickest)}"
        assumed = _assumed(wanted, inside=inside)
        told = "" if assumed is None else f" ({_mb(assumed)} assumed)"
        yield f"{where} {rates}{told}, round trip up to {milliseconds(trips)}"


def exchange(found: Examination) -> Check:
    """Report whether a sum over all ranks worked, as training needs it in every step."""
    if not found.exchange:
        return Check(name="exchange", found="a sum over all ranks by Gloo works")
    why = f"A sum over all ranks by Gloo failed ({found.exchange})"
    text = f"{why}: mend what stands above first, then try again."
    return Check(name="exchange", found="failed", findings=[Finding(text=text)])


def _slower(link: Link) -> float:
    assert link.rates is not None, "only links that were measured"
    return min(link.rates.out_bytes_per_s, link.rates.back_bytes_per_s)


def _assumed(wanted: Wanted, *, inside: bool) -> float | None:
    """Return the assumed bytes per second of one rank that sends to one other; None without a plan."""
    if wanted.assumed is None:
        return None
    rates, one_node = wanted.assumed.rates, wanted.assumed.nodes == 1
    return rates.intra_bytes_per_s if inside and not one_node else rates.link_bytes_per_s


def _mb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.1f} MB/s" if bytes_per_s < 1e8 else f"{bytes_per_s / 1e6:,.0f} MB/s"
