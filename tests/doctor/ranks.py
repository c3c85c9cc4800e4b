"""`penstock doctor` on ranks that are forked: some of them hidden, disguised, or in namespaces."""

# ruff: noqa: TID251 - ranks of which some never end have one deadline

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from penstock.cli.main import main
from penstock.doctor import facts, wire
from penstock.doctor.meeting import Meeting
from penstock.lab.emulate import Cluster
from penstock.lab.emulate.system import enter
from tests.support.ranks import forking
from tests.support.runs import clean_environ

DIED = 9
MOMENT_S = 0.2


@dataclass(frozen=True)
class Disguise:
    """What a rank says instead of the truth. machine: as if it were another;
    dies: after it has come; user: who it is from when it knows its versions."""

    versions: Mapping[str, str] = field(default_factory=dict)
    ahead_s: float = 0.0
    machine: str = ""
    dies: bool = False
    user: int | None = None


HONEST = Disguise()


@dataclass(frozen=True)
class Unheard:
    """Who says nothing: ranks that never come, and those that die after they have come."""

    never: Collection[int]
    dying: Collection[int]

    def shorten_waits(self) -> None:
        """Wait for these in this process for a moment only, once all others have been heard.

        The product's own wait then ends as ever, and no rank of a busy machine is late for it.
        """
        whole = Meeting.hear

        def hear(
            meeting: Meeting, key: str, ranks: Collection[int], until_s: float
        ) -> dict[int, dict[str, Any]]:
            silent = {*self.never, *(self.dying if key != "facts" else ())}
            speaking = [rank for rank in ranks if rank not in silent]
            if len(speaking) < len(ranks):
                whole(meeting, key, speaking, until_s)
                until_s = min(until_s, time.monotonic() + MOMENT_S)
            return whole(meeting, key, ranks, until_s)

        Meeting.hear = hear  # type: ignore[method-assign, assignment]  # for good: this process ends with its rank


@dataclass(frozen=True)
class Told:
    """How the ranks ended, and what all of them wrote."""

    codes: Mapping[int, int | None]
    out: str
    errors: str


def doctor(
    size: int,
    *words: str,
    come: Collection[int] | None = None,
    disguises: Mapping[int, Disguise] | None = None,
    cluster: Cluster | None = None,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> Told:
    """Run the command on ranks that meet as torchrun's do, or, in a cluster, at a store that rank 0 opens.

    come: the ranks that are started; None = all. What never comes is waited for until all the rest is there.
    """
    never = {rank for rank in range(size) if come is not None and rank not in come}
    dying = {rank for rank, disguise in (disguises or {}).items() if disguise.dies}
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if cluster is None else None
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        for file in (out, errors):
            file.touch()
        ranks = {}
        for rank in range(size) if come is None else come:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            if store is not None:
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
                own |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
            namespace = None
            if cluster is not None:
                own |= {**cluster.environ(rank), "MASTER_PORT": "29500"}
                namespace = cluster.namespaces[rank]
            disguise = (disguises or {}).get(rank, HONEST)
            child = forking().Process(
                target=_be_rank,
                args=(
                    words,
                    clean_environ() | own | dict(environ or {}),
                    namespace,
                    disguise,
                    Unheard(never, dying),
                    out,
                    errors,
                ),
                daemon=True,
            )
            child.start()
            ranks[rank] = child
        until_s = time.monotonic() + timeout_s
        for child in ranks.values():
            child.join(max(0.0, until_s - time.monotonic()))
        codes = {rank: child.exitcode for rank, child in ranks.items()}
        for child in ranks.values():
            child.kill()
        return Told(codes, out.read_text(), errors.read_text())


def _be_rank(
    words: Collection[str],
    environ: Mapping[str, str],
    namespace: str | None,
    disguise: Disguise,
    unheard: Unheard,
    out: Path,
    errors: Path,
) -> None:
    for path, descriptor in ((out, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a text stream
    os.environ.clear()
    os.environ.update(environ)
    if namespace is not None:
        enter(namespace)
    _put_on(disguise)
    unheard.shorten_waits()
    code = main(["doctor", *words])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _put_on(disguise: Disguise) -> None:
    true_versions, true_time = facts.versions, wire.now_s

    def versions() -> dict[str, str]:
        found = {**true_versions(), **disguise.versions}
        if disguise.user is not None:
            os.setuid(disguise.user)
        return found

    facts.versions = versions
    wire.now_s = lambda: true_time() + disguise.ahead_s
    if disguise.machine:
        facts._machine = lambda: disguise.machine
    if disguise.dies:
        module = importlib.import_module("penstock.doctor.examine")  # the package has a function of that name
        module._Doctor._clocks = lambda _: os._exit(DIED)
