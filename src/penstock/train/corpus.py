"""Text to train on, read as bytes: every byte is a token, so there is no tokenizer and nothing to download.

Without a path the text is the Python standard library of the running interpreter: real text, about 11 MB, on
every machine. A file or a folder given as `data.path` takes its place.
"""

from __future__ import annotations

import os
import platform
import stat
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

from penstock.config import ConfigError, Items, Within, check_bounds
from penstock.train.scan import VOCABULARY_SIZE
from penstock.train.text import HINT, Text

__all__ = ["VOCABULARY_SIZE", "Corpus", "DataConfig", "load_corpus"]

MIN_TEXT_BYTES = 1024
Samples = Annotated[int, Within(1, 1 << 20, "all samples of a step are in memory at once", hint="Try 8.")]
HeldOut = Annotated[
    float,
    Within(1e-6, 0.5, "the rest of the text is for training, and evaluation needs some", hint="Try 0.05."),
]
Suffixes = Annotated[tuple[str, ...], Items(100, "which files are text", least=1)]
STANDARD_LIBRARY_SUFFIXES = (".py",)
# Installed packages differ between machines, and the tests hold odd encodings and generated tables.
STANDARD_LIBRARY_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from and how much of it a step takes.

    `path`               a file, a folder, or None for the standard library of the running Python
    `batch_per_device`   samples per rank and step; ranks that share attention (mp_size) have the same ones
    `held_out_fraction`  share of the text kept for evaluation, at most 0.5
    `suffixes`           which files of a folder are text; a path to one file ignores it

    Raises `ConfigError` naming the field when a value cannot be used.
    """

    path: str | None = None
    batch_per_device: Samples = 8
    held_out_fraction: HeldOut = 0.05
    suffixes: Suffixes = (".py", ".txt", ".md", ".rst")

    def __post_init__(self) -> None:
        if self.path == "":
            hint = "Leave it out to train on Python's standard library."
            raise ConfigError("path", self.path, "must not be empty", hint)
        check_bounds(self)
        for suffix in self.suffixes:
            if not suffix.startswith(".") or suffix == ".":
                raise ConfigError(
                    "suffixes", suffix, "must be a file extension with its dot", 'Write it as ".txt".'
                )


@dataclass(frozen=True, eq=False)
class Corpus:
    """The text to train on, which stays where it is.

    `text`    its bytes
    `source`  where it came from, for people: the place, the number of files and of bytes
    """

    text: Text
    source: str


def load_corpus(config: DataConfig) -> Corpus:
    """Open the text that `config` names, its files one after another in a fixed order.

    Raises `ConfigError` on `path` when it does not exist, holds no text file or too little text, or when any
    of its files cannot be read.
    """
    if config.path is None:
        return _load_standard_library()
    place = _expanded(config.path)
    if _is_folder(config.path, place):
        return _load_folder(config.path, place, config.suffixes)
    return _join(config.path, str(place), [place])


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # ~user, where the system knows no such user
        raise ConfigError("path", path, "starts with ~USER, but there is no such user", HINT) from error


def _is_folder(path: str, place: Path) -> bool:
    try:
        return stat.S_ISDIR(place.stat().st_mode)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:  # a NUL in it
        raise ConfigError("path", path, f"is no path ({error})", HINT) from error


def _load_standard_library() -> Corpus:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = _text_files(None, folder, STANDARD_LIBRARY_SUFFIXES, STANDARD_LIBRARY_LEFT_OUT)
    if not files:  # embedded interpreters keep their library in an archive
        why = f"the sources of Python's standard library are not in {folder}"
        raise ConfigError("path", None, why, "Give a file or a folder of text.")
    return _join(None, f"Python {platform.python_version()} standard library", files)


def _load_folder(path: str, folder: Path, suffixes: tuple[str, ...]) -> Corpus:
    files = _text_files(path, folder, suffixes, frozenset())
    if not files:
        why = f"contains no file with extension {' '.join(suffixes)}"
        raise ConfigError("path", path, why, "List the extensions of your files in data.suffixes.")
    return _join(path, str(folder), files)


def _text_files(
    path: str | None, folder: Path, suffixes: tuple[str, ...], left_out: frozenset[str]
) -> list[Path]:
    """Files below `folder` ending in `suffixes`, by relative path; links to folders are not followed."""

    def refuse(error: OSError) -> NoReturn:  # Path.rglob would skip an unreadable folder without a word
        raise _unreadable(path, error) from error

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in left_out]
        found += [Path(parent, name) for name in names if name.endswith(suffixes)]
    # The order in which a file system lists its entries differs between machines; this one does not.
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _join(path: str | None, place: str, files: Sequence[Path]) -> Corpus:
    """One text of all files, with a newline between two so that no line runs on into the next file."""
    text = Text(path, files)
    if text.size < MIN_TEXT_BYTES:
        hint = f"Give at least {MIN_TEXT_BYTES}; megabytes are better."
        raise ConfigError("path", path, f"holds only {text.size} bytes of text", hint)
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    return Corpus(text=text, source=f"{place}: {count}, {text.size:,} bytes")


def _unreadable(path: str | None, error: OSError) -> ConfigError:
    return ConfigError("path", path, f"cannot read {error.filename}: {error.strerror}", HINT)
