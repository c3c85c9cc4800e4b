"""Ranks that are started for a measurement, and say nothing on the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.cli.run import CommandError
from penstock.lab.emulate import Cluster
from penstock.train.launcher import LaunchOutcome, launch

GRACE_S: Final = 70.0


class ProgramFailedError(CommandError):
    """A program that a benchmark has started has failed; the message ends with what the program said."""


def launch_quietly(command: Sequence[str], ranks: int, cluster: Cluster | None, said: Path) -> str:
    """Run the ranks with what they print going to the file `said`, and return that.

    Raises an error if they were ended or failed, see `check_end`.
    """
    with said.open("wb") as target:
        outcome = _launched(command, ranks, cluster, target.fileno())
    text = said.read_text(errors="replace", encoding="utf-8")
    check_end(outcome, text)
    return text


def check_end(outcome: LaunchOutcome, said: str) -> None:
    """Raise an error if a run was ended or failed.

    Raises:
        KeyboardInterrupt: If a signal ended the run, which then saves and says that all is well.
        ProgramFailedError: If the run failed.
    """
    if outcome.interrupted_by is not None:
        raise KeyboardInterrupt
    if outcome.exit_code:
        raise ProgramFailedError(f"ranks ended with exit code {outcome.exit_code}:\n{said[-2000:]}")


def _launched(command: Sequence[str], ranks: int, cluster: Cluster | None, target: int) -> LaunchOutcome:
    kept = [os.dup(1), os.dup(2)]
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        return launch(command, ranks, grace_s=GRACE_S, place=cluster)
    finally:
        for number, original in enumerate(kept, 1):
            os.dup2(original, number)
            os.close(original)
