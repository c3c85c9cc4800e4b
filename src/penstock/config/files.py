"""Reads files that users and other programs wrote: nothing blocks, nothing is read without end.

A path may be a pipe without a writer, /dev/zero, a folder, or a file of many gigabytes; its content may be
nested thousands of levels deep or have numbers of thousands of digits. Each of these is one `ConfigError`.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from penstock.config.error import UNSET, ConfigError, shorten

MEBIBYTE = 1 << 20
MOST_JSON_BYTES = 64 * MEBIBYTE
"""A plan of a million tasks takes some 20 MB."""

SHIPPED = Path(__file__).parent / "shipped"
"""Configurations installed with the package; `configs/` in the source code is a link to them."""


def found_or_shipped(path: Path) -> Path:
    """Return the path; for a name such as `tiny` that is no file here, that of the shipped configuration."""
    shipped = SHIPPED / f"{path}.toml"
    free = is_missing(path) or asked(path.is_dir)  # a run called tiny may be here
    return shipped if free and len(path.parts) == 1 and shipped.is_file() else path


def asked(question: Callable[[], bool]) -> bool:
    """Return the system's answer about a path; False where it has none: too long a name, a locked folder."""
    try:
        return question()
    except (OSError, ValueError):  # of a path with a NUL in it
        return False


def is_missing(path: Path) -> bool:
    """Tell whether certainly nothing is there; where the system does not look, reading will tell why."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def check_no_link(path: Path, hint: str) -> None:
    """Raise ConfigError about a link in the place of a file that Penstock writes itself.

    It may lead to what is not to be read or shown.
    """
    if asked(path.is_symlink):
        raise ConfigError(str(path), UNSET, "is a link, and a run leaves none", hint)


def expanded(path: str, key: str, hint: str = "Write the path in full.") -> Path:
    """Return `path` with a home folder at its beginning expanded; raise ConfigError about `key`.

    A file or folder whose own name begins with `~` is written as `./~name`.
    """
    if path.startswith("./~"):
        return Path(path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # where the system knows no such user
        raise ConfigError(key, path, "starts with ~USER, but there is no such user", hint) from error


def open_regular(path: Path, key: str, hint: str, value: object = UNSET) -> BinaryIO:
    """Open the file at `path` for reading.

    Its kind is checked after it was opened, and opening does not wait for the writer of a pipe.

    Args:
        value: What the setting says, for messages.

    Raises:
        ConfigError: About `key`, if it cannot be read as a file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        why = "is a link to a file that is not there" if path.is_symlink() else "there is no such file"
        raise ConfigError(key, value, why, "Check the path.") from None
    except OSError as error:
        raise ConfigError(key, value, f"cannot be read ({error.strerror})", hint) from error
    except ValueError as error:  # a path with a NUL in it
        raise ConfigError(key, value, f"cannot be read ({error})", hint) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise ConfigError(key, value, f"is {kind}, not a file", hint)
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, key: str, hint: str, most_bytes: int) -> str:
    """Return the UTF-8 text in a file of at most `most_bytes`, without a leading byte order mark.

    Raises:
        ConfigError: About `key`, if there is no such file, or no such text in it.
    """
    with open_regular(path, key, hint) as file:
        try:
            data = file.read(most_bytes + 1)
        except OSError as error:
            raise ConfigError(key, UNSET, f"cannot be read ({error.strerror})", hint) from error
    if len(data) > most_bytes:
        size = f"{most_bytes // MEBIBYTE} MiB" if most_bytes >= MEBIBYTE else f"{most_bytes // 1024} KiB"
        raise ConfigError(key, UNSET, f"is larger than {size}, which no such file needs", hint)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(key, UNSET, f"is not UTF-8 text (line {line})", "Save it as UTF-8.") from error


