"""Bounds of numbers, lists and texts, declared with the field that holds them, each with its reason.

    num_layers: Annotated[int, Within(1, 1024, "every layer adds dozens of tasks to a step's plan")] = 4

pydantic checks them where a file is read, and where code makes a section, `check_bounds(self)` does, first in
its `__post_init__`. `tests/config/test_bounds.py` finds every number without bounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from penstock.config.error import ConfigError

MOST_STEPS = 99_999_999
LARGEST_SEED = 2**63 - 1
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Bound(ABC):
    """What an annotation asks of a value beyond its type; pydantic checks it wherever it stands."""

    @abstractmethod
    def refusal(self, value: Any) -> tuple[str, str] | None:
        """Return why `value` may not be used and what to do; None for one that may."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """Return the bound in the words of JSON Schema."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), **self.schema()}

    def _checked(self, value: Any) -> Any:
        if refused := self.refusal(value):
            raise ConfigError("", value, *refused)
        return value


@dataclass(frozen=True)
class Within(Bound):
    """A number from `low` to `high`. reason: why not beyond, as an independent clause.

    above, below: whether `low` or `high` itself is excluded. hint: what to use instead; "" = the nearest.
    """

    low: float
    high: float
    reason: str
    above: bool = False
    below: bool = False
    hint: str = ""

    def refusal(self, value: float) -> tuple[str, str] | None:
        """Return why `value` may not be used, and the nearest that may; NaN may not."""
        enough = value > self.low if self.above else value >= self.low
        if enough and (value < self.high if self.below else value <= self.high):
            return None
        nearest = self.low if value <= self.low else self.high
        excluded = self.above if nearest == self.low else self.below
        hint = f"Use a number {self.words}."
        if not excluded and (value <= self.low or value >= self.high):  # NaN is neither
            hint = f"Nearest valid: {_number(nearest)}."
        return f"must be {self.words} ({self.reason})", self.hint or hint

    def nearest(self, value: float) -> float:
        """Return `value`, or the bound beyond which it lies; both bounds belong to the range."""
        return min(max(value, self.low), self.high)

    def schema(self) -> dict[str, Any]:
        """Return the range in the words of JSON Schema."""
        low = "exclusiveMinimum" if self.above else "minimum"
        return {low: self.low, "exclusiveMaximum" if self.below else "maximum": self.high}

    @property
    def words(self) -> str:
        """Range in words, such as `from 1 to 1024`, or `above 0 and at most 1e+06`."""
        low, high = _number(self.low), _number(self.high)
        if not (self.above or self.below):
            return f"from {low} to {high}"
        return (
            f"{'above' if self.above else 'at least'} {low} and {'below' if self.below else 'at most'} {high}"
        )


@dataclass(frozen=True)
class Items(Bound):
    """The range of the number of items in a list."""

    most: int
    reason: str
    least: int = 0

    def refusal(self, value: Sized) -> tuple[str, str] | None:
        """Return why a list of this length may not be used."""
        if self.least <= len(value) <= self.most:
            return None
        why = f"has {len(value)} items and may have {self.least} to {self.most} ({self.reason})"
        return why, "Shorten the list." if value else "Give some."

    def schema(self) -> dict[str, Any]:
        """Return the range in the words of JSON Schema."""
        return {"minItems": self.least, "maxItems": self.most}


@dataclass(frozen=True)
class Text(Bound):
    """The largest number of characters of a text or a path, which is never empty."""

    most: int
    reason: str

    def refusal(self, value: object) -> tuple[str, str] | None:
        """Return why an empty or longer text may not be used."""
        length = len(str(value))
        if length == 0:
            return "must not be empty", "Name something, or leave it out."
        if length > self.most:
            return f"has {length} characters and may have {self.most} ({self.reason})", "Shorten it."
        return None

    def schema(self) -> dict[str, Any]:
        """Return the range in the words of JSON Schema."""
        return {"minLength": 1, "maxLength": self.most}


Name = Annotated[str, Text(4096, "no path or name is longer")]
"""A name, or a path that may also be a word."""

FilePath = Annotated[Path, Text(4096, "no path is longer")]
"""A path."""

Steps = Annotated[int, Within(0, MOST_STEPS, "steps are numbered with eight digits")]
"""A number of steps."""

Seed = Annotated[int, Within(0, LARGEST_SEED, "random generators take seeds of 63 bits")]
"""A seed of a random generator."""

Ranks = Annotated[int, Within(1, MOST_RANKS, "the largest clusters have fewer than a million devices")]
"""A number of ranks, or of nodes."""

SizeBytes = Annotated[int, Within(0, 2**62, "no machine has more memory")]
"""A number of bytes in memory."""


def bare(tp: Any) -> Any:
    """Return the type without the bounds around it."""
    return get_args(tp)[0] if get_origin(tp) is Annotated else tp


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
