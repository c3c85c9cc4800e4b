"""Checks of tables against sections: pydantic finds what is wrong, and this module says it in our words.

pydantic reads the dataclasses as they are, and in JSON, where its strict mode takes tables, lists and paths
for what they mean and still no `true` for a number.

Settings under the names that other programs give them are accepted, with a hint. A section declares them::

    ALSO_CALLED: ClassVar[Mapping[str, str]] = {"tensor_parallel_size": "tp_size"}
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic_core import SchemaValidator

from penstock.config.bounds import (
    Table,
    default_of,
    example,
    inner,
    kind_of,
    leaves,
    may_be_none,
    present,
    section_of,
    settable,
    types_of,
)
from penstock.config.error import UNSET, ConfigError, dotted, shorten, shown
from penstock.config.files import MOST_LEVELS, expanded

_NO_PIPELINE = ("Penstock has no pipeline parallelism", "Leave it out.")
_NO_CONTEXT = ("Penstock has no context parallelism", "Leave it out.")

NOT_HERE: Final[Mapping[str, tuple[str, str]]] = {
    "pipeline_model_parallel_size": _NO_PIPELINE,
    "pp_size": _NO_PIPELINE,
    "context_parallel_size": _NO_CONTEXT,
    "cp_size": _NO_CONTEXT,
}
"""Names of Megatron and DeepSpeed for what no setting of ours is: why not, and what to do."""


class HintWarning(UserWarning):
    """A hint that a command prints for its user on a line of its own, once."""


class OtherNameWarning(HintWarning):
    """A setting was given under another program's name for it."""


def own_name(cls: type, name: str) -> str:
    """Return a setting's own name, if it was given under another program's."""
    own: str = getattr(cls, "ALSO_CALLED", {}).get(name, name)
    return own


def rename(cls: type, table: dict[str, Any], section: str) -> dict[str, Any]:
    """Rename the settings in `table` to their own names, with a hint for each, and return `table`.

    Raises:
        ConfigError: If a setting occurs in it under two names.
    """
    for name in [name for name in table if own_name(cls, name) != name]:
        own = own_name(cls, name)
        key, own_key = dotted(section, name), dotted(section, own)
        if own in table:
            why = f"the same as {own_key}, which is set as well"
            raise ConfigError(key, table[name], why, f"Keep {own_key} alone.")
        warnings.warn(f"{key}: taken as {own_key}", OtherNameWarning, stacklevel=2)
        table[own] = table.pop(name)
    return table


STRICT: Final = ConfigDict(extra="forbid")
MOST_BITS = 4096
"""Python writes no numbers of many more digits, and no bounds are so far."""

MOST_ERRORS = 1000
"""A file of another program may hold tens of thousands of names, and a message takes a millisecond."""

UNKNOWN: Final = "unexpected_keyword_argument"


def validated(tp: Any, table: object, key: str) -> Any:
    """Return the `tp` that a table describes.

    Args:
        table: What `prepared` has returned.
        key: The table's own dotted key.

    Raises:
        ConfigError: For the first thing that does not fit, with all others in its `others`.
    """
    try:
        text = json.dumps(over_defaults(tp, table), default=str)
        return adapter(tp).validate_json(text, strict=True)
    except ValidationError as found:
        raise _first(tp, found, key) from found
    except RecursionError:
        raise ConfigError(key, UNSET, "is nested too deeply", "Check the file.") from None


def check_value(tp: Any, value: object, key: str) -> None:
    """Raise ConfigError about `key` unless `value`, from TOML or JSON, is a `tp` within its bounds."""
    validated(tp, prepared(tp, value, key), key)


def check_bounds(section: Any) -> None:
    """Check every field of a dataclass against its type and bounds.

    Raises:
        ConfigError: Naming the field that does not fit.
    """
    cls: type = type(section)
    try:
        _fields_of(cls).validate_python({name: getattr(section, name) for name in types_of(cls)})
    except ValidationError as found:
        raise _first(cls, found, "") from found


