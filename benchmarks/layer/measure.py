"""How contenders are timed: in turns, in one process, on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final, TypeVar

import numpy as np
import torch

from benchmarks.progress import PROGRESS
from penstock.runtime.machinery import keep_freed_memory

T = TypeVar("T")

THREADS: Final = 1
WARMUP: Final = 2


@dataclass(frozen=True, kw_only=True)
class Band:
    """Median of the rounds, and the values below which 10 % and 90 % of them lie."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Band:
        low, high = np.percentile(np.asarray(values), [10, 90])
        return Band(median=median(values), low=float(low), high=float(high))

    @staticmethod
    def of_ratios(above: Sequence[float], below: Sequence[float]) -> Band:
        """Return the band of above / below, round by round: what disturbs a whole round falls out."""
        return Band.of([a / b for a, b in zip(above, below, strict=True)])

    def text(self, scale: float, form: str) -> str:
        """Return all three times `scale`, such as `8.4 [8.1, 9.0]`."""
        low, median, high = (format(scale * value, form) for value in (self.low, self.median, self.high))
        return f"{median} [{low}, {high}]"


@contextmanager
def quiet_process() -> Iterator[None]:
    """Compute on one thread, with memory as a training run treats it: what was freed is kept (for good)."""
    before = torch.get_num_threads()
    keep_freed_memory()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_turns(
    ways: Mapping[str, Callable[[], T]],
    rounds: int,
    warmup: int = WARMUP,
    result: Callable[[Mapping[str, list[T]]], Any] | None = None,
) -> dict[str, list[T]]:
    """Return what each way returned in each round, A B C, C B A, ...: noise falls on all alike.

    Args:
        ways: What to call, by name.
        rounds: How many rounds count.
        warmup: How many rounds go before.
        result: Makes a result of some rounds; with it, rounds are announced, and kept where they end.
    """
    returned: dict[str, list[T]] = {name: [] for name in ways}
    for turn in range(warmup + rounds):
        if result is not None:
            PROGRESS.say(f"round {turn - warmup + 1} of {rounds}" if turn >= warmup else "warm-up")
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            value = ways[name]()
            if turn >= warmup:
                returned[name].append(value)
        if result is not None and turn >= warmup:
            PROGRESS.keep(partial(result, {name: list(values) for name, values in returned.items()}))
    return returned


def timed(call: Callable[[], object]) -> float:
    """Return seconds of one call."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s
