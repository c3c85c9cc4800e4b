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
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError

VOCABULARY_SIZE = 256
MIN_TEXT_BYTES = 1024
HELD_OUT_FRACTION_RANGE = (1e-6, 0.5)
STANDARD_LIBRARY_SUFFIXES = (".py",)
# Installed packages differ between machines, and the tests hold odd encodings and generated tables.
STANDARD_LIBRARY_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text comes from and how much of it a step takes.

    `path`               a file, a folder, or None for the standard library of the running Python
    `batch_per_device`   samples per rank and step
    `held_out_fraction`  share of the text kept for evaluation, at most 0.5
    `suffixes`           which files of a folder are text; a path to one file ignores it

    Raises `ConfigError` naming the field when a value cannot be used.
    """

    path: str | None = None
    batch_per_device: int = 8
    held_out_fraction: float = 0.05
    suffixes: tuple[str, ...] = (".py", ".txt", ".md", ".rst")

    def __post_init__(self) -> None:
        if self.path == "":
            hint = "Leave it out to train on Python's standard library."
            raise ConfigError("path", self.path, "must not be empty", hint)
        if self.batch_per_device < 1:
            raise ConfigError("batch_per_device", self.batch_per_device, "must be at least 1", "Try 8.")
        smallest, largest = HELD_OUT_FRACTION_RANGE
        if not smallest <= self.held_out_fraction <= largest:
            why = f"must be between {smallest} and {largest}"
            raise ConfigError("held_out_fraction", self.held_out_fraction, why, "Try 0.05.")
        if not self.suffixes:
            raise ConfigError("suffixes", self.suffixes, "must not be empty", 'Try [".txt"].')
        for suffix in self.suffixes:
            if not suffix.startswith(".") or suffix == ".":
                raise ConfigError("suffixes", suffix, "must be a dot and an ending", 'Write it as ".txt".')


@dataclass(frozen=True, eq=False)
class Corpus:
    """The whole text in memory.

    `text`    uint8, one entry per byte
    `source`  where it came from, for people: the place, the number of files and of bytes
    """

    text: npt.NDArray[np.uint8]
    source: str

    @cached_property
    def unigram_entropy_nats(self) -> float:
        """Entropy of the byte distribution, nats per byte: the loss of knowing byte counts alone."""
        counts = np.bincount(self.text, minlength=VOCABULARY_SIZE)
        share = counts[counts > 0] / self.text.size
        return float(np.log(share) @ -share)


def load_corpus(config: DataConfig) -> Corpus:
    """Read the text that `config` names, its files one after another in a fixed order.

    Raises `ConfigError` on `path` when it does not exist, holds no text file or too little text, or when any
    of its files cannot be read.
    """
    if config.path is None:
        return _load_standard_library()
    place = Path(config.path).expanduser()
    if _is_folder(config.path, place):
        return _load_folder(config.path, place, config.suffixes)
    return _join(config.path, str(place), [place])


def _is_folder(path: str, place: Path) -> bool:
    try:
        return stat.S_ISDIR(place.stat().st_mode)
    except OSError as error:
        raise _unreadable(path, error) from error


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
        why = f"holds no file ending in {' '.join(suffixes)}"
        raise ConfigError("path", path, why, "Name the endings of your files in suffixes.")
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
    text = b"\n".join(_read(path, file) for file in files)
    if len(text) < MIN_TEXT_BYTES:
        hint = f"Give at least {MIN_TEXT_BYTES}; megabytes are better."
        raise ConfigError("path", path, f"holds only {len(text)} bytes of text", hint)
    count = "1 file" if len(files) == 1 else f"{len(files):,} files"
    return Corpus(text=np.frombuffer(text, dtype=np.uint8), source=f"{place}: {count}, {len(text):,} bytes")


def _read(path: str | None, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | None, error: OSError) -> ConfigError:
    why = f"cannot read {error.filename}: {error.strerror}"
    hint = "Give a path that can be read, or none to train on Python's standard library."
    return ConfigError("path", path, why, hint)
