"""Starting the ranks of a command: this very command once more for each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from penstock.cli.codes import BAD_USAGE, INTERRUPTED
from penstock.config import ConfigError
from penstock.train.fits import check_processes
from penstock.train.launcher import Place, launch

SPARE_S = 10.0


def start_ranks(
    given: Sequence[str],
    processes: int,
    timeout_s: float,
    place: Place | None = None,
    way_out: Callable[[], str] | None = None,
) -> int:
    """Exit code of all together. given: arguments of the command. way_out: what to say after a failure."""
    check_processes(processes)
    command = [sys.executable, "-m", "penstock", *given]
    # After a failure the others need up to one timeout to notice and to say what they waited for.
    try:
        outcome = launch(command, processes, grace_s=timeout_s + SPARE_S, place=place)
    except OSError as error:
        why = f"this machine could not start them all ({error.strerror or error})"
        raise ConfigError("parallel.processes", processes, why, "Start fewer.") from error
    if outcome.first_failure is not None and outcome.exit_code not in (BAD_USAGE, INTERRUPTED):
        more = f"; {way_out()}" if way_out else ""
        print(f"penstock: {outcome.describe()}{more}", file=sys.stderr)
    return outcome.exit_code
