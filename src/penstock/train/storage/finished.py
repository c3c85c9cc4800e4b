"""Finds the checkpoints of a run that are whole, by the names of their folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from penstock.train.storage.sums import SUMS

PREFIX: Final = "step-"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return all finished checkpoints in `folder`, oldest first, without looking at their contents.

    A save that was killed may leave two of one step; the one with the longer name is usually the newer one.

    Raises OSError for a folder that exists and cannot be read, since it may hold checkpoints.
    """
    return list(filter(is_complete, all_checkpoints(folder)))


def is_complete(path: Path) -> bool:
    """Tell whether a checkpoint was finished, by the file that is written last."""
    return (path / SUMS).exists()


def all_checkpoints(folder: Path) -> list[Path]:
    """Return whatever has the name of a checkpoint, finished or not, as `complete_checkpoints` does."""
    try:
        there = list(folder.iterdir())  # Path.glob finds nothing where it may not look
    except FileNotFoundError:
        return []
    found = [path for path in there if re.fullmatch(rf"{PREFIX}\d{{8,18}}", path.name)]
    return sorted(found, key=lambda path: (step_of(path), len(path.name)))


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix(PREFIX))
