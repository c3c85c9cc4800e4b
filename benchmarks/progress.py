"""What a benchmark does now, on standard error, and what it has measured so far, for when it is stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")

LINE_EVERY_S: Final = 1.0


class Progress:
    """The progress of this process, which measures one thing. It is silent until a command has begun it."""

    def __init__(self) -> None:
        self._name, self._row, self._told_s = "", "", 0.0
        self._result: Callable[[], Any] | None = None

    def begin(self, name: str, *, shown: bool) -> None:
        """Begin to show progress.

        Args:
            name: The benchmark.
            shown: Whether this process is the one that says what is done.
        """
        self._name, self._row, self._told_s = name if shown else "", "", -LINE_EVERY_S
        self._result = None

    def row(self, what: str) -> None:
        """Print it, and from now on before all that is said; "" = no row any more."""
        self._row, self._told_s = "", -LINE_EVERY_S
        if what:
            self.say(what)
            self._row = f"{what}: "

    def say(self, what: str) -> None:
        """Print it, unless something was printed a moment ago."""
        now_s = time.monotonic()
        if self._name and now_s - self._told_s >= LINE_EVERY_S:
            self._told_s = now_s
            print(f"{self._name}: {self._row}{what}", file=sys.stderr, flush=True)

    def keep(self, result: Callable[[], Any]) -> None:
        """Keep the result of what has been measured: a stop from now on prints it."""
        self._result = result

    def kept(self) -> Any:
        """Return the result of what had been measured by the last `keep`; None if nothing had."""
        return None if self._result is None else self._result()


PROGRESS: Final = Progress()


def in_rows(
    rows: Sequence[tuple[str, Callable[[], T]]], result: Callable[[tuple[T, ...]], Any]
) -> tuple[T, ...]:
    """Measure every row, one after the other; say its number, and keep what is there.

    Args:
        rows: What to say of every row, and what to call for it.
        result: Makes of some rows' values the result that the whole benchmark returns.
    """
    results: list[T] = []
    for number, (what, measure) in enumerate(rows, 1):
        PROGRESS.row(f"{what}, {number} of {len(rows)}")
        results.append(measure())
        PROGRESS.keep(partial(result, tuple(results)))
    PROGRESS.row("")
    return tuple(results)
