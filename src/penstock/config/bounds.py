"""Bounds of numbers, declared with the field that holds them, and one check for all of them.

    num_layers: Annotated[int, Within(1, 1024, "every layer adds dozens of tasks to a step's plan")] = 4

A section calls `check_bounds(self)` first in its `__post_init__`, so that no later check meets a number that
makes it run for minutes. `tests/config/test_bounds.py` finds every number without bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from penstock.config.error import ConfigError

MOST_STEPS = 99_999_999
LARGEST_SEED = 2**63 - 1
MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Within:
    """A number from `low` to `high`. reason: why not beyond, as an independent clause.

    above, below: whether `low` or `high` itself is excluded. hint: what to use instead; "" = the nearest.
    """

    low: float
    high: float
    reason: str
    above: bool = False
    below: bool = False
    hint: str = ""

    def holds(self, value: float) -> bool:
        """Tell whether `value` may be used; NaN may not."""
        enough = value > self.low if self.above else value >= self.low
        return enough and (value < self.high if self.below else value <= self.high)

    def nearest(self, value: float) -> float:
        """Return `value`, or the bound beyond which it lies; both bounds belong to the range."""
        return min(max(value, self.low), self.high)

    @property
    def words(self) -> str:
        """Range in words, such as `from 1 to 1024`, or `above 0 and at most 1e+06`."""
        low, high = _number(self.low), _number(self.high)
        if not (self.above or self.below):
            return f"from {low} to {high}"
        return (
            f"{'above' if self.above else 'at least'} {low} and {'below' if self.below else 'at most'} {high}"
        )

    def check(self, key: str, value: float) -> None:
        """Raise ConfigError about `key` unless `value` holds."""
        if self.holds(value):
            return
        nearest = self.low if value <= self.low else self.high
        excluded = self.above if nearest == self.low else self.below
        hint = f"Use a number {self.words}."
        if not excluded and (value <= self.low or value >= self.high):  # NaN is neither
            hint = f"Nearest valid: {_number(nearest)}."
        raise ConfigError(key, value, f"must be {self.words} ({self.reason})", self.hint or hint)


@dataclass(frozen=True)
class Items:
    """The range of the number of items in a list."""

    most: int
    reason: str
    least: int = 0

    def check(self, key: str, value: Sequence[object]) -> None:
        """Raise ConfigError about `key` for a list of another length."""
        if not self.least <= len(value) <= self.most:
            why = f"has {len(value)} items and may have {self.least} to {self.most} ({self.reason})"
            raise ConfigError(key, value, why, "Shorten the list." if value else "Give some.")


@dataclass(frozen=True)
class Text:
    """The largest number of characters of a text or a path, which is never empty."""

    most: int
    reason: str

    def check(self, key: str, value: object) -> None:
        """Raise ConfigError about `key` for an empty or longer text."""
        length = len(str(value))
        if length == 0:
            raise ConfigError(key, value, "must not be empty", "Name something, or leave it out.")
        if length > self.most:
            why = f"has {length} characters and may have {self.most} ({self.reason})"
            raise ConfigError(key, value, why, "Shorten it.")


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


def check_bounds(section: Any) -> None:
    """Check every number and list of a dataclass against the bounds in its annotation.

    Raises ConfigError that names the field.
    """
    for name, tp in bounded_fields(type(section)).items():
        check_type(tp, getattr(section, name), name)


def bounded_fields(cls: type) -> Mapping[str, Any]:
    """Return the fields that a caller may set, in order: name and annotated type."""
    if cls not in _FIELDS:
        hints = get_type_hints(cls, include_extras=True)
        _FIELDS[cls] = {field.name: hints[field.name] for field in fields(cls) if field.init}
    return _FIELDS[cls]


_FIELDS: Final[dict[type, Mapping[str, Any]]] = {}
"""Cache of `bounded_fields` by class: resolving annotations takes a while."""


def check_length(tp: Any, value: Sequence[object], key: str) -> None:
    """Raise ConfigError about `key` for a list of a wrong length, before its items are checked one by one."""
    for mark in _marks(tp):
        if isinstance(mark, Items):
            mark.check(key, value)


def check_type(tp: Any, value: Any, key: str) -> None:
    """Check a value and its items against the bounds in a type. Raises ConfigError about `key`."""
    if value is None:
        return
    inner, marks = bare(tp), _marks(tp)
    for mark in marks:
        if isinstance(mark, Within | Items | Text):
            mark.check(key, value)
    if get_origin(inner) in (Union, UnionType):
        for each in get_args(inner):
            check_type(each, value, key)
    elif get_origin(inner) is tuple and isinstance(value, tuple):
        for index, item in enumerate(value):
            check_type(get_args(inner)[0], item, f"{key}[{index}]")


def bare(tp: Any) -> Any:
    """Return the type without the bounds around it."""
    return get_args(tp)[0] if get_origin(tp) is Annotated else tp


def _marks(tp: Any) -> tuple[Any, ...]:
    return get_args(tp)[1:] if get_origin(tp) is Annotated else ()


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
