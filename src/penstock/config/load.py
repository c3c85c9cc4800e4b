"""Turns a TOML file and `section.key=value` overrides into one frozen dataclass.

The dataclasses themselves are defined beside what they configure; this module knows no setting. A section may
refuse its own values: its `__post_init__` raises `ConfigError` with the bare field name, and `load` adds the
section.

TOML has no null. Where a field allows None, the word `none` stands for it, in a file and in an override; such
a field therefore cannot hold the text "none".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from penstock.config.bounds import bare, check_length, check_type
from penstock.config.error import UNSET, ConfigError, dotted, shorten, shown, toml_value
from penstock.config.files import MOST_TOML_BYTES, expanded, found_or_shipped, parse_toml, read_text
from penstock.config.kinds import PLAIN, example, expected, inner, section_of, settable, types_of
from penstock.config.other_names import NOT_HERE, own_name, rename
from penstock.config.table import Table

T = TypeVar("T")
NOT_TEXT = (bool, float, list, dict)
"""Kinds of TOML values that stand for no text: a run may be called 7 or 2026-01-31, not [[1]] or 1e308."""


def load(cls: type[T], path: Path | None, overrides: Sequence[str] = ()) -> T:
    """Build `cls` from the TOML file at `path` (None: defaults alone), then `section.key=value` overrides.

    A name without a dot or a folder, such as `tiny`, is a file here, or else a shipped configuration.

    An override's value is read as TOML where that fits the field, as bare text otherwise, unless it spells
    one of `NOT_TEXT`; of two overrides of one key the later counts. Raises `ConfigError` with the full dotted
    key for anything that does not fit.
    """
    table = {} if path is None else _read(path)
    for override in overrides:
        key, text = _split(cls, override)
        _apply(cls, table, key.split("."), text)
    built: T = _build(cls, table, "")
    return built


def from_dict(cls: type[T], table: object, name: str) -> T:
    """Build `cls` from plain data such as JSON yields; errors begin with `name`, for example the file's."""
    built: T = _build(cls, table, name)
    return built


def check_value(tp: Any, value: object, key: str) -> None:
    """Raise ConfigError about `key` unless `value`, from TOML or JSON, is a `tp` within its bounds."""
    check_type(tp, _convert(tp, value, key), key)


def to_dict(config: object) -> dict[str, Any]:
    """Return `config` as plain data for JSON: sections as dicts, tuples as lists, paths as text, and None."""
    return {field.name: _plain_data(getattr(config, field.name)) for field in settable(type(config))}


def to_toml(config: object) -> str:
    """Return `config` as the text of a TOML file that `load` turns into an equal one.

    A field that is None is left out where that is its default anyway, and written as "none" elsewhere. Raises
    `ConfigError` for text that would be read back as None.
    """
    return "\n".join(_lines(config, "", None)).strip("\n") + "\n"


# ---- reading -----------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    """Return the table in the TOML file at `path`. Raises ConfigError if it cannot be read."""
    path = found_or_shipped(path)
    text = read_text(path, str(path), "Give the path of a readable TOML file.", MOST_TOML_BYTES)
    try:
        return parse_toml(text)
    except ValueError as error:
        hint = "Correct it; text needs quotes, and a section starts with [name]."
        raise ConfigError(str(path), UNSET, f"is not valid TOML: {error}", hint) from error


def _split(cls: type, override: str) -> tuple[str, str]:
    """Return the key and the text of `key=text`."""
    key, equals, text = (part.strip() for part in override.partition("="))
    if key and equals:
        return key, text
    asked = next((leaf for leaf in _leaves(cls, "") if leaf[0] == override.strip()), None)
    such = _example_override(cls, "") if asked is None else f"{asked[0]}={example(asked[1])}"
    hint = f"Write section.key=value, such as {such}."
    raise ConfigError(override, UNSET, "is not a setting with a value", hint)


def _apply(cls: type, table: dict[str, Any], path: Sequence[str], text: str, here: str = "") -> None:
    """Put `text` at `path` into `table`, which holds the section `cls` whose own dotted key is `here`."""
    rename(cls, table, here)
    name, *rest = own_name(cls, path[0], here), *path[1:]
    if name not in types_of(cls):
        raise _unknown(cls, here, name, _parse(text)) if not rest else _no_section(cls, here, name, rest)
    key, tp = dotted(here, name), types_of(cls)[name]
    section = section_of(tp)
    if not rest:
        # Even a whole table is refused, since it would silently drop what the file says about the section.
        if section and not _says_none(text):
            raise _not_a_section(section, key, _parse(text))
        table[name] = _override_value(tp, text, key)
        return
    if bare(tp) is Table:
        held = table.get(name)
        table[name] = {**(held if isinstance(held, dict) else {}), ".".join(rest): _parse(text)}
        return
    if section is None:
        raise ConfigError(".".join((key, *rest)), UNSET, f"{key} is not a section", f"Set {key} itself.")
    below = table.get(name)
    if _says_none(below):
        below = table[name] = {}
    if not isinstance(below, dict):
        raise _not_a_section(section, key, below)
    _apply(section, below, rest, text, key)


