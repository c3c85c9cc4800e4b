"""Where ranks leave facts for each other: torch's store, never waited for beyond a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

# torch.distributed exports these as well, but hides them from type checkers.
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.topology import ProcessInfo
from penstock.topology.meeting_point import open_store, within

T = TypeVar("T")

POLL_S = 0.02
ANSWER_S = 10.0
"""Seconds that the store may take to answer."""

LEAVE_S = 5.0
"""How long the store is kept open for ranks that have yet to read from it."""


class MeetingError(Exception):
    """The store cannot be reached, or the meeting has ended."""


class Meeting:
    """One rank's view of the store. Its methods raise MeetingError where the store cannot be reached.

    Args:
        info: Which rank this is.
        host, port: Where the store is.
        serves: Whether this rank serves the store.
        wait_s: Seconds to try to reach the store.

    Raises:
        MeetingError: If the store cannot be reached.
    """

    def __init__(self, info: ProcessInfo, host: str, port: int, *, serves: bool, wait_s: float) -> None:
        self.rank, self.size = info.rank, info.world_size
        try:
            self._server: Store = open_store(host, port, wait_s, serves=serves)
        except RuntimeError as error:
            raise MeetingError(str(error).splitlines()[0]) from error
        self._store = PrefixStore("penstock-doctor", self._server)

    def leave(self, key: str, said: Mapping[str, Any]) -> None:
        """Publish a message under a key of this rank."""
        self.announce(f"{key}/{self.rank}", said)

    def hear(self, key: str, ranks: Collection[int], until_s: float) -> dict[int, dict[str, Any]]:
        """Return the messages that these ranks have published by `until_s` (time.monotonic)."""
        messages: dict[int, dict[str, Any]] = {}

        def listen() -> None:
            while True:
                for rank in ranks:
                    if rank not in messages and self._store.check([f"{key}/{rank}"]):
                        messages[rank] = json.loads(self._store.get(f"{key}/{rank}"))
                if len(messages) == len(ranks) or time.monotonic() > until_s:
                    return
                time.sleep(POLL_S)

        self._asking(listen, until_s)
        return messages

    def first(self, key: str) -> bool:
        """Tell whether this rank is the first to claim a key."""
        return self._asking(lambda: self._store.add(key, 1)) == 1

    def announce(self, key: str, said: Mapping[str, Any]) -> None:
        """Publish a message to all ranks."""
        self._asking(lambda: self._store.set(key, json.dumps(said)))

    def announced(self, key: str, until_s: float) -> dict[str, Any] | None:
        """Return what one rank announced to all; None if it has not by `until_s`."""

        def listen() -> dict[str, Any] | None:
            while not self._store.check([key]):
                if time.monotonic() > until_s:
                    return None
                time.sleep(POLL_S)
            message: dict[str, Any] = json.loads(self._store.get(key))
            return message

        return self._asking(listen, until_s)

    def close(self, ranks: Sequence[int]) -> None:
        """Leave the meeting; the rank that may serve the store waits a little until these ranks have left."""
        self.leave("bye", {})
        if self.rank == 0:
            self.hear("bye", ranks, time.monotonic() + LEAVE_S)

    def _asking(self, work: Callable[[], T], until_s: float | None = None) -> T:
        """Return what `work` gets from the store. Raises MeetingError where this does not answer."""
        left_s = 0.0 if until_s is None else max(0.0, until_s - time.monotonic())
        try:
            return within(left_s + ANSWER_S, work)
        except RuntimeError as error:
            raise MeetingError("the store at which ranks meet has gone, or does not answer") from error
