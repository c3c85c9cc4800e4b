"""What every command line of Penstock shares: how its arguments are read, and what becomes of errors."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from penstock.cli.codes import BAD_USAGE, FAILED, INTERRUPTED
from penstock.cli.failing import tell
from penstock.config import ConfigError, HintWarning
from penstock.emulate import EmulationError, EmulationUnavailable
from penstock.graph import ScheduleError

EXAMPLE: Final = "train.steps=5"


def parse(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace:
    """Settings may stand before and after options: argparse alone takes them in one place only."""
    options, rest = parser.parse_known_args(given)
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        text = f"unrecognized arguments: {' '.join(rest)}"
        if hasattr(options, "overrides") and rest[0].startswith("--"):
            setting = rest[0].lstrip("-")
            text += f"; settings are written without dashes: {setting if _is_setting(setting) else EXAMPLE}"
        _parser_of(parser, given).error(text)
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _is_setting(word: str) -> bool:
    return re.fullmatch(r"\w+(\.\w+)+=.+", word) is not None


def _parser_of(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.ArgumentParser:
    """That of the subcommand, whose usage helps more."""
    return next((commands(parser)[word] for word in given[:1] if word in commands(parser)), parser)


def commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The subcommands by name."""
    found = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next((each.choices for each in found), {})


def replace_unencodable() -> None:
    """Let a character that the terminal's encoding lacks be shown as a `?`: no command ends for it."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error shows all of them without being told
        sys.stdout.reconfigure(errors="replace")


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
