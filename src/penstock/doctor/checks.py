"""Judges what was found: one line per check, and a sentence for everything that needs to be fixed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final, TypeVar

from penstock.cost import ClusterFile
from penstock.doctor.examine import Examination, Link
from penstock.doctor.facts import ABSENT
from penstock.doctor.wire import Clock
from penstock.topology.faults import named
from penstock.topology.meeting_point import is_loopback, open_files
from penstock.words import bit_rate, counted, gib, milliseconds

S = TypeVar("S")
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run needs.

    Attributes:
        assumed: The cluster for which its plan was made; None if not given.
        cluster_name: The name of that cluster.
        rank_bytes: Memory of a rank.
        disk_bytes: Size of its checkpoints.
        disk: The folder of its checkpoints.
        staged: Whether what GPUs exchange goes through the host's memory, and so over TCP.
    """

    assumed: ClusterFile | None = None
    cluster_name: str = ""
    rank_bytes: int = 0
    disk_bytes: int = 0
    disk: str = ""
    staged: bool = False


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence: what is wrong where, and what to do.

    Attributes:
        text: The sentence.
        mend: Whether it has to be fixed; False if it is only worth knowing.
    """

    text: str
    mend: bool = True


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table."""

    name: str
    found: str
    findings: Sequence[Finding] = ()

    @staticmethod
    def of(name: str, found: str, texts: Iterable[str]) -> Check:
        """Return a check in which all of these texts say what to mend."""
        return Check(name=name, found=found, findings=[Finding(text=text) for text in texts])

    @property
    def passed(self) -> bool:
        """Whether nothing needs to be fixed."""
        return not any(finding.mend for finding in self.findings)


def by(things: Mapping[int, S], key: Callable[[S], T]) -> dict[T, list[int]]:
    """Return the ranks grouped by a key of what each of them has."""
    ranks: dict[T, list[int]] = defaultdict(list)
    for rank, thing in things.items():
        ranks[key(thing)].append(rank)
    return dict(ranks)


def differs(found: Examination, name: str) -> bool:
    """Tell whether ranks have different versions of a package."""
    return len(by(found.facts, lambda each: each.versions.get(name, ABSENT))) > 1


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


def several_machines(found: Examination) -> bool:
    """Tell whether some ranks reach each other only over a network."""
    return len({each.machine for each in found.facts.values()}) > 1


def judge(found: Examination, wanted: Wanted) -> list[Check]:
    """Return every check, in the order in which problems should be fixed."""
    checks = [_ranks(found), _versions(found)]
    if len(found.facts) > 1:
        checks += [clocks(found), interfaces(found), names(found), links(found, wanted)]
    checks += [_memory(found, wanted), *_disk(found, wanted), _files(found)]
    if found.exchange is not None and found.size > 1:
        checks.append(exchange(found))
    return checks


def _ranks(found: Examination) -> Check:
    findings = []
    if found.missing:
        verb = "has" if len(found.missing) == 1 else "have"
        findings.append(
            f"{capital(named(found.missing))} {verb} not come: look at the machine where "
            f"{'it' if len(found.missing) == 1 else 'they'} should run, and whether its process was started "
            "and reaches the host and port at which ranks meet."
        )
    if found.gone:
        findings.append(
            f"{capital(who(found, found.gone))} came and then did not answer: look for a process that was "
            "killed or stopped there, or a network that was cut."
        )
    came = f"{len(found.facts)} of {found.size} came, on {counted(len(found.nodes), 'node')}"
    return Check.of("ranks", came, findings)


def _versions(found: Examination) -> Check:
    names = dict.fromkeys(name for each in found.facts.values() for name in each.versions)
    findings, common = [], []
    for name in names:
        by_version = by({rank: each.versions.get(name, ABSENT) for rank, each in found.facts.items()}, str)
        usual = max(by_version, key=lambda version: len(by_version[version]))
        if name != "source":
            common.append(f"{name} {usual}")
        for version, ranks in by_version.items():
            if version != usual and not (name == "source" and differs(found, "penstock")):
                findings.append(_other_version(found, name, version, ranks, usual))
    return Check.of("versions", ", ".join(common), findings)


