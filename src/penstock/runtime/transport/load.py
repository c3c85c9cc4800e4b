"""Traffic in the background, to measure what computation costs beside it, and traffic beside computation."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median

import torch

from penstock.mesh import Group
from penstock.runtime.transport import Transport
from penstock.topology import Control

SIZE_BYTES = 1 << 20
UNTIMED, TIMED = 3, 8
HIDDEN_WIDTH = 512


class Load:
    """Exchanges without a pause, the same number on every rank, on a thread as a lane has one.

    No other code may use `transport` before `finish`.
    """

    def __init__(self, transport: Transport, control: Control) -> None:
        self._transport, self._control = transport, control
        ranks = transport.size(Group.EXPERT)
        rows = SIZE_BYTES // (4 * HIDDEN_WIDTH * ranks)
        self._rows, self._splits = torch.zeros(rows * ranks, HIDDEN_WIDTH), [rows] * ranks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="penstock-load")
        self._running: Future[list[float]] | None = None
        self._alone_s = 0.0

    def start(self, enough_for_s: float) -> None:
        """Measure one exchange alone, then go on in the background for about that long."""
        self._control.barrier("starting traffic")
        self._exchange(UNTIMED)
        alone_s = median(self._exchange(TIMED))
        self._alone_s = max(self._control.gather(alone_s, "timing an exchange"))
        count = math.ceil(enough_for_s / self._alone_s)
        self._running = self._pool.submit(self._exchange, count)

    def finish(self) -> float:
        """Wait for the last exchange. Returns how many times longer one took beside what ran meanwhile."""
        assert self._running is not None, "start comes first"
        beside_s = self._control.gather(median(self._running.result()), "timing an exchange")
        self._pool.shutdown()
        return max(1.0, max(beside_s) / self._alone_s)

    def _exchange(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start_s = time.perf_counter()
            self._transport.all_to_all(self._rows, self._splits, self._splits)
            times.append(time.perf_counter() - start_s)
        return times
