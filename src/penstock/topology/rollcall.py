"""Finds who still answers: after a failed exchange ranks ask each other, so that messages name the culprit.

A transport only knows that its own peer was late or has gone, and that peer is often a survivor that was
waiting itself. So every rank has a thread that answers on a port of its own, with what the rank is doing. It
answers while the process runs: not if it is stopped, disconnected or dead. A rank that gives up says so as it
asks, so that those who ask later do not take it for the culprit. Nothing else is needed, neither the store
nor the launcher of the ranks, and it costs nothing until something has failed.
"""

from __future__ import annotations

import json
import re
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch.distributed as dist

ANSWER_S: Final = 2.0
"""Seconds that a rank may take to answer."""
BUSY_S: Final = 1.0
"""A rank that has been in no exchange for longer than this kept the others waiting."""
TOKEN_BYTES: Final = 32
BYE: Final = b"bye"
"""What a rank that leaves in order says to the rank that watches it."""
EXCHANGES: Final = frozenset({"inter", "intra", "device"})
"""What may wait for other ranks in a step: lanes, and the host for the device."""
MOST_BYTES: Final = 4096
MOST_REASON: Final = 500
WATCHES: Final = "watches"
"""What a rank says that keeps its connection, in place of a note."""
KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""After how many seconds without a sign of the other machine to ask for one, how often, how many times."""

HEARERS: Final[list[Callable[[str], None]]] = []
"""Who is told at once that another rank has given up, in words: exchanges with it may never end."""

Address = tuple[str, int]


class PeerLostError(dist.DistError):
    """Exchanges of this rank were ended, as another rank no longer takes part in them."""


class Happening(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Return whether it has happened."""
        ...


class Activity:
    """What this rank is doing, for its answer. Every lane writes it, so writing must cost next to nothing.

    lost: why exchanges of this rank were ended from outside, since another rank no longer takes part; what
    they were to bring is then anything.
    """

    def __init__(self) -> None:
        self._now: dict[str, tuple[object, float]] = {}
        self._left_s = time.monotonic()
        self._issued: tuple[Happening, float] | None = None
        self.failure: str | None = None
        self.lost: str | None = None

    def begin(self, lane: str, what: object) -> None:
        """Note that `lane` has begun with `what`, whose `str` is only made for an answer."""
        self._now[lane] = (what, time.monotonic())

    def end(self, lane: str) -> None:
        self._now.pop(lane, None)
        self._left_s = time.monotonic()

    def fail(self, what: str, error: BaseException) -> None:
        """Remember why this rank stops, unless the error is only the effect of another rank's end."""
        if self.lost is None and not is_transport_error(error):
            self.failure = f"{what}: {type(error).__name__}: {error}".splitlines()[0][:MOST_REASON]

    def issued(self, end: Happening) -> None:
        """Note that a half step has been given to the device, which has done it when `end` happens."""
        self._issued = end, time.monotonic()

    def check(self) -> None:
        """Raise PeerLostError if exchanges of this rank were ended from outside."""
        if self.lost is not None:
            raise PeerLostError(self.lost)

    @property
    def waited_s(self) -> float:
        """How long this rank has been in an exchange of a step, or the device has not ended its half step."""
        now_s = time.monotonic()
        begun = [since_s for lane, (_, since_s) in dict(self._now).items() if lane in EXCHANGES]
        if self._issued is not None and not self._issued[0].query():
            begun.append(self._issued[1])
        return now_s - min(begun, default=now_s)

    def begin_step(self) -> None:
        """Forget earlier failures when a step begins: they were caught, and do not explain a later end."""
        self.failure = None

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """Note an exchange outside the steps while entered; one may be part of another."""
        self.begin(what, what)
        try:
            yield
        finally:
            self.end(what)

    def answer(self) -> dict[str, Any]:
        """Return what other ranks are told."""
        now, now_s = dict(self._now), time.monotonic()
        computing = None if "device" in now else now.pop("compute", None)
        what, since_s = computing or (None, self._left_s)
        doing = f"in {what}" if computing else "outside every exchange and task"
        return {
            "exchanging": bool(now) or self.waited_s > 0,
            "doing": doing,
            "busy_s": now_s - since_s,
            "failure": self.failure,
        }


ACTIVITY: Final = Activity()