def _override_value(tp: Any, text: str, key: str) -> object:
    """Return the TOML value of `text`, or the bare text if the field accepts that alone.

    What spells one of `NOT_TEXT` was meant for another setting; as a text it needs quotes.
    """
    spelt = _parse(text)
    for value in (spelt,) if isinstance(spelt, NOT_TEXT) else (spelt, text):
        with suppress(ConfigError):
            _convert(tp, value, key)
            return value
    return spelt


def _parse(text: str) -> object:
    """Return the TOML value that `text` spells, or `text` itself."""
    try:
        document = parse_toml(f"value = {text}")
    except ValueError:
        return text
    return document["value"] if len(document) == 1 else text


# ---- building ----------------------------------------------------------------------------------------------


def _build(cls: type, table: object, key: str, base: object = None) -> Any:
    """Build section `cls` at dotted `key`; what `table` leaves out comes from `base`, else from defaults."""
    if not isinstance(table, dict):
        raise _not_a_section(cls, key, table)
    types, values = types_of(cls), _defaults(cls, base)
    for name, raw in rename(cls, dict(table), key).items():
        if name not in types:
            raise _unknown(cls, key, name, raw)
        values[name] = _convert(types[name], raw, dotted(key, name), values.get(name))
    for name in types.keys() - values.keys():
        values[name] = _required(types[name], dotted(key, name))
    try:
        return cls(**values)
    except ConfigError as error:
        raise error.under(key) from error


def _required(tp: Any, key: str) -> object:
    """Return the default of a field that was not set: only a section may consist of defaults."""
    if is_dataclass(tp):
        return _convert(tp, {}, key)
    raise ConfigError(key, UNSET, f"is missing; it {expected(tp)}", f"For example {key}={example(tp)}.")


def _convert(tp: Any, value: object, key: str, base: object = None) -> Any:
    """Convert `value`, as TOML yields it, to `tp`; `base` is the section over which it is laid, if any."""
    bounded, tp = tp, bare(tp)
    origin = get_origin(tp)
    if is_dataclass(tp) and isinstance(tp, type):
        return _build(tp, value, key, base)
    if origin in (Union, UnionType):
        return _convert_optional(tp, value, key, base)
    if origin is Literal:
        return _convert_choice(tp, value, key)
    if origin is tuple:
        return _convert_items(bounded, value, key)
    return _convert_plain(tp, value, key)


def _convert_optional(tp: Any, value: object, key: str, base: object) -> Any:
    if _says_none(value):
        return None
    try:
        return _convert(inner(tp), value, key, base)
    except ConfigError as error:
        if error.key != key:
            raise
        raise ConfigError(key, error.value, f"{error.why}, or none", error.hint) from error


def _convert_choice(tp: Any, value: object, key: str) -> object:
    choices = get_args(tp)
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    near = get_close_matches(shorten(_plain_words(value)), [str(choice) for choice in choices], n=1)
    hint = f"Did you mean {near[0]}?" if near else f"For example {key}={example(tp)}."
    raise ConfigError(key, value, expected(tp), hint)


def _plain_words(value: object) -> str:
    return value if isinstance(value, str) else shown(value)


def _convert_items(tp: Any, value: object, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(key, value, expected(tp), f"For example {key}={example(tp)}.")
    check_length(tp, value, key)
    return tuple(_convert(inner(tp), item, f"{key}[{index}]") for index, item in enumerate(value))


def _convert_plain(tp: Any, value: object, key: str) -> object:
    # The exact type is compared because Python's bool is an int, and `steps = true` is a mistake.
    if type(value) not in PLAIN[tp].accepts:
        raise ConfigError(key, value, expected(tp), f"For example {key}={example(tp)}.")
    if isinstance(value, str):
        _check_text(key, value)
        if tp is Path and not value:
            raise ConfigError(key, value, "must not be empty", "Name a path, or leave it out.")
        if tp is Path:
            return expanded(value, key)
    try:
        return tp(value)
    except (TypeError, ValueError):
        raise ConfigError(key, value, expected(tp), f"For example {key}={example(tp)}.") from None
    except OverflowError:
        raise ConfigError(
            key, value, "is more than a number may be", f"For example {key}={example(tp)}."
        ) from None


def _check_text(key: str, text: str) -> None:
    """Raise ConfigError for a NUL or half of a surrogate pair, which neither paths nor files can hold."""
    if "\0" in text:
        raise ConfigError(key, text, "holds a NUL character", "Leave it out.")
    if any("\ud800" <= each <= "\udfff" for each in text):
        raise ConfigError(key, shorten(text), "is not valid Unicode", "Write it in UTF-8.")


# ---- what a type takes -------------------------------------------------------------------------------------


def _defaults(cls: type, base: object) -> dict[str, Any]:
    """Return what each field is when nothing sets it; a required field is absent."""
    if base is not None:
        return {field.name: getattr(base, field.name) for field in settable(cls)}
    fixed = {field.name: field.default for field in settable(cls) if field.default is not MISSING}
    made = {f.name: f.default_factory() for f in settable(cls) if f.default_factory is not MISSING}
    return fixed | made


def _says_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "none")