def _other_version(found: Examination, name: str, version: str, ranks: Sequence[int], usual: str) -> str:
    these = capital(who(found, ranks))
    verb = "has" if len(ranks) == 1 else "have"
    if name == "source":
        return (
            f"{these} {verb} other source code of Penstock than the rest ({version} instead of {usual}): "
            "install the same on all machines."
        )
    has = f"no {name}" if version == ABSENT else f"{name} {version}"
    rest = "none" if usual == ABSENT else usual
    return f"{these} {verb} {has}, and the rest {rest}: install the same on all machines."


def _memory(found: Examination, wanted: Wanted) -> Check:
    findings = []
    least = min(each.memory_bytes for each in found.facts.values())
    for ranks in found.nodes:
        need = len(ranks) * wanted.rank_bytes
        there = min(found.facts[rank].memory_bytes for rank in ranks)
        if need > there and not any(found.facts[rank].gpus for rank in ranks):
            findings.append(
                f"The machine of {who(found, ranks)} has {gib(there)} of free memory, and its "
                f"{counted(len(ranks), 'rank')} need {gib(need)} at the least: end what else runs there, or "
                "make the model or the batch smaller."
            )
    needs = f"; a rank needs {gib(wanted.rank_bytes)} at the least" if wanted.rank_bytes else ""
    return Check.of("memory", f"{gib(least)} free or more{needs}", findings)


def _disk(found: Examination, wanted: Wanted) -> Iterator[Check]:
    """Yield a check for every folder to which a run writes."""
    for place, folder in enumerate(next(iter(found.facts.values())).folders):
        by_rank = {rank: each.folders[place] for rank, each in found.facts.items()}
        findings = []
        for problem, ranks in by(by_rank, lambda each: each.problem).items():
            if problem:
                these = capital(who(found, ranks))
                text = f"{these} cannot write to {folder.path} ({problem}): name another folder."
                findings.append(text)
        least = min(each.free_bytes for each in by_rank.values())
        need = wanted.disk_bytes if folder.path == wanted.disk else 0
        short = [rank for rank, each in by_rank.items() if each.free_bytes < need]
        if short:
            text = (
                f"The disk of {folder.path} on {who(found, short)} has {gib(least)} left, and checkpoints "
                f"take {gib(need)}: free some, or name another folder (output.dir)."
            )
            findings.append(text)
        if folder.path == wanted.disk and (blind := _blind(found, folder.path)):
            text = (
                f"{capital(who(found, blind))} does not see what rank {found.reference} writes to "
                f"{folder.path}, where all ranks write checkpoints: name a folder on a shared file system "
                "(output.dir)."
            )
            findings.append(text)
        seen = found.shared.get(folder.path, ())
        several = several_machines(found) and len(found.nodes) > 1
        shared = ""
        if several and folder.path in found.shared:
            shared = "; shared by all ranks" if len(seen) == len(found.facts) else "; not shared by all nodes"
        needed = f", {gib(need)} needed" if need else ""
        yield Check.of("disk", f"{folder.path}: {gib(least)} free{needed}{shared}", findings)


def _blind(found: Examination, path: str) -> list[int]:
    """Return the ranks that do not see what the reference rank writes to a folder."""
    seen = found.shared.get(path)
    return (
        [] if seen is None else [rank for rank in found.facts if rank not in seen and rank not in found.gone]
    )


def _files(found: Examination) -> Check:
    need = open_files(found.size)
    least = min(each.open_files[0] for each in found.facts.values())
    short = [rank for rank, each in found.facts.items() if each.open_files[0] < need]
    findings = []
    if short:
        findings.append(
            f"{capital(who(found, short))} may open {least} files at once, and {found.size} ranks need about "
            f"{need}: raise the limit (ulimit -n {need}, LimitNOFILE of the service that starts the job)."
        )
    return Check.of("open files", f"{least:,} allowed, about {need} needed", findings)


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
                f"The clock of {who(found, (rank,))} is {abs(clock.offset_s):.2f} s {side} that of rank "
                f"{found.reference}: let all machines follow one time server (chrony, ntpd, timedatectl "
                "set-ntp true)."
            )
    if not off:
        return Check(name="clocks", found=f"not compared: nobody reaches rank {found.reference}")
    most = max(abs(clock.offset_s) for _, clock in off.values())
    error_s = max(clock.round_trip_s for _, clock in off.values()) / 2
    summary = f"at most {milliseconds(most)} from rank {found.reference}'s (± {milliseconds(error_s)})"
    return Check.of("clocks", summary, findings)