@dataclass(frozen=True)
class Roll:
    """The result of a call.

    silent: ranks that do not answer. answers: what the others said. gone: ranks that had given up before,
    with the reason if it was their own.
    """

    silent: tuple[int, ...]
    answers: Mapping[int, Mapping[str, Any]]
    gone: Mapping[int, str | None]

    @property
    def failed(self) -> dict[int, str]:
        """Ranks that failed for a reason of their own, with the reason."""
        known = [*self.gone.items(), *((rank, said["failure"]) for rank, said in self.answers.items())]
        return {rank: why for rank, why in sorted(known, key=lambda each: each[0]) if why}

    @property
    def busy(self) -> dict[int, str]:
        """Ranks that run, but have been in no exchange for long, with what they were doing."""
        return {
            rank: f"{said['doing']} for {said['busy_s']:.1f} s"
            for rank, said in self.answers.items()
            if not said["exchanging"] and rank not in self.gone and said["busy_s"] > BUSY_S
        }

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks that no longer run, or run and do not take part."""
        return self.silent or (() if self.failed else tuple(self.busy))

    def verdict(self) -> str:
        """Return one clause that names the ranks at fault; "" if every rank answers and waits as well."""
        if self.failed:
            return "; ".join(f"rank {rank} had failed: {why}" for rank, why in self.failed.items())
        if self.silent:
            verb = "does not answer: it is" if len(self.silent) == 1 else "do not answer: they are"
            return f"{named(self.silent)} {verb} stopped, disconnected or dead"
        return "; ".join(f"rank {rank} answers, but was {what}" for rank, what in self.busy.items())


class RollCall:
    """This rank's part in roll calls: answers when it is called, and calls the others.

    listener: bound and listening. addresses: of all ranks. token: what a caller must know. told: what a rank
    that has given up said last, for whoever watches.
    """

    told: str | None = None

    def __init__(
        self, rank: int, listener: socket.socket, addresses: Sequence[Address], token: bytes
    ) -> None:
        self._rank, self._listener, self._addresses, self._token = rank, listener, addresses, token
        self._gone: dict[int, str | None] = {}
        self._watchers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, name="penstock-roll-call", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and take leave of the rank that watches this one."""
        for watcher in self._watchers:
            with watcher, suppress(OSError):  # it has ended before
                watcher.sendall(BYE)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self._thread.join()

    def give_up(self) -> Roll:
        """Tell all other ranks that this one ends, and return what they do, within `ANSWER_S`."""
        others = [rank for rank in range(len(self._addresses)) if rank != self._rank]
        note = {"rank": self._rank, "failure": ACTIVITY.failure}
        answers = self._ask(others, note)
        gone = dict(self._gone)
        return Roll(tuple(r for r in others if r not in answers and r not in gone), answers, gone)

    def connect_to_neighbour(self) -> socket.socket:
        """Return a connection to the next rank that lasts as long as that rank runs. Raises OSError.

        Before a rank closes it in order, it sends `BYE`. A machine that is gone is noticed in seconds.
        """
        address = self._addresses[(self._rank + 1) % len(self._addresses)]
        connection = socket.create_connection(address, timeout=ANSWER_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.sendall(self._token + json.dumps(WATCHES).encode() + b"\n")
        return connection

    def reaches(self, rank: int) -> bool:
        """Tell whether one other rank answers."""
        return rank in self._ask([rank], None)

    def _ask(self, ranks: Sequence[int], note: Mapping[str, Any] | None) -> dict[int, Mapping[str, Any]]:
        line = self._token + json.dumps(note).encode() + b"\n"
        return _ask({rank: self._addresses[rank] for rank in ranks}, line)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with connection:
                note = None
                with suppress(OSError, ValueError):  # a caller that goes away needs no answer
                    connection.settimeout(ANSWER_S)
                    note = self._heard(_read_line(connection))
                if note == WATCHES:
                    self._watchers.append(socket.socket(fileno=connection.detach()))
                elif note is not None:
                    answer = json.dumps(ACTIVITY.answer()).encode()
                    if note:
                        self._note(note["rank"], note["failure"])
                    with suppress(OSError):
                        connection.sendall(answer)

    def _heard(self, line: bytes) -> Any:
        """Return what a rank says, {} if it only asks; None if it is no rank of this run."""
        if not secrets.compare_digest(line[:TOKEN_BYTES], self._token):
            return None
        return json.loads(line[TOKEN_BYTES:]) or {}

    def _note(self, rank: int, failure: str | None) -> None:
        """Remember that a rank has given up, and end what waits for it, before that rank has its answer."""
        self._gone[rank] = failure
        self.told = f"rank {rank} has ended" + (f": {failure}" if failure else "")
        for hear in HEARERS:
            hear(self.told)


def new_token() -> bytes:
    """Return a secret that only the ranks of one run know."""
    return secrets.token_hex(TOKEN_BYTES // 2).encode()


def open_listener(towards: Address) -> socket.socket:
    """Return a socket listening only at the address by which this host reaches `towards`."""
    family, _, _, _, address = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # this sends nothing: it only chooses a route
        host = probe.getsockname()[0]
    return socket.create_server((host, 0), family=family, backlog=1024)


def is_transport_error(error: BaseException) -> bool:
    """Tell whether an exchange with other ranks broke, or was waited for in vain."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.match(r"\[[^\]]*\.cc:\d+\] ", str(error)) is not None
    )


def named(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as `rank 1`, `ranks 1 and 3`, `ranks 1, 2 and 3`."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _ask(addresses: Mapping[int, Address], line: bytes) -> dict[int, Mapping[str, Any]]:
    """Return the answers that come within `ANSWER_S`, by rank."""
    deadline_s = time.monotonic() + ANSWER_S
    answers: dict[int, Mapping[str, Any]] = {}
    with selectors.DefaultSelector() as waiting:
        for rank, address in addresses.items():
            connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            connection.setblocking(False)
            connection.connect_ex(address)
            waiting.register(connection, selectors.EVENT_WRITE, (rank, bytearray()))
        while waiting.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                rank, heard = key.data
                if _proceed(waiting, key, line, heard) and heard:
                    with suppress(ValueError):  # a stranger that has the port of a dead rank
                        answers[rank] = json.loads(heard.decode())
        for key in list(waiting.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # all of them are sockets
    return answers


def _proceed(
    waiting: selectors.BaseSelector, key: selectors.SelectorKey, line: bytes, heard: bytearray
) -> bool:
    """Continue a conversation: send the line, or receive more of the answer. Return True when it is over."""
    connection = key.fileobj
    assert isinstance(connection, socket.socket)
    try:
        if key.events == selectors.EVENT_WRITE:
            connection.sendall(line)
            waiting.modify(connection, selectors.EVENT_READ, key.data)
            return False
        piece = connection.recv(MOST_BYTES)
        heard += piece
        over = not piece
    except OSError:  # refused or reset: no process is there
        heard.clear()
        over = True
    if over:
        waiting.unregister(connection)
        connection.close()
    return over


def _read_line(connection: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n") and len(found) < MOST_BYTES and (piece := connection.recv(MOST_BYTES)):
        found += piece
    return found
