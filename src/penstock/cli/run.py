"""What every command line of Penstock shares: how its arguments are read, and what becomes of errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from penstock.cli.codes import BAD_USAGE, FAILED, INTERRUPTED
from penstock.config import ConfigError
from penstock.emulate import EmulationError, EmulationUnavailable
from penstock.graph import ScheduleError


def parse(parser: argparse.ArgumentParser, given: Sequence[str]) -> argparse.Namespace:
    """Settings may stand before and after options: argparse alone takes them in one place only."""
    options, rest = parser.parse_known_args(given)
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def exit_code(command: Callable[[], int]) -> int:
    """What the command returns; an error that a user can mend is told in one line."""
    try:
        return command()
    except (ConfigError, ScheduleError, EmulationUnavailable) as error:
        print(f"penstock: {error}", file=sys.stderr)
        return BAD_USAGE
    except EmulationError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `penstock schedule ... | head` is no failure of ours
        sys.stderr.close()
        return 0
