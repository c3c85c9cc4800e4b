"""Progress of a command that measures, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from rich.console import Console
from rich.status import Status

LINE_EVERY_S: Final = 5.0
"""Seconds between lines in a log file, where every line stays."""


@contextmanager
def progress_line(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show the present work, as loggers tell it: a changing line on a terminal, else one now and then.

    Yields a function that shows a line like that. shown: whether this process is the one that shows it.
    """
    from penstock.train.logs import telling

    if not shown:
        yield _ignore
        return
    with ExitStack() as closing:
        say: Callable[[str], None] = Lines(LINE_EVERY_S).say
        if sys.stderr.isatty():
            console = Console(stderr=True, markup=False, highlight=False)
            say = partial(_update, console, closing.enter_context(console.status("measuring")))
        closing.enter_context(telling(say))
        yield say


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


def _update(console: Console, status: Status, text: str) -> None:
    status.update(text[: console.width - LEAD])


def _ignore(text: str) -> None:
    del text