def read_json(path: Path, hint: str, most_bytes: int = MOST_JSON_BYTES, *, strict: bool = True) -> Any:
    """Return the content of a JSON file; errors begin with the path.

    Args:
        strict: Whether the rules of `parse_json` hold; else the last of equal keys counts, as in other
            libraries.
    """
    text = read_text(path, str(path), hint, most_bytes)
    try:
        return parse_json(text) if strict else _parsed(json.loads, text)
    except ValueError as error:
        raise ConfigError(str(path), UNSET, f"is not valid JSON: {error}", hint) from error


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON text.

    No key may occur twice in one object. NaN and numbers that floating point cannot hold are left to the
    bounds of the setting that they are for, whose message names the key.

    Raises:
        ValueError: If it is none, with a clause that says what is wrong.
    """
    return _parsed(partial(json.loads, object_pairs_hook=_object), text)


DEEP = "it is nested too deeply"


def _parsed(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    """Return what a parser makes of a text. Raises ValueError, with a clause about the text."""
    try:
        return parse(text)
    except RecursionError:
        raise ValueError(DEEP) from None


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"key {shorten(key)} stands twice in one object")
        table[key] = value
    return table


# ---- settings ----------------------------------------------------------------------------------------------


MOST_TOML_BYTES = 256 * 1024
MOST_DOTS = 256
"""Limit of one line: Python's parser takes time and memory by the square of the parts of a dotted key."""


MOST_LEVELS = 100
"""pydantic reads JSON of up to 200 levels, and no setting has more than three."""

NO_SETTINGS = ("$schema", "$from")
"""Names for others than Penstock: the schema that an editor uses, and where `penstock config show` found
settings."""


def read_table(path: Path) -> dict[str, Any]:
    """Return what a file of settings says, which is YAML or JSON if its name ends so, and TOML otherwise."""
    path = found_or_shipped(path)
    if path.name in {each.name for each in SHIPPED.glob("*")} and not path.exists():
        hint = f"Write {path.stem}, the configuration of that name that comes with Penstock."
        raise ConfigError(str(path), UNSET, "there is no such file", hint)
    text = read_text(path, str(path), "Give the path of a readable TOML or YAML file.", MOST_TOML_BYTES)
    name, parse = PARSERS.get(path.suffix.lower(), ("TOML", parse_toml))
    try:
        table = parse(text)
    except ValueError as error:
        hint = "Correct it; text needs quotes, and a section starts with [name]."
        hint = hint if parse is parse_toml else "Correct it."
        raise ConfigError(str(path), UNSET, f"is not valid {name}: {error}", hint) from error
    if not isinstance(table, dict):
        raise ConfigError(str(path), UNSET, "has no sections of settings", "Give it some.")
    return {name: each for name, each in table.items() if name not in NO_SETTINGS}


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table in a TOML text.

    Raises:
        ValueError: If it is none, with a clause that says what is wrong.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > MOST_DOTS:
            raise ValueError(f"line {number} has more than {MOST_DOTS} dots; break it")
    table: dict[str, Any] = _parsed(tomllib.loads, text)
    return table


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML 1.2 text without aliases, of which a few lines can make gigabytes.

    Raises:
        ValueError: If it is none, with a clause that says what is wrong.
    """
    from ruamel.yaml import YAML  # takes a while, and most files are TOML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    reader = YAML(typ="safe", pure=True)
    try:
        levels = 0
        for event in reader.parse(text):
            if isinstance(event, AliasEvent):
                raise ValueError("it has aliases (*name), which are not read; write the values out")
            levels += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if levels > MOST_LEVELS:  # reading on would take time by the square of the levels
                raise ValueError(DEEP)
        content = _parsed(reader.load, text)
    except YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return {} if content is None else _check_plain(content)


def _check_plain(value: Any) -> Any:
    """Return a value of YAML. Raises ValueError for what YAML has and settings do not."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"key {shorten(str(key))} is no text; write it in quotes")
            _check_plain(item)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item)
    elif isinstance(value, (bytes, set)):
        raise ValueError(f"it has a value of the type {type(value).__name__}, which no setting has")
    return value


PARSERS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    ".yaml": ("YAML", parse_yaml),
    ".yml": ("YAML", parse_yaml),
    ".json": ("JSON", parse_json),
}