class Checked:
    """Base of a section whose fields are checked wherever one is made."""

    def __post_init__(self) -> None:
        check_bounds(self)


@cache  # made when first needed: making one takes milliseconds
def adapter(tp: Any) -> TypeAdapter[Any]:
    """Return pydantic's reader of a type."""
    if isinstance(tp, type) and is_dataclass(tp):
        with_config(STRICT)(tp)
    return TypeAdapter(tp)


@cache
def _fields_of(cls: type) -> SchemaValidator:
    """Return a validator of the fields alone, which makes no object and so calls no `__post_init__`."""
    schema: Any = adapter(cls).core_schema
    whole = schema["schema"] if schema["type"] == "definitions" else schema
    return SchemaValidator({**schema, "schema": whole["schema"]} if whole is not schema else whole["schema"])


# ---- before ------------------------------------------------------------------------------------------------


def prepared(tp: Any, value: Any, key: str) -> Any:
    """Return a value of a file or the command line as JSON has it: own names, null for the word none.

    Args:
        tp: The type of the setting or section.
        key: Its dotted key.

    Raises:
        ConfigError: If no file can hold a text, or a setting has two names.
    """
    if value is None or (isinstance(value, str) and value.lower() == "none" and may_be_none(tp)):
        return None
    section, there = section_of(tp), present(tp)
    if isinstance(value, dict) and section:
        for name in value:
            _check_text(dotted(key, name), name)
        types, table = types_of(section), rename(section, dict(value), key)
        return {
            name: prepared(types.get(name, object), entry, dotted(key, name)) for name, entry in table.items()
        }
    if isinstance(value, list) and get_origin(there) is tuple:
        return [prepared(inner(there), item, f"{key}[{index}]") for index, item in enumerate(value)]
    if _deep(value):
        raise ConfigError(key, value, "is nested too deeply", "Write it without so many brackets.")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return math.inf if value > 0 else -math.inf
    if not isinstance(value, str):
        return value
    _check_text(key, value)
    if there is Path and not value:
        raise ConfigError(key, value, "must not be empty", "Name a path, or leave it out.")
    return str(expanded(value, key)) if there is Path else value


def _deep(value: object, left: int = MOST_LEVELS) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_deep(each, left - 1) for each in inside)


def _check_text(key: str, text: str) -> None:
    """Raise ConfigError for a NUL or half of a surrogate pair, which neither paths nor files can hold."""
    if "\0" in text:
        raise ConfigError(key, text, "holds a NUL character", "Leave it out.")
    if any("\ud800" <= each <= "\udfff" for each in text):
        raise ConfigError(key, shorten(text), "is not valid Unicode", "Write it in UTF-8.")


def over_defaults(tp: Any, value: Any, base: object = None) -> Any:
    """Return a section's table laid over `base`, or over the defaults of those that stand in it.

    A section's default may differ from its class's, and what a file says of it must not undo that.
    """
    section = section_of(tp)
    if section is None or not isinstance(value, dict):
        return value
    table = plain_data(base) | value if base is not None else dict(value)
    for field in settable(section):
        below = default_of(field) if base is None else getattr(base, field.name)
        own = types_of(section)[field.name]
        if field.name in value:
            table[field.name] = over_defaults(own, value[field.name], below if is_dataclass(below) else None)
        elif below is MISSING and is_dataclass(own):
            table[field.name] = over_defaults(own, {})
    return table


def plain_data(value: object) -> Any:
    """Return a section, or what a field holds, as JSON has it: paths as text, tuples as lists."""
    if isinstance(value, Table):
        return dict(value)
    if is_dataclass(value):
        return {field.name: plain_data(getattr(value, field.name)) for field in settable(type(value))}
    if isinstance(value, tuple):
        return [plain_data(item) for item in value]
    if isinstance(value, Path):
        return f"./{value}" if str(value).startswith("~") else str(value)
    return value


# ---- errors ------------------------------------------------------------------------------------------------


