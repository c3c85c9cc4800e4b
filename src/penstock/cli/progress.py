"""Progress of a command that measures, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

LINE_EVERY_S: Final = 5.0
"""Seconds between lines in a log file, where every line stays."""


@contextmanager
def progress_line(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the present work: a changing line on a terminal, else one now and then.

    shown: whether this process is the one that shows it.
    """
    if not shown:
        yield _ignore
    elif sys.stderr.isatty():
        console = Console(stderr=True, markup=False, highlight=False)
        with console.status("measuring") as status:
            yield lambda text: status.update(text[: console.width - LEAD])
    else:
        yield Lines(LINE_EVERY_S).say


LEAD: Final = 4
"""Columns that the moving sign takes."""


class Lines:
    """Prints what it is told on standard error, unless it printed another line a moment ago.

    every_s: seconds between lines. begins: whether the first line is printed at once, and not after as long.
    """

    def __init__(self, every_s: float, *, begins: bool = True) -> None:
        self._every_s = every_s
        self._told_s = time.monotonic() - (every_s if begins else 0.0)

    def say(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= self._every_s:
            self._told_s = now_s
            print(text, file=sys.stderr, flush=True)


def _ignore(text: str) -> None:
    del text