def interfaces(found: Examination) -> Check:
    """Check the interface that Gloo is to use, and the address at which others would reach it."""
    findings = []
    for problem, ranks in by(found.facts, lambda each: each.problem).items():
        if problem:
            findings.append(
                f"The machine of {who(found, ranks)} {problem}: name one that all others reach in "
                "GLOO_SOCKET_IFNAME."
            )
    several = several_machines(found)
    loose = [rank for rank, each in found.facts.items() if several and is_loopback(each.address)]
    if loose:
        how = (
            "GLOO_SOCKET_IFNAME is the loopback interface"
            if all(found.facts[rank].interface for rank in loose)
            else "ranks meet there"
        )
        findings.append(
            f"{capital(who(found, loose))} would be reached at a loopback address ({how}), which other "
            "machines cannot use: name the network's interface in GLOO_SOCKET_IFNAME."
        )
    used = by(found.facts, lambda each: each.interface or "not given")
    summary = ", ".join(f"{name} ({ranks_words(ranks, found)})" for name, ranks in used.items())
    text = next(iter(used)) if len(used) == 1 else summary
    given = "" if all(each.interface for each in found.facts.values()) else "; Gloo uses the host name's"
    return Check.of("interface", f"GLOO_SOCKET_IFNAME: {text}{given if several else ''}", findings)


def names(found: Examination) -> Check:
    """Check that host names resolve: without a given interface Gloo takes the one of the host's name."""
    findings = []
    unnamed = {rank: each for rank, each in found.facts.items() if not each.interface}
    if several_machines(found):
        for host, ranks in by(unnamed, lambda each: each.host).items():
            ip = unnamed[ranks[0]].host_ip
            if ip and not is_loopback(ip):
                continue
            what = f"resolves to {ip}, which other machines cannot use" if ip else "does not resolve"
            findings.append(
                f"On the machine of {ranks_words(ranks, found)} its own name {host} {what}: name the "
                "interface in GLOO_SOCKET_IFNAME, or give the name its address in /etc/hosts."
            )
    hosts = by(found.facts, lambda each: each.host)
    resolved = sum(bool(found.facts[ranks[0]].host_ip) for ranks in hosts.values())
    summary = f"{resolved} of {len(hosts)} resolve on their own machine"
    return Check.of("host names", summary, findings)


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
    if wanted.assumed is not None and not wanted.staged and any(each.gpus for each in found.facts.values()):
        text = "These are rates of TCP, and a plan for GPUs assumes those of NCCL: penstock doctor --gpu."
        findings.append(Finding(text=text, mend=False))
        wanted = replace(wanted, assumed=None)
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
                text=f"The link {link.pair.words} carries {bit_rate(rate)}, and {wanted.cluster_name} "
                f"assumes {bit_rate(assumed)}: mend it, or measure again with penstock profile and plan for "
                "what there is."
            )
        elif assumed is None and rate < UNLIKE * usual:
            yield Finding(
                text=f"The link {link.pair.words} carries {bit_rate(rate)}, half of the links "
                f"{bit_rate(usual)} or more: look at its cable, its port's speed and what else uses it."
            )
    if assumed is not None and usual > FAST * assumed:
        where = "inside nodes" if inside else "between nodes"
        yield Finding(
            text=f"Links {where} carry {bit_rate(usual)}, and {wanted.cluster_name} assumes "
            f"{bit_rate(assumed)}: a plan from a new penstock profile may be faster.",
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
        rates = bit_rate(slowest) if len(here) == 1 else f"{bit_rate(slowest)} to {bit_rate(quickest)}"
        assumed = _assumed(wanted, inside=inside)
        wanted_rate = "" if assumed is None else f" ({bit_rate(assumed)} assumed)"
        yield f"{where} {rates}{wanted_rate}, round trip up to {milliseconds(trips)}"


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
    return wanted.assumed.rates.intra_bytes_per_s if inside else wanted.assumed.rates.link_bytes_per_s
