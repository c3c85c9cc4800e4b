"""What every command line of Penstock shares: how its arguments are read, and what becomes of errors."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.cli.codes import BAD_USAGE, FAILED, INTERRUPTED
from penstock.cli.failing import tell
from penstock.config import ConfigError, HintWarning
from penstock.emulate import EmulationError, EmulationUnavailable
from penstock.graph import ScheduleError

SIMILAR = {"━": "=", "·": ".", "└": "|", "→": ">", "±": "+-", "\N{MINUS SIGN}": "-"}
"""What stands for a character on a terminal that lacks it."""


def parse(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace:
    """Settings may stand before and after options: argparse alone takes them in one place only."""
    options, rest = parser.parse_known_args(given)
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def replace_unencodable() -> None:
    """Let a character that the terminal's encoding lacks be shown as a similar one, or as a `?`: no command
    ends for it."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error shows all of them without being told
        codecs.register_error("similar", _similar)
        sys.stdout.reconfigure(errors="similar")


def _similar(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: what stands for the characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(SIMILAR.get(each, "?") for each in lacking), error.end


def exit_code(command: Callable[[], int]) -> int:
    """What the command returns; an error that a user can mend is told in one line, and so is a hint."""
    try:
        with _telling_hints():
            return command()
    except (ConfigError, ScheduleError, EmulationUnavailable) as error:
        tell(str(error))
        return BAD_USAGE
    except EmulationError as error:
        tell(str(error))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `penstock schedule ... | head` is no failure of ours
        sys.stderr.close()
        return 0


@contextmanager
def _telling_hints() -> Iterator[None]:
    """Hints go to stderr, once: other ranks read the same settings."""
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
    """Whether this process is the one that tells what all ranks find."""
    from penstock.topology import detect  # loads torch, which commands that only plan do without

    info = detect(os.environ)
    return info is None or (info.rank == 0 and info.launcher != "penstock")
