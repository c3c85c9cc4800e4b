"""Which files a path means."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, NoReturn

from penstock.config import ConfigError, expanded
from penstock.data.files import HINT

NO_TEXT: Final = (".gz", ".bz2", ".xz", ".zst", ".zip", ".npy", ".npz", ".arrow")
"""Extensions of files that are not text, and are refused."""


def files_of(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The file at `path`, or those of a folder that end in `suffixes`; raises ConfigError about `path`."""
    place = place_of(path)
    files = files_below(path, place, suffixes) if is_folder(path, place) else [place]
    for file in files:
        if file.suffix.lower() in NO_TEXT:
            hint = "Unpack it; of prepared tokens, name the folder."
            raise ConfigError("path", path, f"{file} is no text, and would be read as it lies", hint)
    if not files:
        why = f"contains no file with extension {' '.join(suffixes)}"
        raise ConfigError("path", path, why, "List the extensions of your files in data.suffixes.")
    return files


def place_of(path: str) -> Path:
    """Where a text is, home folders expanded; raises ConfigError about `path`."""
    return expanded(path, "path", HINT)


def is_folder(path: str, place: Path) -> bool:
    """Whether a folder is there; raises ConfigError where nothing is."""
    try:
        return stat.S_ISDIR(place.stat().st_mode)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:  # a NUL in it
        raise ConfigError("path", path, f"is no path ({error})", HINT) from error


def files_below(
    path: str | None, folder: Path, suffixes: tuple[str, ...], left_out: frozenset[str] = frozenset()
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


def _unreadable(path: str | None, error: OSError) -> ConfigError:
    return ConfigError("path", path, f"cannot read {error.filename}: {error.strerror}", HINT)
