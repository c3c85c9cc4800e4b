"""Everything that ranks do together to examine their cluster; a rank that does not answer is left out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, TypeVar

import torch

from penstock.config import ConfigError, asked
from penstock.doctor.facts import Facts, Folder, find_facts, nearest
from penstock.doctor.meeting import Meeting, MeetingError
from penstock.doctor.wire import (
    PATIENCE_S,
    STREAM_PATIENCE_S,
    STREAM_S,
    Address,
    Clock,
    Rates,
    Server,
    ask_clock,
    ask_rates,
)
from penstock.topology import CommunicationError, Control, ProcessInfo, join, leave


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ranks.

    Attributes:
        asks, answers: The rank that asks, and the one that answers.
        nodes: The nodes of the two, counted from 0; equal if they share one.
    """

    asks: int
    answers: int
    nodes: tuple[int, int]

    @property
    def inside(self) -> bool:
        """Whether both ranks share a node."""
        return self.nodes[0] == self.nodes[1]

    @property
    def words(self) -> str:
        """Nodes of the pair in words, such as `from node 0 to node 2`."""
        first, second = self.nodes
        return f"inside node {first}" if self.inside else f"from node {first} to node {second}"


def nodes_of(facts: Mapping[int, Facts]) -> list[list[int]]:
    """Return the ranks of every node: local rank 0 begins one, and the next ones on its machine belong to it.

    Launchers may deal ranks to machines in turn, several may run on one machine, and a node's ranks may have
    namespaces of their own.
    """
    nodes: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    for rank, each in sorted(facts.items()):
        node = latest.get(each.machine, latest.get(each.kernel))
        if node is None or each.local_rank == 0:
            node = latest[each.kernel] = []
            nodes.append(node)
        latest[each.machine] = node
        node.append(rank)
    return nodes


