"""Kinds of values that a setting may have, in words for messages and as examples in TOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from penstock.config.bounds import bare, bounded_fields
from penstock.config.error import toml_value
from penstock.config.table import Table


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A type without structure: its name in a message, an example in TOML, and the types it accepts."""

    words: str
    example: str
    accepts: tuple[type, ...]


PLAIN: Final[Mapping[Any, Plain]] = {
    bool: Plain(words="true or false", example="true", accepts=(bool,)),
    int: Plain(words="a whole number", example="8", accepts=(int,)),
    float: Plain(words="a number", example="0.5", accepts=(float, int)),
    str: Plain(words="text", example='"first"', accepts=(str,)),
    Path: Plain(words="a path", example='"runs/first"', accepts=(str,)),
    Table: Plain(words="a table of names and values", example="{}", accepts=(dict, list)),
}


def settable(cls: type) -> list[Field[Any]]:
    """Return the fields that a caller may set, in order."""
    return [field for field in fields(cls) if field.init]


def types_of(cls: type) -> dict[str, Any]:
    """Return the resolved type of every settable field, with its bounds."""
    return dict(bounded_fields(cls))


def inner(tp: Any) -> Any:
    """Return X of `X | None` or `tuple[X, ...]`; no setting may have another union or tuple as its type."""
    tp = bare(tp)
    arguments = [each for each in get_args(tp) if each not in (NoneType, Ellipsis)]
    assert len(arguments) == 1 and len(get_args(tp)) == 2, f"a setting cannot be of type {tp}"
    return arguments[0]


def section_of(tp: Any) -> type | None:
    """Return the dataclass of a section, which may be optional; None for a single setting."""
    tp = bare(tp)
    if get_origin(tp) in (Union, UnionType):
        tp = inner(tp)
    return tp if isinstance(tp, type) and is_dataclass(tp) else None


def word(choice: object) -> str:
    """Return a choice as people write it on the command line."""
    return choice if isinstance(choice, str) else toml_value(choice)


def expected(tp: Any) -> str:
    """Return what a value of `tp` must be, in words that follow `key = value:`."""
    tp = bare(tp)
    origin = get_origin(tp)
    if origin is Literal:
        return "must be one of " + ", ".join(map(word, get_args(tp)))
    if origin is tuple:
        return f"must be a list, each item of which {expected(inner(tp))}"
    if origin in (Union, UnionType):
        return f"{expected(inner(tp))}, or none"
    return "must be a table of settings" if section_of(tp) else f"must be {PLAIN[tp].words}"


def example(tp: Any) -> str:
    """Return a valid value of `tp` as TOML."""
    tp = bare(tp)
    origin = get_origin(tp)
    if origin is Literal:
        return toml_value(get_args(tp)[0])
    if origin is tuple:
        return f"[{example(inner(tp))}]"
    if origin in (Union, UnionType):
        return example(inner(tp))
    return "{}" if section_of(tp) else PLAIN[tp].example