def _first(tp: Any, found: ValidationError, key: str) -> ConfigError:
    """Return the first error with all others, unknown names before what may be missing for their sake.

    Raises what a dataclass has raised itself, if that is no ConfigError.
    """
    errors = sorted(found.errors(include_url=False), key=lambda each: each["type"] != UNKNOWN)
    for own in (each.get("ctx", {}).get("error") for each in errors):
        if isinstance(own, Exception) and type(own) is not ValueError and not isinstance(own, ConfigError):
            raise own from None  # of a dataclass that is checked in words of its own, such as a ScheduleError
    first, *others = (_error(tp, each, key) for each in errors[:MOST_ERRORS])
    first.others = tuple(others)
    return first


def _error(tp: Any, found: Any, key: str) -> ConfigError:
    """Return what pydantic found as an error with the full key, the value, the reason and a hint."""
    kind, value = found["type"], found["input"]
    here = tp
    for part in found["loc"][:-1] if kind == UNKNOWN else found["loc"]:
        key, section = f"{key}[{part}]" if isinstance(part, int) else dotted(key, part), section_of(here)
        here = types_of(section)[part] if section else inner(present(here))
    own = found.get("ctx", {}).get("error")
    if isinstance(own, ConfigError):
        return own.under(key)
    if kind == UNKNOWN:
        return _unknown(section_of(here) or type(None), key, found["loc"][-1], value)
    if kind == "json_invalid":
        return ConfigError(key, UNSET, "is nested too deeply, or not valid text", "Check it.")
    if kind == "missing":
        return ConfigError(key, UNSET, f"is missing; it must be {kind_of(here)}", _for_example(here, key))
    if section := section_of(here):
        hint = f"Set what is inside it, such as {example_override(section, key)}."
        return ConfigError(key, value, "is a section of settings and cannot be set as one", hint)
    wanted, said = present(here), value if isinstance(value, str) else shown(value)
    choices = [str(choice) for choice in get_args(wanted)] if get_origin(wanted) is Literal else []
    near = get_close_matches(shorten(said), choices, n=1)
    hint = f"Did you mean {near[0]}?" if near else _for_example(wanted, key)
    return ConfigError(key, value, f"must be {kind_of(here)}", hint)


def _for_example(tp: Any, key: str) -> str:
    return f"For example {key}={example(tp)}."


def example_override(cls: type, prefix: str = "") -> str:
    """Return an override of a number if there is one: not every text fits every setting."""
    every = list(leaves(cls, prefix))
    key, tp = next((leaf for leaf in every if present(leaf[1]) is int), every[0])
    return f"{key}={example(tp)}"


def _unknown(cls: type, section: str, name: str, value: object) -> ConfigError:
    """Return the error for an unknown name, with the nearest one, its place below, or all names."""
    rest, inside = list[str](), value  # the names that lead to the first setting in a table
    while isinstance(inside, dict) and inside:
        part, inside = next(iter(inside.items()))
        rest.append(str(part))
    key, last = ".".join((dotted(section, name), *rest)), rest[-1] if rest else name
    if "." in name and any(each == key for each, _ in leaves(cls, section)):
        return ConfigError(key, value, "is one name with dots", "Set it inside of its section.")
    if last in NOT_HERE:
        return ConfigError(key, UNSET if rest else value, *NOT_HERE[last])
    every = [each for each, _ in leaves(cls, section)]
    names = [each for each, tp in types_of(cls).items() if not rest or section_of(tp)]
    nearest = [dotted(section, each) for each in get_close_matches(shorten(name), names, n=1)]
    within = [whole for each in nearest if (whole := ".".join((each, *rest))) in every]
    so_named = [each for each in every if each.rpartition(".")[2] == last]
    near = [*(nearest if not rest else within), *so_named, *nearest]
    what = f"section {dotted(section, name)}" if rest else "such setting"
    place = f"[{section}]" if section else "The top level"
    all_names = f"{'There are' if rest else f'{place} has'} {', '.join(names) or 'settings alone'}."
    hint = f"Did you mean {near[0]}?" if near else all_names
    return ConfigError(key, UNSET if rest else value, f"there is no {what}", hint)
