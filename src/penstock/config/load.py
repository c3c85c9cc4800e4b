"""Turns a TOML or YAML file and `section.key=value` overrides into one frozen dataclass.

The dataclasses themselves are defined beside what they configure; this module knows no setting. A section may
refuse its own values: its `__post_init__` raises `ConfigError` with the bare field name, and `load` adds the
section.

TOML has no null. Where a field allows None, the word `none` stands for it, in a file and in an override; such
a field therefore cannot hold the text "none".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.config.bounds import (
    Table,
    bare,
    example,
    inner,
    leaves,
    may_be_none,
    present,
    section_of,
    settable,
    types_of,
)
from penstock.config.error import UNSET, ConfigError, dotted, toml_value
from penstock.config.files import parse_toml, read_table
from penstock.config.validate import example_override, own_name, plain_data, prepared, validated

T = TypeVar("T")
NOT_TEXT = (bool, float, list, dict)
"""Kinds of TOML values that stand for no text: a run may be called 7 or 2026-01-31, not [[1]] or 1e308."""

DEEPEST: Final = 16
"""More parts than any key has."""

COMMAND_LINE: Final = "command line"


class Whole(dict[str, Any]):
    """A setting that is a table and was given as one: nothing of what was set before stays."""


def load(cls: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """Build `cls` from the file at `path` (None: defaults alone), then `section.key=value` overrides.

    A name without a dot or a folder, such as `tiny`, is a file here, or else a shipped configuration.

    An override's value is read as TOML where that fits the field, as bare text otherwise, unless it spells
    one of `NOT_TEXT`; of two overrides of one key the later counts. An attribute `sources` of `cls` becomes
    where each setting was set last, if anywhere, by its dotted key: the file, or `COMMAND_LINE`; and as what.

    Raises:
        ConfigError: With its full dotted key, for the first thing that does not fit; `others` holds what else
            does not.
    """
    table: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for where, layer in _layers(cls, path, overrides):
        sources |= {key: where for key, _ in leaves(cls) if _is_set(layer, key.split("."))}
        _lay(layer, table)
    built: T = validated(cls, table, "")
    if hasattr(built, "sources"):
        as_what = {key: (where, attrgetter(key)(built)) for key, where in sources.items()}
        object.__setattr__(built, "sources", as_what)
    return built


def from_dict(cls: type[T], table: object, name: str) -> T:
    """Build `cls` from plain data such as JSON yields; errors begin with `name`, for example the file's."""
    built: T = validated(cls, prepared(cls, table, name), name)
    return built


def to_dict(config: object) -> dict[str, Any]:
    """Return `config` as plain data for JSON: sections as dicts, tuples as lists, paths as text, and None."""
    plain: dict[str, Any] = plain_data(config)
    return plain


def to_toml(config: object) -> str:
    """Return `config` as the text of a TOML file that `load` turns into an equal one.

    A field that is None is written as "none": what is left out may get another value, such as a preset's.

    Raises:
        ConfigError: If a text would be read back as None.
    """
    return "\n".join(_lines(config, "")).strip("\n") + "\n"


# ---- reading -----------------------------------------------------------------------------------------------


def _layers(cls: type, path: Path | None, overrides: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what the file and each override set, as tables, and where that is; the later counts."""
    if path is not None:
        yield str(path), prepared(cls, read_table(path), "")
    for override in overrides:
        yield COMMAND_LINE, prepared(cls, _nested(cls, *_split(cls, override)), "")


def _split(cls: type, override: str) -> tuple[list[str], str]:
    """Return the parts of the key and the text of `key=text`."""
    key, equals, text = (part.strip() for part in override.partition("="))
    if key and equals:
        return key.split(".", DEEPEST), text
    setting = next((leaf for leaf in leaves(cls) if leaf[0] == override.strip()), None)
    such = example_override(cls) if setting is None else f"{setting[0]}={example(setting[1])}"
    hint = f"Write section.key=value, such as {such}."
    raise ConfigError(override, UNSET, "is not a setting with a value", hint)


def _nested(cls: type | None, path: Sequence[str], text: str) -> dict[str, Any]:
    """Return an override as a table. Below a setting that is a table itself, names may have dots."""
    name, *rest = path
    tp = types_of(cls).get(own_name(cls, name), object) if cls else object
    if not rest:
        value = _value(tp, text)
        return {name: Whole(value) if bare(tp) is Table and isinstance(value, dict) else value}
    if bare(tp) is Table:
        return {name: {".".join(rest): _value(object, text)}}
    return {name: _nested(section_of(tp), rest, text)}


def _value(tp: Any, text: str) -> object:
    """Return the TOML value that `text` spells, or `text` itself, also where a text or path is wanted."""
    try:
        document = parse_toml(f"value = {text}")
    except ValueError:
        return text
    spelt = document["value"] if len(document) == 1 else text
    return text if present(tp) in (str, Path) and not isinstance(spelt, (str, *NOT_TEXT)) else spelt


def _lay(above: Mapping[str, Any], below: dict[str, Any]) -> None:
    """Put one table over another, section by section."""
    for name, value in above.items():
        if isinstance(value, dict) and not isinstance(value, Whole) and isinstance(below.get(name), dict):
            _lay(value, below[name])
        else:
            below[name] = value


def _is_set(table: Any, path: Sequence[str]) -> bool:
    """Return whether a table, or a section in it that is said to be none, says what a setting is."""
    if not path or not isinstance(table, dict):
        return True
    return path[0] in table and _is_set(table[path[0]], path[1:])


# ---- writing -----------------------------------------------------------------------------------------------


def _lines(config: Any, section: str) -> Iterator[str]:
    """Yield single settings first, then each section under its own header, as TOML requires."""
    cls: type = type(config)
    sections = []
    for field in settable(cls):
        name, value = field.name, getattr(config, field.name)
        if is_dataclass(value):
            sections.append((dotted(section, name), value))
        else:
            tp = types_of(cls)[name]
            yield f"{name} = {toml_value(_storable(tp, value, dotted(section, name)))}"
    for key, value in sections:
        yield from ("", f"[{key}]", *_lines(value, key))


def _storable(tp: Any, value: object, key: str) -> object:
    """Return `value` as plain data; raise ConfigError if reading it back would turn a text into None."""
    if isinstance(value, tuple) and not isinstance(value, Table):
        return [_storable(inner(present(tp)), item, key) for item in value]
    if isinstance(value, str) and value.lower() == "none" and may_be_none(tp):
        raise ConfigError(key, value, "cannot be saved, since it would be read as no value", "Rename it.")
    return plain_data(value)
