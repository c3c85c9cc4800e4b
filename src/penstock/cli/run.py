"""What all command lines of Penstock share: the parsing of arguments and the handling of errors."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from penstock.cli.failing import BAD_USAGE, CommandError, tell
from penstock.config import ConfigError, HintWarning
from penstock.graph import ScheduleError
from penstock.stops import STOPS

EXAMPLE: Final = "train.steps=5"
SIMILAR = {"━": "=", "·": ".", "└": "|", "→": ">", "±": "+-", "\N{MINUS SIGN}": "-"}
"""What stands for a character on a terminal that lacks it."""


def parse(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace:
    """Parse arguments with settings before and after options: argparse alone takes them in one place only."""
    options, rest = parser.parse_known_args(given)
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        text = f"unrecognized arguments: {' '.join(rest)}"
        if hasattr(options, "overrides") and rest[0].startswith("--"):
            setting = rest[0].lstrip("-")
            example = setting if re.fullmatch(r"\w+(\.\w+)+=.+", setting) else EXAMPLE
            text += f"; settings are written without dashes: {example}"
        commands(parser).get(given[0], parser).error(text)  # the usage of the subcommand helps more
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the subcommands by name."""
    found = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next((each.choices for each in found), {})


def replace_unencodable() -> None:
    """Show a character that the terminal's encoding lacks as a similar one, or as a `?`, so that no command
    fails over one."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error escapes them by default
        codecs.register_error("similar", _similar)
        sys.stdout.reconfigure(errors="similar")


def _similar(error: UnicodeError) -> tuple[str, int]:
    """Replace the characters that an encoding lacks; an error handler of codecs."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(SIMILAR.get(each, "?") for each in lacking), error.end


def exit_code(command: Callable[[], int], left: str = "") -> int:
    """Run a command and return its exit code; report in one line an error that a user can mend, or a hint.

    left: what a stop leaves, until the command notes something else in `STOPS`; "" = it says so itself.
    """
    try:
        STOPS.begin(left)
        try:
            with _telling_hints():
                code = command()
        except (ConfigError, ScheduleError) as error:
            tell(str(error))
            code = BAD_USAGE
        except CommandError as error:
            tell(str(error))
            code = error.exit_code
        except BrokenPipeError:  # as in `penstock schedule ... | head`, which is no failure
            sys.stderr.close()
            code = 0
        STOPS.finish(code)
    except KeyboardInterrupt:
        return STOPS.stopped()
    return code


@contextmanager
def _telling_hints() -> Iterator[None]:
    """Write hints to standard error, once: other ranks read the same settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", HintWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if not issubclass(category, HintWarning):
                usual(message, category, *rest, **more)
            elif _speaks():
                print(f"penstock: {message}", file=sys.stderr)

        warnings.showwarning = show
        yield


def _speaks() -> bool:
    """Return whether this process is the one that reports what all ranks find."""
    from penstock.topology import detect  # loads torch, which commands that only plan do without

    info = detect(os.environ)
    return info is None or (info.rank == 0 and info.launcher != "penstock")
