"""What is said of every setting: in `--help`, on the page docs/settings.md, and in a JSON schema.

All of it comes from the fields of the sections: their types, bounds and defaults, and the text below each.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from functools import cache
from typing import Any, Final, get_args

from penstock.config.bounds import (
    Within,
    default_of,
    kind_of,
    may_be_none,
    present,
    section_of,
    settable,
    types_of,
)
from penstock.config.error import dotted, toml_value
from penstock.config.validate import adapter, plain_data

MORE: Final = re.compile(r" ?\(?\[more\]\([^)]*\)\)?")
"""A link of the page, for which a terminal has no use."""


INTRODUCTION: Final = """\
# Settings

All settings of the file that [`penstock train`](training.md) reads, written by `penstock config docs`. The
value `none` unsets a key. `penstock config show FILE` prints what a file comes to, `penstock config validate
FILE` all that is wrong with it, and `penstock config schema > penstock.json` the schema by which an editor
completes and checks a file that begins with `#:schema penstock.json`. Files are TOML, or YAML or JSON if
their names end so.

Values: `1 to 8` is a whole number from 1 to 8, `number 1 to 8` any from 1 to 8, `number above 1 to 8` any
but 1, and `a, b or none` one of these words. What the schedules do: [schedules.md](schedules.md).
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting in words.

    Attributes:
        key: Its dotted key.
        kind: What values it has, as a part of a sentence.
        values: The same in few words.
        default: Its default, as TOML.
        meaning: What it means, in Markdown with links.
    """

    key: str
    kind: str
    values: str
    default: str
    meaning: str


@cache
def docs_of(cls: type) -> Mapping[str, str]:
    """Return the text below each field of a section, those of its bases among them."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base) and isinstance(base, type):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(node, ast.ClassDef)
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    below = text.value if isinstance(text, ast.Expr) else None
                    if isinstance(below, ast.Constant) and isinstance(below.value, str):
                        docs[field.target.id] = " ".join(below.value.split())
    return docs


def described(cls: type, prefix: str = "", base: object = None) -> Iterator[Setting]:
    """Yield every setting below `cls` in the order of its sections.

    Args:
        prefix: Dotted key of `cls`; "" = the top level.
        base: A section with other defaults.
    """
    for field in settable(cls):
        tp, key = types_of(cls)[field.name], dotted(prefix, field.name)
        default = default_of(field) if base is None else getattr(base, field.name)
        if section := section_of(tp):
            yield from described(section, key, default if is_dataclass(default) else None)
        else:
            shown = "none" if default is None else "" if default is MISSING else _toml(default)
            meaning = docs_of(cls).get(field.name, "")
            # The kind of values, with the range of its numbers.
            some = (
                next((each for each in get_args(tp) if each is not type(None)), tp) if may_be_none(tp) else tp
            )
            ranges = [mark for mark in getattr(some, "__metadata__", ()) if isinstance(mark, Within)]
            kind, optional, _ = kind_of(tp).partition(", or none")
            kind = " ".join((kind, *(mark.words for mark in ranges)))
            values = _in_few_words(kind_of(present(tp)), ranges) + (" or none" if optional else "")
            yield Setting(key=key, kind=kind + optional, values=values, default=shown, meaning=meaning)


def _in_few_words(kind: str, ranges: Sequence[Within]) -> str:
    """Return what `kind` and its range say, as the page's introduction explains it."""
    kind = kind.removeprefix("one of ").removeprefix("a ")
    kind = re.sub(", each item of which must be( a)?", ":", kind)
    words = " ".join(mark.words for mark in ranges).replace(" and at most ", " to ")
    words = re.sub("^from |^at least ", "", words).replace(" and below ", " to below ")
    return words if words and kind == "whole number" else f"{kind} {words}".strip()


def _toml(value: Any) -> str:
    plain = plain_data(value)
    return "empty" if plain == [] else toml_value(plain)


def help_text(cls: type, section: str = "", width: int = 100) -> str:
    """Return every setting below a section of `cls`, or below all, for a terminal."""
    lines = []
    for setting in described(cls):
        if f"{setting.key}.".startswith(f"{section}." if section else ""):
            default = f" (default: {setting.default})" if setting.default else ""
            lines += textwrap.wrap(f"{setting.key}: {setting.kind}{default}", width, subsequent_indent="    ")
            lines += textwrap.wrap(
                MORE.sub("", setting.meaning), width, initial_indent="    ", subsequent_indent="    "
            )
    return "\n".join(lines)


def page(cls: type) -> str:
    """Return docs/settings.md."""
    lines = [INTRODUCTION]
    for field in settable(cls):
        section = section_of(types_of(cls)[field.name])
        assert section is not None
        lines += [f"## {field.name}", "", "| key | values | default | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{item.key}` | {item.values} | {item.default} | {item.meaning} |".replace("<", "&lt;")
            for item in described(section, field.name)
        ]
        lines.append("")
    return "\n".join(lines)


def json_schema(cls: type) -> dict[str, Any]:
    """Return the JSON schema of a file of settings, with what every setting means."""
    schema: dict[str, Any] = adapter(cls).json_schema()
    docs = {name: docs_of(section) for name, section in _sections(cls)}
    for name, table in schema.get("$defs", {}).items():
        for key, value in table.get("properties", {}).items():
            if text := docs.get(name, {}).get(key):
                value["description"] = MORE.sub("", text)
            if {"type": "null"} in value.get("anyOf", ()):
                value["anyOf"][value["anyOf"].index({"type": "null"})] = {"const": "none"}
                if value.get("default", "") is None:
                    del value["default"]
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    return schema


def _sections(cls: type) -> Iterator[tuple[str, type]]:
    yield cls.__name__, cls
    for tp in types_of(cls).values():
        if section := section_of(tp):
            yield from _sections(section)
