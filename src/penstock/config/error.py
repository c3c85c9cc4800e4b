"""The error about a setting, and how a value is shown in the error and in a TOML file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final

UNSET: Final = ...
"""Stands for the value in a `ConfigError` about a key that has none; the same object after pickling."""

LONGEST_SHOWN, TAIL = 240, 40
"""A value of more characters than the first is shown by its beginning and its end."""

MOST_WORDS = 400
"""Most characters of a reason or a hint, which may quote a file."""

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
DEEPEST_SHOWN = 8
MOST_SHOWN_DIGITS = 60


class ConfigError(ValueError):
    """A setting that cannot be used: its key, its value, why not, and what to do about it.

    Attributes:
        others: Other errors that were found beside it.
    """

    def __init__(self, key: str, value: object, why: str, hint: str = "") -> None:
        super().__init__(key, value, why, hint)
        self.key, self.value, self.why, self.hint = key, value, why, hint
        self.others: tuple[ConfigError, ...] = ()

    def __str__(self) -> str:
        """Return one line such as `moe.top_k = 9: must be at most 8. Use 8 or fewer.`"""
        key = shorten(self.key)
        subject = key if self.value is UNSET else f"{key} = {shorten(_subject(self.value))}"
        return f"{subject}: {shorten(self.why, MOST_WORDS)}. {shorten(self.hint, MOST_WORDS)}".rstrip()

    def under(self, prefix: str) -> ConfigError:
        """Return the error with its key inside section `prefix`; an empty prefix is the top level."""
        return ConfigError(dotted(prefix, self.key), self.value, self.why, self.hint)


class IndivisibleError(ConfigError):
    """A number by which something cannot be divided evenly; another number may divide it."""


def check_name(key: str, value: str, known: Iterable[object], what: str = "", otherwise: str = "") -> None:
    """Raise ConfigError about `key` unless `value` is among `known`.

    Args:
        what: What kind of thing these are; "" = the last part of the key.
        otherwise: A sentence on what else can be given.
    """
    names = list(map(str, known))
    if value not in names:
        any_case = {part.lower(): name for name in names for part in (name, name.rpartition("/")[2])}
        text = shorten(value).lower()
        near = get_close_matches(text, any_case, n=1, cutoff=0.6)
        near = near or get_close_matches(text.rpartition("/")[2], any_case, n=1, cutoff=0.0)
        others = f"{otherwise} " if otherwise else ""
        hint = (
            f"Nearest: {any_case[near[0]]}. {others}All: {', '.join(names)}." if near else "There are none."
        )
        raise ConfigError(key, value, f"no such {what or key.rpartition('.')[2]}", hint)


def in_any_case(name: str, known: Iterable[str]) -> str:
    """Return the known name that differs from `name` in nothing but case; `name` itself if there is none."""
    return next((each for each in known if each.lower() == name.lower()), name)


def dotted(prefix: str, name: str) -> str:
    """Return `prefix.name`; either may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def shorten(text: str, longest: int = LONGEST_SHOWN) -> str:
    """Return `text` on one printable line; a long text is cut to its beginning, end and length."""
    fits = len(text) <= longest
    kept = text if fits else f"{text[: longest // 2]}...{text[-TAIL:]}"
    line = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in kept)
    return line if fits else f"{line} ({len(text)} characters)"


def _subject(value: object) -> str:
    return "none" if value is None else shown(value)


def shown(value: object, depth: int = 0) -> str:
    """Return `value` as TOML for a message; unlike `toml_value` for any value, however large or deep."""
    if depth > DEEPEST_SHOWN:
        return "..."
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**MOST_SHOWN_DIGITS:
        digits = math.floor(math.log10(2) * value.bit_length()) + 1  # str() rejects thousands of digits
        return f"{'-' if value < 0 else ''}(a number of about {digits} digits)"
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(item, depth + 1) for item in value[:LONGEST_SHOWN])}]"
    if isinstance(value, dict):
        pairs = list(value.items())[:LONGEST_SHOWN]
        return "{" + ", ".join(f"{key} = {shown(item, depth + 1)}" for key, item in pairs) + "}"
    return toml_value(value)


def toml_value(value: Any) -> str:
    """Return `value` as a TOML value on one line; None, which TOML lacks, becomes the word for it."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are valid in TOML, too, except that TOML requires DEL to be escaped as well.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        # A path as a key contains characters that need quotes.
        keys = [key if BARE_KEY.fullmatch(key) else toml_value(key) for key in value]
        items = (f"{key} = {toml_value(item)}" for key, item in zip(keys, value.values(), strict=True))
        return "{" + ", ".join(items) + "}"
    return str(value)
