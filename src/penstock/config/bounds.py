"""What a section's fields may hold: their types, in words and as examples, and bounds with their reason.

Bounds are declared with the field that holds them.

    num_layers: Annotated[int, Within(1, 1024, "every layer adds dozens of tasks to a step's plan")] = 4

pydantic checks them where a file is read. Where code makes a section, its base `Checked` does, or
`check_bounds(self)`, first in its `__post_init__`. `tests/config/test_bounds.py` finds every number without
bounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from penstock.config.error import ConfigError, dotted, toml_value

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
    """A number from `low` to `high`.

    Attributes:
        reason: Why a number may not lie beyond, as an independent clause.
        above, below: Whether `low` or `high` itself is excluded.
        hint: What to use instead; "" = the nearest.
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
    """The range of the number of items in a list.

    Attributes:
        most, least: The largest and the smallest number.
        reason: Why there may not be more, as an independent clause.
    """

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
    """The largest number of characters of a text or a path, which is never empty.

    Attributes:
        most: The largest number.
        reason: Why there may not be more, as an independent clause.
    """

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


class Table(tuple[tuple[str, Any], ...]):
    """Pairs of a name and a value, sorted by name, so that equal tables compare equal and can be hashed."""

    def __new__(cls, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> Self:
        return super().__new__(cls, sorted(dict(items).items()))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls._read)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "object"}

    @classmethod
    def _read(cls, items: Any) -> Self:
        try:
            return cls(items)
        except TypeError as error:
            raise ValueError("must be pairs of a name and a value") from error


PLAIN: Final[Mapping[Any, tuple[str, str]]] = {
    bool: ("true or false", "true"),
    int: ("a whole number", "8"),
    float: ("a number", "0.5"),
    str: ("text", '"first"'),
    Path: ("a path", '"runs/first"'),
    Table: ("a table of names and values", "{}"),
}
"""Types without structure: in words, and an example in TOML."""


def settable(cls: type) -> list[Field[Any]]:
    """Return the fields that a caller may set, in order: those by which two configurations differ."""
    return [field for field in fields(cls) if field.init and field.compare]


def types_of(cls: type) -> Mapping[str, Any]:
    """Return the fields that a caller may set, in order: name and type with its bounds."""
    return _types_of(cls)


@cache  # resolving annotations takes a while
def _types_of(cls: type) -> Mapping[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in settable(cls)}


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every single setting below `cls`: its dotted key and its type."""
    for name, tp in types_of(cls).items():
        section, key = section_of(tp), dotted(prefix, name)
        yield from leaves(section, key) if section else [(key, tp)]


def by_key(cls: type, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return every single setting of a table, such as `to_dict` gives it, by its dotted key.

    What the table lacks is left out.
    """
    settings = {}
    for key, _ in leaves(cls):
        value: Any = table
        for name in key.split("."):
            value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
        if value is not MISSING:
            settings[key] = value
    return settings


def default_of(field: Field[Any]) -> Any:
    """Return what a field is when nothing sets it; `MISSING` if it must be set."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def may_be_none(tp: Any) -> bool:
    """Tell whether the type is `X | None`."""
    return get_origin(bare(tp)) in (Union, UnionType)


def inner(tp: Any) -> Any:
    """Return X of `X | None` or `tuple[X, ...]`; no setting may have another union or tuple as its type."""
    tp = bare(tp)
    arguments = [each for each in get_args(tp) if each not in (NoneType, Ellipsis)]
    assert len(arguments) == 1 and len(get_args(tp)) == 2, f"a setting cannot be of type {tp}"
    return arguments[0]


def present(tp: Any) -> Any:
    """Return the type of a value that is there: X of `X | None`, without bounds."""
    return bare(inner(tp)) if may_be_none(tp) else bare(tp)


def section_of(tp: Any) -> type | None:
    """Return the dataclass of a section, which may be optional; None for a single setting."""
    tp = present(tp)
    return tp if isinstance(tp, type) and is_dataclass(tp) else None


def kind_of(tp: Any) -> str:
    """Return what a value of the type is, in words."""
    there = present(tp)
    if may_be_none(tp):
        return f"{kind_of(there)}, or none"
    if get_origin(there) is Literal:
        return "one of " + ", ".join(map(word, get_args(there)))
    if get_origin(there) is tuple:
        return f"a list, each item of which must be {kind_of(inner(there))}"
    return "a table of settings" if section_of(tp) else PLAIN[there][0]


def word(choice: object) -> str:
    """Return a choice as people write it on the command line."""
    return choice if isinstance(choice, str) else toml_value(choice)


def example(tp: Any) -> str:
    """Return a valid value of `tp` as TOML."""
    tp = present(tp)
    if get_origin(tp) is Literal:
        return toml_value(get_args(tp)[0])
    if get_origin(tp) is tuple:
        return f"[{example(inner(tp))}]"
    return "{}" if section_of(tp) else PLAIN[tp][1]
