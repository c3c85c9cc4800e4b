"""Measures between two ranks, over TCP on the interface that Gloo would use: clock offset, delays and rates.

Every rank serves; one of two asks. A request is a line of JSON, and every wait has an end.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

PINGS: Final = 20
PINGS_S: Final = 5.0
"""No more pings follow after this many seconds: a busy machine answers late."""

STREAM_S: Final = 0.6
LEAD_S: Final = 0.15
"""First seconds of a stream, which are not counted: they fill buffers and open TCP's window."""

PATIENCE_S: Final = 5.0
STREAM_PATIENCE_S: Final = 20.0
"""Seconds for what a slow link still has in its buffers when a stream ends."""

SEND_BUFFER_BYTES: Final = 1 << 19
CHUNK: Final = bytes(1 << 18)
Address = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The offset between two clocks.

    Attributes:
        offset_s: Seconds by which the clock of the rank that asked is ahead.
        round_trip_s: Seconds of the quickest question; the offset is wrong by half of this at most.
    """

    offset_s: float
    round_trip_s: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second in both directions, one after the other, and the median round trip in seconds."""

    out_bytes_per_s: float
    back_bytes_per_s: float
    round_trip_s: float


class Server:
    """Answers other ranks until it is closed.

    Args:
        host: The address at which to listen.
        token: The secret that ranks share; questions without it are not answered.
    """

    def __init__(self, host: str, token: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._token = token
        self._thread = threading.Thread(target=self._serve, name="penstock-doctor", daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def close(self) -> None:
        """Stop answering."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):  # a stranger, or a rank that has gone
            _prepare(connection)
            with connection.makefile("rwb", buffering=0) as lines:
                if json.loads(lines.readline(4096)).get("token") != self._token:
                    return
                while line := lines.readline(4096):
                    what = json.loads(line)["what"]
                    if what not in ("ping", "take"):
                        _pour(connection)
                        continue
                    said = {"now_s": now_s()} if what == "ping" else {"rate": _drain(connection)}
                    connection.sendall(json.dumps(said).encode() + b"\n")


def ask_clock(address: Address, token: str) -> Clock:
    """Measure the offset between both clocks.

    Raises:
        OSError: Where there is no answer.
    """
    with _Asking(address, token) as asking:
        rounds = list(asking.pings())
    offset_s, round_trip_s = min(rounds, key=lambda each: each[1])
    return Clock(offset_s=offset_s, round_trip_s=round_trip_s)


def ask_rates(address: Address, token: str) -> Rates:
    """Measure rates, which takes about two `STREAM_S`.

    Raises:
        OSError: Where there is no answer.
    """
    with _Asking(address, token) as asking:
        round_trip_s = median(trip for _, trip in asking.pings())
        asking.say({"what": "take"})
        _pour(asking.connection)
        out = float(asking.hear()["rate"])
        asking.say({"what": "give"})
        back = _drain(asking.connection)
    return Rates(out_bytes_per_s=out, back_bytes_per_s=back, round_trip_s=round_trip_s)


def now_s() -> float:
    """Return the time of this machine's clock."""
    return time.time()


class _Asking:
    """A connection to a server, over which questions are asked."""

    def __init__(self, address: Address, token: str) -> None:
        self.connection = socket.create_connection(address, timeout=PATIENCE_S)
        _prepare(self.connection)
        self._lines = self.connection.makefile("rwb", buffering=0)
        self.say({"token": token})

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self.connection.close()

    def pings(self) -> Iterator[tuple[float, float]]:
        """Yield `PINGS` pings, or as many as are begun within `PINGS_S`, at least one."""
        until_s = time.monotonic() + PINGS_S
        for number in range(PINGS):
            if number and time.monotonic() > until_s:
                return
            yield self.ping()

    def ping(self) -> tuple[float, float]:
        """Return how far this machine's clock is ahead, and the round trip, both in seconds."""
        began_s, tick_s = now_s(), time.monotonic()
        self.say({"what": "ping"})
        there_s = self.hear()["now_s"]
        round_trip_s = time.monotonic() - tick_s
        return began_s + round_trip_s / 2 - there_s, round_trip_s

    def say(self, words: Mapping[str, Any]) -> None:
        self.connection.sendall(json.dumps(words).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        line = self._lines.readline(4096)
        if not line:
            raise ConnectionError("the other rank has closed the connection")
        message: dict[str, Any] = json.loads(line)
        return message


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(STREAM_PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def _pour(connection: socket.socket) -> None:
    """Send chunks for `STREAM_S`, each after a byte that says whether it is the last one."""
    until_s = time.monotonic() + STREAM_S
    while time.monotonic() < until_s:
        connection.sendall(b"\1" + CHUNK)
    connection.sendall(b"\0" + CHUNK)


def _drain(connection: socket.socket) -> float:
    """Return bytes per second of what arrives up to the last chunk, counted from `LEAD_S` on."""
    frame = memoryview(bytearray(1 + len(CHUNK)))
    began_s = time.monotonic()
    counted, since_s, more = 0, 0.0, True
    while more:
        filled = 0
        while filled < len(frame):
            got = connection.recv_into(frame[filled:])
            if not got:
                raise ConnectionError("the other rank has closed the connection")
            filled += got
        at_s = time.monotonic()
        if since_s:
            counted += len(frame)
        elif at_s > began_s + LEAD_S:
            since_s = at_s
        more = frame[0] == 1
    taken_s = time.monotonic() - (since_s or began_s)
    return (counted or len(frame)) / max(taken_s, 1e-9)
