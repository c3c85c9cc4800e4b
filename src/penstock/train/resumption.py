"""A run that continues, for whoever plans its steps: without what reads checkpoints, which loads slowly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.folder import Record

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A checkpoint that is whole and of a run like this one.

    older: earlier checkpoints, the newest first. damaged: later checkpoints, which could not be used.
    """

    path: Path
    record: Record
    older: tuple[Path, ...]
    damaged: tuple[Path, ...]
