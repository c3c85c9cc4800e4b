"""Where ranks leave facts for each other: torch's store, never waited for beyond a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

# torch.distributed exports these as well, but hides them from type checkers.
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from penstock.topology import ProcessInfo

POLL_S = 0.02
LEAVE_S = 5.0
"""How long the store is kept open for ranks that have yet to read from it."""


class MeetingError(Exception):
    """The store cannot be reached, or the meeting has ended."""


class Meeting:
    """One rank's view of the store.

    info: which rank this is. host, port: of the store; this rank serves it if it is rank 0 and `serves`.
    wait_s: how long to try to reach the store. Raises MeetingError.
    """

    def __init__(self, info: ProcessInfo, host: str, port: int, *, serves: bool, wait_s: float) -> None:
        self.rank, self.size = info.rank, info.world_size
        try:
            # It does not wait for workers: torch would wait for all of them without saying which are missing.
            self._server: Store = TCPStore(
                host,
                port,
                info.world_size,
                serves and info.rank == 0,
                timedelta(seconds=wait_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise MeetingError(str(error).splitlines()[0]) from error
        self._store = PrefixStore("penstock-doctor", self._server)

    def leave(self, key: str, said: Mapping[str, Any]) -> None:
        """Publish a message under a key of this rank."""
        self._set(f"{key}/{self.rank}", json.dumps(said))

    def hear(self, key: str, ranks: Collection[int], until_s: float) -> dict[int, dict[str, Any]]:
        """Return the messages that these ranks have published by `until_s` (time.monotonic)."""
        found: dict[int, dict[str, Any]] = {}
        while True:
            for rank in ranks:
                if rank not in found and self._has(f"{key}/{rank}"):
                    found[rank] = json.loads(self._store.get(f"{key}/{rank}"))
            if len(found) == len(ranks) or time.monotonic() > until_s:
                return found
            time.sleep(POLL_S)

    def first(self, key: str) -> bool:
        """Tell whether this rank is the first to claim a key."""
        return self._store.add(key, 1) == 1

    def announce(self, key: str, said: Mapping[str, Any]) -> None:
        """Publish a message to all ranks."""
        self._set(key, json.dumps(said))

    def told(self, key: str, until_s: float) -> dict[str, Any] | None:
        """Return what one rank announced to all; None if it has not by `until_s`."""
        while not self._has(key):
            if time.monotonic() > until_s:
                return None
            time.sleep(POLL_S)
        found: dict[str, Any] = json.loads(self._store.get(key))
        return found

    def close(self, ranks: Sequence[int]) -> None:
        """Leave the meeting; the rank that may serve the store waits a little until these ranks have left."""
        self.leave("bye", {})
        if self.rank == 0:
            self.hear("bye", ranks, time.monotonic() + LEAVE_S)

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise MeetingError("the store at which ranks meet has gone") from error

    def _set(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise MeetingError("the store at which ranks meet has gone") from error
