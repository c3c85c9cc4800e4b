"""What all command lines of Penstock share: parsing of arguments, exit codes, and why a command fails.

The reason is said on the terminal and left for torchrun, which ends with what it knows of its ranks.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import io
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from penstock.config import ConfigError, HintWarning
from penstock.graph import ScheduleError
from penstock.stops import STOPS, mute
from penstock.writing import write_whole

FAILED = 1
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk without room: no fault of the program, wherever it is noticed."""
BAD_USAGE = 2
"""Wrong arguments or a setting that cannot be used."""

INTERRUPTED = 130
"""Ctrl-C before the work was done; the number is the one that shells use: 128 and that of the signal."""

NOT_BEGUN = "stopped before training began; nothing was saved"
NO_RESULT = "stopped before there was a result"


class CommandError(RuntimeError):
    """Raised when a command cannot do what it is asked to; its text is all that a user needs to read."""

    exit_code = FAILED


def put(text: str) -> None:
    """Print `text`; where nobody reads it any more, nothing else is printed either, and the work goes on."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        mute(1)


def tell(text: str) -> None:
    """Write `text` to standard error, and leave it for torchrun."""
    say(text)
    tell_torchrun(text)


def say(text: str) -> None:
    """Write `text` to standard error, in one line."""
    print(f"penstock: {text}", file=sys.stderr, flush=True)


def tell_torchrun(text: str) -> None:
    """Write the reason for this rank's end where torchrun looks for it, to be reported beside the code.

    The format is that of torch.distributed.elastic's `record`, which handles exceptions alone.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # standard error has the reason already; this failure must not replace it
            write_whole(Path(place), json.dumps({"message": {"message": text, "extraInfo": more}}))


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
    actions = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next((each.choices for each in actions), {})


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

    Args:
        left: What a stop leaves, until the command notes something else in `STOPS`; "" = it says so itself.
    """
    try:
        STOPS.begin(left)
        try:
            with _telling_hints():
                code = command()
            sys.stdout.flush()
        except (ConfigError, ScheduleError) as error:
            tell(str(error))
            code = BAD_USAGE
        except CommandError as error:
            tell(str(error))
            code = error.exit_code
        except BrokenPipeError:  # as in `penstock schedule ... | head`, which is no failure
            mute(1)  # what is left to be written would fail again when Python ends
            mute(2)
            code = 0
        except OSError as error:
            if error.errno not in FULL or error.filename is not None:
                raise
            mute(1)
            tell(f"standard output could not be written: {error.strerror}")
            code = FAILED
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