# ---- errors ------------------------------------------------------------------------------------------------


def _leaves(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every single setting below `cls`: its dotted key and its type."""
    for name, tp in types_of(cls).items():
        section = section_of(tp)
        key = dotted(prefix, name)
        yield from _leaves(section, key) if section else [(key, tp)]


def _example_override(cls: type, prefix: str) -> str:
    """Return an override of a number if there is one: not every text fits every setting."""
    leaves = list(_leaves(cls, prefix))
    key, tp = next((leaf for leaf in leaves if bare(leaf[1]) is int), leaves[0])
    return f"{key}={example(tp)}"


def _not_a_section(cls: type, key: str, value: object) -> ConfigError:
    hint = f"Set what is inside it, such as {_example_override(cls, key)}."
    return ConfigError(key, value, "is a section of settings and cannot be set as one", hint)


def _unknown(cls: type, section: str, name: str, value: object) -> ConfigError:
    """Return the error for an unknown setting, with the nearest name, its place below, or all names."""
    if name in NOT_HERE:
        return ConfigError(dotted(section, name), value, *NOT_HERE[name])
    names = list(types_of(cls))
    near = [dotted(section, each) for each in get_close_matches(shorten(name), names, n=1)]
    near += [key for key, _ in _leaves(cls, section) if key.rpartition(".")[2] == name]
    place = f"[{section}]" if section else "The top level"
    hint = f"Did you mean {near[0]}?" if near else f"{place} has {', '.join(names)}."
    what = "section" if isinstance(value, dict) else "setting"
    shown = UNSET if isinstance(value, dict) else value
    return ConfigError(dotted(section, name), shown, f"there is no such {what}", hint)


def _no_section(cls: type, section: str, name: str, rest: Sequence[str]) -> ConfigError:
    """No section of that name for the setting `rest`: hints at the same setting of the nearest one, or of
    any."""
    if rest[-1] in NOT_HERE:
        return ConfigError(".".join((dotted(section, name), *rest)), UNSET, *NOT_HERE[rest[-1]])
    sections = [each for each, tp in types_of(cls).items() if section_of(tp)]
    leaves = [key for key, _ in _leaves(cls, section)]
    nearest = [dotted(section, each) for each in get_close_matches(shorten(name), sections, n=1)]
    near = [key for each in nearest if (key := ".".join((each, *rest))) in leaves]
    near += [key for key in leaves if key.rpartition(".")[2] == rest[-1]]
    near += nearest
    there = f"There are {', '.join(sections)}." if sections else f"{section} has settings alone."
    hint = f"Did you mean {near[0]}?" if near else there
    key = ".".join((dotted(section, name), *rest))
    return ConfigError(key, UNSET, f"there is no section {dotted(section, name)}", hint)


# ---- writing -----------------------------------------------------------------------------------------------


def _plain_data(value: object) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple):
        return [_plain_data(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _lines(config: object, section: str, base: object) -> Iterator[str]:
    """Yield single settings first, then each section under its own header, as TOML requires."""
    cls = type(config)
    defaults, sections = _defaults(cls, base), []
    for name, tp in types_of(cls).items():
        value = getattr(config, name)
        if is_dataclass(value):
            sections.append((dotted(section, name), value, defaults.get(name)))
        elif value is not None or defaults.get(name, UNSET) is not None:
            yield f"{name} = {toml_value(_storable(tp, value, dotted(section, name)))}"
    for key, value, inner_base in sections:
        yield from ("", f"[{key}]", *_lines(value, key, inner_base))


def _storable(tp: Any, value: object, key: str) -> object:
    """Return `value` as plain data; raise ConfigError if reading it back would turn a text into None."""
    tp = bare(tp)
    optional = get_origin(tp) in (Union, UnionType)
    if isinstance(value, Table):
        return dict(value)
    if isinstance(value, tuple):
        items = inner(inner(tp) if optional else tp)
        return [_storable(items, item, key) for item in value]
    if optional and value is not None and _says_none(value):
        raise ConfigError(key, value, "cannot be saved, since it would be read as no value", "Rename it.")
    return _plain_data(value)
