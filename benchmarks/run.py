"""One call of a benchmark, as a list of runs has it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Final

OVERVIEW: Final = {
    "rates": "Overlap efficiency by link rate",
    "prediction": "Predicted against measured iteration",
}
"""Figures over several runs, by the name of their file."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call of `penstock bench`, or of a benchmark of its own.

    Attributes:
        name: The name of its files: letters, digits, `-` and `_`.
        arguments: Arguments of `penstock bench`, unless `benchmark` names a module of `benchmarks`.
        note: Why it is here.
        seconds: Roughly how long it takes.
        drawn: Whether its cases are in figures.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    note: str
    seconds: float
    drawn: bool = True
    benchmark: str = ""

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[\w-]+", self.name) and self.name not in OVERVIEW, self.name

    @property
    def module(self) -> tuple[str, ...]:
        """What Python runs: the module and all its arguments."""
        program = (f"benchmarks.{self.benchmark}",) if self.benchmark else ("penstock", "bench")
        return (*program, *self.arguments)

    @property
    def command(self) -> str:
        """As a person types it."""
        return shlex.join(("python", "-m", *self.module) if self.benchmark else self.module)
