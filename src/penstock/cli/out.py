"""What a command leaves and shows: where it saves results, checked before the work, and its progress.

Shells leave `--out=~/x` as it is, so `user_path` reads paths on the command line.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.status import Status

from penstock.config import ConfigError, expanded, shorten
from penstock.words import whole_number
from penstock.writing import try_to_write


def check_out(path: Path, example: str) -> Path:
    """Create the folder of `path` and return `path`.

    Args:
        path: Where results are to be saved.
        example: The file name that the hint of an error gives.

    Raises:
        ConfigError: If no file can be written there; leaves no new file, and an existing one unchanged.
    """
    why, cause = None, None
    try:
        why = _obstacle(path)
        if why is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            try_to_write(path.parent, path.name)
            return path
    except OSError as error:
        why, cause = f"cannot be written ({error.strerror})", error
    hint = f"Name a file in a folder of yours, such as {example}."
    raise ConfigError("--out", str(path), why, hint) from cause


def check_folder(path: Path | None) -> None:
    """Make the folder that `--plot` names, if it is given.

    Raises:
        ConfigError: If nothing can be written into it.
    """
    if path is None:
        return
    why, cause = "is not a folder", None
    try:
        if not path.exists() or path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            try_to_write(path)
            return
    except OSError as error:
        why, cause = f"cannot be written to ({error.strerror})", error
    hint = "Name a folder of yours, such as figures."
    raise ConfigError("--plot", str(path), why, hint) from cause


def save_out(save: Callable[[Path], None], path: Path) -> bool:
    """Call `save` and return whether it could write to `path`; if not, standard error says why."""
    try:
        save(path)
    except OSError as error:
        print(f"penstock: {path} could not be written: {error.strerror}", file=sys.stderr)
        return False
    return True


def _obstacle(path: Path) -> str | None:
    """Return what prevents a file at `path`, such as a folder of that name; None if nothing does."""
    if path.is_dir():
        return "is a folder"
    if path.exists() and not path.is_file():
        return "is not a regular file (a device, for example), and writing would replace it"
    above = next((folder for folder in path.parents if folder.exists()), None)
    return None if above is None or above.is_dir() else f"{above} is a file, not a folder"


def user_path(text: str) -> Path:
    """Return the path with a home folder (`~`) expanded; for argparse, which names the option."""
    try:
        return expanded(text, "path")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.why}") from error


class _Help(argparse.HelpFormatter):
    """Breaks lines between words alone: a command that is cut at a hyphen cannot be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = self._split_lines(text, width - len(indent))
        return "\n".join(f"{indent}{line}" for line in lines)


class Parser(argparse.ArgumentParser):
    """A parser of a command, or of all."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **how})


def add(parser: argparse._ActionsContainer, usage: str, what: str, **how: Any) -> None:
    """Add an argument as its usage shows it: `config CONFIG`, `--layers N`; an option alone is a flag.

    Args:
        usage: The name, then what stands for its value, if it has one.
        what: The text of the help.
        how: Other arguments of `add_argument`; an option with choices is no flag.
    """
    name, _, value = usage.partition(" ")
    if value:
        how["metavar"] = value
    elif "choices" not in how:
        how["action"] = "store_true"
    parser.add_argument(name, help=what, **how)


def whole(least: int, most: int, otherwise: str) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` to `most`, for argparse.

    Args:
        otherwise: The message about anything else.
    """

    def read(text: str) -> int:
        number = whole_number(text)
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{shorten(text)!r} {otherwise}")
        return number

    return read


def add_overrides(parser: argparse.ArgumentParser, overridden: str = "CONFIG") -> None:
    """Add the words `section.key=value` to a command line."""
    what = f"settings that override {overridden}"
    add(parser, "overrides section.key=value", what, nargs="*", default=[])


def config_and_settings(options: argparse.Namespace) -> tuple[Path | None, list[str]]:
    """Return the file, which may be missing, and the settings: argparse takes the first word for the file."""
    arguments = [*([] if options.config is None else [options.config]), *options.overrides]
    path = expanded(arguments.pop(0), "CONFIG") if arguments and "=" not in arguments[0] else None
    return path, arguments


LINE_EVERY_S: Final = 5.0
"""Seconds between lines in a log file, where every line stays."""


@contextmanager
def progress_line(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show the present work, as loggers tell it: a changing line on a terminal, else one now and then.

    Args:
        shown: Whether this process is the one that shows it.

    Yields:
        A function that shows a line in the same way.
    """
    from penstock.train.logs import telling

    if not shown:
        yield lambda _: None
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

    Args:
        every_s: Seconds between lines.
        begins: Whether the first line is printed at once rather than after `every_s`.
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
