"""Where the lines of the package's loggers go: to the terminal, and to one file of each rank.

::

    logging.getLogger(__name__) -> Terminal -> what shows a run: INFO and WARNING, without times
                                -> RankLog  -> logs/rank-00000.log in the run's folder, from DEBUG on
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler, RotatingFileHandler
from pathlib import Path
from typing import Final, Self, TextIO

from penstock.writing import leads_to, open_log

PACKAGE: Final = logging.getLogger("penstock")
FOLDER: Final = "logs"
SHOWING: Final = "penstock terminal"
"""Name of the handler that shows a run, of which a process has one."""
MOST_BYTES: Final = 16 << 20
"""The most bytes of a rank's file. The one before it is kept as `.log.1`: a rank has twice that at most."""
FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

PACKAGE.addHandler(logging.NullHandler())  # without one, Python prints warnings itself, on every rank


class Terminal(logging.Handler):
    """Shows lines by `say`, without times; warnings begin with `warning: `. Errors are printed otherwise."""

    def __init__(self, say: Callable[[str], None], level: int = logging.INFO) -> None:
        super().__init__(level)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Show a line."""
        if record.levelno < logging.ERROR:
            head = "warning: " if record.levelno == logging.WARNING else ""
            self._say(head + record.getMessage())


def show(say: Callable[[str], None]) -> None:
    """Show the package's lines by `say` from now on, in place of what has shown them before."""
    for previous in [previous for previous in PACKAGE.handlers if previous.name == SHOWING]:
        PACKAGE.removeHandler(previous)
    handler = Terminal(say)
    handler.name = SHOWING
    PACKAGE.addHandler(handler)
    PACKAGE.setLevel(logging.DEBUG)


@contextmanager
def telling(say: Callable[[str], None]) -> Iterator[None]:
    """Tell `say` every line of the package inside this context, also of what is being measured."""
    handler = Terminal(say, logging.DEBUG)
    PACKAGE.addHandler(handler)
    PACKAGE.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        PACKAGE.removeHandler(handler)


def show_unless_told(stream: TextIO, *, shown: bool, width: Callable[[str], str] = str) -> None:
    """Print lines to `stream`, unless the program has set up logging itself.

    Args:
        shown: Whether this rank prints.
        width: Folds a line to the width of the terminal.
    """
    handlers = (*PACKAGE.handlers, *logging.root.handlers)
    if shown and all(isinstance(each, logging.NullHandler | Terminal) for each in handlers):
        show(lambda line: print(width(line), file=stream, flush=True))


class RankLog(MemoryHandler):
    """A rank's file in the folder of its run. Lines from before the folder is there are kept until `open`.

    The file is made again where its name is gone. After an error of the system no more lines are kept: no
    run ends because of its log.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(capacity=1)  # a line goes on at once, if there is a file
        self._name = f"rank-{rank:05}.log"

    def __enter__(self) -> Self:
        PACKAGE.addHandler(self)
        PACKAGE.setLevel(logging.DEBUG)
        PACKAGE.propagate = False  # what a package has added to the root would show lines twice
        return self

    def __exit__(self, *failure: object) -> None:
        PACKAGE.removeHandler(self)
        PACKAGE.propagate = True
        file = self.target
        self.close()
        if file is not None:
            file.close()

    def open(self, folder: Path) -> None:
        """Write to the file in the folder of a run from now on, with all lines that came before."""
        self.setTarget(_LogFile(folder / FOLDER / self._name))
        self.flush()


class _LogFile(RotatingFileHandler):
    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MOST_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self.path, self._lost = path, False
        self.setFormatter(logging.Formatter(FORMAT))

    def _open(self) -> TextIO:  # type: ignore[override]  # a file of text is one
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return open_log(self.path)

    def emit(self, record: logging.LogRecord) -> None:
        if self._lost:
            return
        if self.stream is not None and not leads_to(self.path, self.stream):
            self.stream.close()
            self.stream = None
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name that logging calls
        del record
        self._lost = True
        with suppress(OSError):  # what waits to be written fails again
            self.close()
        PACKAGE.warning(f"{self.path} cannot be written, and gets no more lines: {sys.exc_info()[1]}")
