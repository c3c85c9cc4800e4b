"""What a command that measures is doing now, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console

LINE_EVERY_S: Final = 5.0
"""In a log file, where every line stays."""


@contextmanager
def progress_line(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """Something to tell what is being done: a line that changes on a terminal, elsewhere one now and then.

    shown: whether this process is the one that tells it.
    """
    if not shown:
        yield _ignore
    elif sys.stderr.isatty():
        console = Console(stderr=True, markup=False, highlight=False)
        with console.status("measuring") as status:
            yield lambda text: status.update(text[: console.width - LEAD])
    else:
        yield _Lines().say


LEAD: Final = 4
"""Columns that the moving sign takes."""


class _Lines:
    """Whatever is told is printed, unless that was done a moment ago."""

    def __init__(self) -> None:
        self._told_s = -LINE_EVERY_S

    def say(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= LINE_EVERY_S:
            self._told_s = now_s
            print(text, file=sys.stderr, flush=True)


def _ignore(text: str) -> None:
    del text
