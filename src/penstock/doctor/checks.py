"""Judges what was found: one line per check, and a sentence for everything that needs to be fixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from penstock.doctor.examine import Examination
from penstock.doctor.facts import ABSENT, Facts
from penstock.doctor.findings import (
    Check,
    Finding,
    Wanted,
    by,
    by_of,
    capital,
    differs,
    several_machines,
    who,
)
from penstock.doctor.network import clocks, exchange, interfaces, links, names
from penstock.topology.faults import named
from penstock.words import counted, gib

SPARE_FILES: Final = 256
FILES_PER_RANK: Final = 16
"""Open files for the connections to one other rank, if it is in every group of every lane."""


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
    return Check(name="ranks", found=came, findings=[Finding(text=text) for text in findings])


def _versions(found: Examination) -> Check:
    names = dict.fromkeys(name for each in found.facts.values() for name in each.versions)
    findings, alike = [], []
    for name in names:
        by_version = by(found, partial(_version, name))
        usual = max(by_version, key=lambda version: len(by_version[version]))
        if name != "source":
            alike.append(f"{name} {usual}")
        for version, ranks in by_version.items():
            if version != usual and not (name == "source" and differs(found, "penstock")):
                findings.append(Finding(text=_other_version(found, name, version, ranks, usual)))
    return Check(name="versions", found=", ".join(alike), findings=findings)


def _version(name: str, facts: Facts) -> str:
    return facts.versions.get(name, ABSENT)


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
                Finding(
                    text=f"The machine of {who(found, ranks)} has {gib(there)} of free memory, and its "
                    f"{counted(len(ranks), 'rank')} need {gib(need)} at the least: end what else runs there, "
                    "or make the model or the batch smaller."
                )
            )
    needs = f"; a rank needs {gib(wanted.rank_bytes)} at the least" if wanted.rank_bytes else ""
    return Check(name="memory", found=f"{gib(least)} free or more{needs}", findings=findings)


def _disk(found: Examination, wanted: Wanted) -> Iterator[Check]:
    """Yield a check for every folder to which a run writes."""
    for place, folder in enumerate(next(iter(found.facts.values())).folders):
        by_rank = {rank: each.folders[place] for rank, each in found.facts.items()}
        findings = []
        for problem, ranks in by_of(by_rank, lambda each: each.problem).items():
            if problem:
                these = capital(who(found, ranks))
                text = f"{these} cannot write to {folder.path} ({problem}): name another folder."
                findings.append(Finding(text=text))
        least = min(each.free_bytes for each in by_rank.values())
        need = wanted.disk_bytes if folder.path == wanted.disk else 0
        short = [rank for rank, each in by_rank.items() if each.free_bytes < need]
        if short:
            text = (
                f"The disk of {folder.path} on {who(found, short)} has {gib(least)} left, and checkpoints "
                f"take {gib(need)}: free some, or name another folder (output.dir)."
            )
            findings.append(Finding(text=text))
        if folder.path == wanted.disk and (blind := _blind(found, folder.path)):
            text = (
                f"{capital(who(found, blind))} does not see what rank {found.reference} writes to "
                f"{folder.path}, where all ranks write checkpoints: name a folder on a shared file system "
                "(output.dir)."
            )
            findings.append(Finding(text=text))
        seen = found.shared.get(folder.path, ())
        several = several_machines(found) and len(found.nodes) > 1
        shared = ""
        if several and folder.path in found.shared:
            shared = "; shared by all ranks" if len(seen) == len(found.facts) else "; not shared by all nodes"
        yield Check(
            name="disk",
            found=f"{folder.path}: {gib(least)} free{f', {gib(need)} needed' if need else ''}{shared}",
            findings=findings,
        )


def _blind(found: Examination, path: str) -> list[int]:
    """Return the ranks that do not see what the reference rank writes to a folder."""
    seen = found.shared.get(path)
    return (
        [] if seen is None else [rank for rank in found.facts if rank not in seen and rank not in found.gone]
    )


def _files(found: Examination) -> Check:
    need = SPARE_FILES + FILES_PER_RANK * found.size
    least = min(each.open_files[0] for each in found.facts.values())
    short = [rank for rank, each in found.facts.items() if each.open_files[0] < need]
    findings = []
    if short:
        text = (
            f"{capital(who(found, short))} may open {least} files at once, and {found.size} ranks need about "
            f"{need}: raise the limit (ulimit -n {need}, LimitNOFILE of the service that starts the job)."
        )
        findings.append(Finding(text=text))
    return Check(name="open files", found=f"{least:,} allowed, about {need} needed", findings=findings)
