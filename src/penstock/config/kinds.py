"""What a section's fields may hold: their types, in words for messages and as examples in TOML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from penstock.config.bounds import bare
from penstock.config.error import dotted, toml_value


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
    """Return the fields that a caller may set, in order."""
    return [field for field in fields(cls) if field.init]


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
    found = {}
    for key, _ in leaves(cls):
        value: Any = table
        for name in key.split("."):
            value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
        if value is not MISSING:
            found[key] = value
    return found


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