def rounds_of(nodes: Sequence[Sequence[int]]) -> Iterator[list[Pair]]:
    """Yield first the first two ranks of every node, then every pair of nodes, half of the nodes at a time.

    A node has one pair in a round, as in a round-robin tournament: one place stays fixed, and the others move
    on by one.
    """
    inside = [
        Pair(asks=ranks[0], answers=ranks[1], nodes=(node, node))
        for node, ranks in enumerate(nodes)
        if len(ranks) > 1
    ]
    if inside:
        yield inside
    places: list[int | None] = [*range(len(nodes)), *([None] if len(nodes) % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        pairs = [tuple(sorted((one, two))) for one, two in met if one is not None and two is not None]
        yield [Pair(asks=nodes[a][0], answers=nodes[b][0], nodes=(a, b)) for a, b in sorted(pairs)]
        places = [places[0], places[-1], *places[1:-1]]


T = TypeVar("T")

TURN_S: Final = 10.0
"""Seconds that a short exchange may take on a slow or busy network."""

ROUND_S: Final = 2 * (STREAM_S + STREAM_PATIENCE_S) + PATIENCE_S
EXCHANGE_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """The measurement between two ranks: rates, or the reason why there are none."""

    pair: Pair
    rates: Rates | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What the ranks found.

    Attributes:
        size: How many ranks there are to be.
        reference: The rank with whose clock the others are compared.
        facts: What every rank that came has found about itself.
        clocks: The offset of every such rank's clock.
        links: What was measured between ranks.
        gone: Ranks that came and stopped answering.
        exchange: Why a sum over all ranks failed, "" if it worked, None if it was not tried.
        shared: By folder, the ranks that see what the reference rank writes there.
    """

    size: int
    reference: int
    facts: Mapping[int, Facts]
    clocks: Mapping[int, Clock]
    links: Sequence[Link]
    gone: tuple[int, ...]
    exchange: str | None
    shared: Mapping[str, tuple[int, ...]]

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that never came."""
        return tuple(rank for rank in range(self.size) if rank not in self.facts)

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """Ranks of every node."""
        return nodes_of(self.facts)


def examine(
    meeting: Meeting, info: ProcessInfo, towards: str, folders: Sequence[Path], wait_s: float
) -> Examination | None:
    """Examine the cluster together with the other ranks.

    Every rank must call it.

    Args:
        meeting: Where the ranks leave their messages.
        info: Which rank this is.
        towards: The host at which ranks meet.
        folders: Folders to which a run would write.
        wait_s: Seconds to wait for ranks.

    Returns:
        What was found, on the rank that is to report it; None on the others.

    Raises:
        MeetingError: If the reporting rank has gone.
    """
    facts, token = find_facts(info, towards, folders), secrets.token_hex(16)
    server = None
    with suppress(OSError):  # the missing address reports this
        server = Server(facts.address, token) if facts.address else None
    try:
        until_s = time.monotonic() + wait_s
        leads = info.rank == 0 and meeting.first("lead")
        address = None if server is None else server.address
        meeting.leave("facts", {"facts": asdict(facts), "address": address, "token": token})
        came = meeting.hear("facts", range(meeting.size), until_s)
        if info.rank != 0 and 0 not in came:
            leads = meeting.first("lead")
        doctor = _Doctor(meeting, info, facts, leads=leads)
        return doctor.examine(came, until_s + wait_s)
    finally:
        if server is not None:
            server.close()


class _Doctor:
    """One rank's part of the examination. leads: whether it decides who takes part, and hears everything."""

    def __init__(self, meeting: Meeting, info: ProcessInfo, facts: Facts, *, leads: bool) -> None:
        self._meeting, self._info, self._facts, self._leads = meeting, info, facts, leads
        self._rank = info.rank

    def examine(self, came: Mapping[int, Mapping[str, Any]], until_s: float) -> Examination | None:
        if self._leads:
            self._meeting.announce("present", {"ranks": sorted(came), "lead": self._rank})
        present = self._meeting.announced("present", until_s)
        if present is None:
            raise MeetingError("the rank that was to report has gone")
        ranks, self._reference = tuple(present["ranks"]), int(present["lead"])
        if self._rank not in ranks:
            raise MeetingError("this rank came after the others had given up waiting for it")
        messages = {rank: came[rank] for rank in ranks if rank in came}
        missing = [rank for rank in ranks if rank not in messages]
        messages |= self._meeting.hear("facts", missing, time.monotonic() + TURN_S)
        self._known = dict(sorted(messages.items()))
        self._gone: set[int] = set()
        clocks = self._clocks()
        shared = self._shared()
        links = self._links()
        exchange = self._exchange(links)
        if not self._leads:
            return None
        return Examination(
            size=self._meeting.size,
            reference=self._reference,
            facts=self._all_facts(),
            clocks=clocks,
            links=sorted(links, key=lambda link: link.pair.nodes),
            gone=tuple(sorted(self._gone)),
            exchange=exchange,
            shared=shared,
        )

    # ---- clocks --------------------------------------------------------------------------------------------

    def _clocks(self) -> dict[int, Clock]:
        clocks = self._all_do("clock", self._my_clock, TURN_S + PATIENCE_S)
        return {rank: Clock(**said) for rank, said in clocks.items() if said}

    def _my_clock(self) -> dict[str, Any]:
        if self._rank == self._reference:
            return {}
        with suppress(OSError):  # links report which ranks cannot be reached
            return asdict(ask_clock(*self._reached_at(self._reference)))
        return {}

    # ---- folders -------------------------------------------------------------------------------------------

    def _shared(self) -> dict[str, tuple[int, ...]]:
        """Return, by folder, who sees a file that the reference rank makes in it or its nearest parent."""
        marks: dict[str, str] = {}
        made = []
        if self._leads:
            for folder in self._facts.folders:
                there = nearest(Path(folder.path))
                with suppress(OSError):
                    file = NamedTemporaryFile(dir=there, prefix=".penstock-doctor-")  # noqa: SIM115
                    made.append(file)
                    marks[folder.path] = file.name
            self._meeting.announce("marks", marks)
        files = self._meeting.announced("marks", time.monotonic() + 2 * TURN_S) or {}
        sightings = self._all_do(
            "seen", lambda: {path: asked(Path(name).exists) for path, name in files.items()}
        )
        for file in made:
            file.close()
        return {path: tuple(rank for rank, seen in sightings.items() if seen.get(path)) for path in files}

    # ---- links ---------------------------------------------------------------------------------------------

    def _links(self) -> list[Link]:
        """Measure pairs of ranks, round by round, so that no rank is in two measurements at once."""
        links = []
        for number, pairs in enumerate(rounds_of(nodes_of(self._all_facts()))):
            own = next((pair for pair in pairs if pair.asks == self._rank), None)
            if own is not None:
                self._meeting.leave(f"round-{number}", self._measured(own))
            asking = {pair.asks: pair for pair in pairs if pair.asks not in self._gone}
            said = self._meeting.hear(f"round-{number}", tuple(asking), time.monotonic() + ROUND_S)
            self._gone |= asking.keys() - said.keys()
            for rank, answer in said.items():
                rates = None if answer.get("rates") is None else Rates(**answer["rates"])
                links.append(Link(pair=asking[rank], rates=rates, problem=answer.get("problem", "")))
        return links

    def _measured(self, pair: Pair) -> dict[str, Any]:
        try:
            return {"rates": asdict(ask_rates(*self._reached_at(pair.answers)))}
        except (OSError, ValueError) as error:
            return {"problem": getattr(error, "strerror", None) or str(error) or "no answer"}

    def _reached_at(self, rank: int) -> tuple[Address, str]:
        said = self._known[rank]
        if said["address"] is None:
            raise ConnectionError(f"rank {rank} has no address to listen at")
        host, port = said["address"]
        return (host, port), said["token"]

    # ---- an exchange ---------------------------------------------------------------------------------------

    def _exchange(self, links: Sequence[Link]) -> str | None:
        """Sum over all ranks, as training does, unless that is known to fail: failing takes long."""
        if self._leads:
            whole = len(self._known) == self._meeting.size and not self._gone
            fine = not any(link.problem for link in links)
            fine &= not any(said["facts"]["problem"] for said in self._known.values())
            self._meeting.announce("exchange", {"go": whole and fine})
        go = self._meeting.announced("exchange", time.monotonic() + ROUND_S)
        if go is None or not go["go"]:
            return None
        results = self._all_do("exchanged", self._summed, 2 * EXCHANGE_S)
        return "; ".join(dict.fromkeys(each["problem"] for each in results.values() if each["problem"]))

    def _summed(self) -> dict[str, Any]:
        try:
            join(self._info, EXCHANGE_S, torch.device("cpu"))
            Control(self._rank, self._info.world_size).any(False, "summing over all ranks")
            leave()
        except (CommunicationError, ConfigError, RuntimeError) as error:
            return {"problem": str(error)}
        return {"problem": ""}

    # ---- together ------------------------------------------------------------------------------------------

    def _all_facts(self) -> dict[int, Facts]:
        return {rank: facts_of(said["facts"]) for rank, said in self._known.items()}

    def _all_do(
        self, key: str, work: Callable[[], dict[str, Any]], within_s: float = TURN_S
    ) -> dict[int, dict[str, Any]]:
        """Return what every rank that still answers found; ranks that do not answer are gone."""
        self._meeting.leave(key, work())
        ranks = [rank for rank in self._known if rank not in self._gone]
        answers = self._meeting.hear(key, ranks, time.monotonic() + within_s)
        self._gone |= set(ranks) - answers.keys()
        return answers


def facts_of(plain: Mapping[str, Any]) -> Facts:
    """Return the facts that a rank has sent."""
    folders = [Folder(**each) for each in plain["folders"]]
    return Facts(**{**plain, "folders": folders, "open_files": tuple(plain["open_files"])})
