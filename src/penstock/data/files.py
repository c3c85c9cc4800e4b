"""Finds the files that a path stands for, and reads any number of them in place, a few open at a time.

Of a dataset of the Hugging Face hub that is a Parquet file in a cache. Content is read with `pread`, so the
system's page cache holds it once for all ranks, and none of it counts as a process's own memory. A file that
changes while a run reads it causes an error with its name; if it were mapped into memory and cut short, the
process would be killed with SIGBUS.
"""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import parse_qs

from penstock.config import ConfigError, expanded, open_regular
from penstock.extras import install, is_there, needs
from penstock.writing import replacing

MOST_OPEN: Final = 64
"""Largest number of files that are open at the same time; a system allows some hundreds."""

HINT: Final = "Give a path that can be read, or none to train on Python's standard library."


class TextError(RuntimeError):
    """A file that existed when the run began cannot be read any more, or has changed."""


class Files:
    """Some files, by number.

    Takes some hundred bytes of memory per file.

    Attributes:
        path: The setting that named the files, for messages.

    Raises:
        ConfigError: About `path`, if anything is not a regular file or cannot be read.
        TextError: If a file has changed since.
    """

    def __init__(self, path: str | None, files: Sequence[Path]) -> None:
        self.path, self.files = path, tuple(files)
        self._open: OrderedDict[int, int] = OrderedDict()
        self._states = [_state(self._descriptor(number)) for number in range(len(self.files))]

    @property
    def sizes_bytes(self) -> list[int]:
        """Sizes of all files."""
        return [size for size, _ in self._states]

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of a file."""
        pieces, file = [], self.files[number]
        try:
            descriptor = self._descriptor(number)
            while start < stop and _state(descriptor) == self._states[number]:
                pieces.append(os.pread(descriptor, stop - start, start))
                start += len(pieces[-1])
        except (OSError, ConfigError) as error:
            raise TextError(f"cannot read {file} any more: {error}") from error
        if start < stop:
            raise TextError(f"{file} has changed since the run began; leave it alone while a run reads it")
        return b"".join(pieces)

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def _descriptor(self, number: int) -> int:
        """Return the descriptor of a file, opening it if necessary instead of the least recently used one."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        try:
            with open_regular(self.files[number], "path", HINT, self.path) as opened:
                self._open[number] = os.dup(opened.fileno())
        except ConfigError as error:
            raise ConfigError("path", self.path, f"{self.files[number]} {error.why}", HINT) from error
        return self._open[number]


def _state(descriptor: int) -> tuple[int, int]:
    """Return what changes when a file is written to: its size and the time of the last change."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


PREFIX: Final = "hf://datasets/"
FORM: Final = f"{PREFIX}OWNER/NAME[?config=CONFIG&split=SPLIT]"


def is_on_hub(path: str) -> bool:
    """Tell whether a path names a dataset of the hub."""
    return path.startswith(PREFIX)


@cache  # a start asks for it a dozen times, and the hub is asked each time
def parquet_of(path: str) -> Path:
    """Return the Parquet file of a dataset, downloaded and converted the first time, in constant memory.

    It lies in the cache of `datasets`, named by a digest of what the hub had. Without a network, or with
    HF_HUB_OFFLINE=1, what was downloaded before is read.

    Args:
        path: `hf://datasets/OWNER/NAME`; `?split=SPLIT` instead of train, `config=CONFIG` where a dataset has
            several.

    Raises:
        ConfigError: About `path`, if the package is missing, the form is another, or there is no such
            dataset, configuration or split that can be reached.
    """
    name, _, query = path.removeprefix(PREFIX).partition("?")
    chosen = parse_qs(query, keep_blank_values=True)
    if name.count("/") > 1 or not name.strip("/") or not {"config", "split"}.issuperset(chosen):
        raise ConfigError("path", path, "does not name a dataset of the hub", f"Write {FORM}.")
    if not is_there("datasets"):
        raise ConfigError("path", path, needs("datasets"), install("datasets"))
    import datasets  # takes a second, and needs what nobody else does

    config, split = chosen.get("config", [None])[-1], chosen.get("split", ["train"])[-1]
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        why = f"the hub does not give it ({' '.join(str(error).split())[:300]})"
        raise ConfigError("path", path, why, f"Write {FORM}; offline, what was loaded before.") from error
    file = Path(datasets.config.HF_DATASETS_CACHE, "penstock", f"{dataset._fingerprint}.parquet")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, yields=True) as draft:  # another machine with the same cache may be reading it
            dataset.to_parquet(draft)
    return file


RUN: Final = frozenset({".lock", "config.toml", "metrics.jsonl"})
"""Files that together stand in the folder of a run alone."""

NO_TEXT: Final = (".gz", ".bz2", ".xz", ".zst", ".zip", ".npy", ".npz", ".arrow")
"""Extensions of files that are not text and are refused."""


def files_of(path: str, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the file at `path`, or a folder's files ending in `suffixes`; raise ConfigError about `path`."""
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
    """Return the place of a text: its path with the home folder expanded, or the file loaded from the hub.

    Raises:
        ConfigError: About `path`, if there is no such user, or the hub does not give it.
    """
    return parquet_of(path) if is_on_hub(path) else expanded(path, "path", HINT)


def is_folder(path: str, place: Path) -> bool:
    """Tell whether the path is a folder; raise ConfigError where nothing exists."""
    try:
        return stat.S_ISDIR(place.stat().st_mode)
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:  # the path contains a NUL
        raise ConfigError("path", path, f"is no path ({error})", HINT) from error


def files_below(
    path: str | None, folder: Path, suffixes: tuple[str, ...], left_out: frozenset[str] = frozenset()
) -> list[Path]:
    """Return files below `folder` ending in `suffixes`, in any case of letters, by relative path.

    Links to folders are ignored, and so is what runs have left: it would become text when they continue. Of
    several names of one file the first counts: its text would be trained on where it is held out.

    Args:
        path: The setting that named the folder, for messages.
        left_out: Names of folders that are passed over.
    """

    def refuse(error: OSError) -> NoReturn:  # Path.rglob would silently skip an unreadable folder
        raise _unreadable(path, error) from error

    files, endings = list[Path](), tuple(map(str.lower, suffixes))
    for parent, folders, names in os.walk(folder, onerror=refuse):
        if RUN.issubset(names) and Path(parent) != folder:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name not in left_out]
        files += [Path(parent, name) for name in names if name.lower().endswith(endings)]
    # File systems list their entries in different orders; this order is the same on all machines.
    files.sort(key=lambda file: file.relative_to(folder).as_posix())
    first = dict[Hashable, Path]()
    for file in files:
        first.setdefault(identity(file), file)
    return list(first.values())


def identity(file: Path) -> Hashable:
    """Return a key that is the same for one file under all of its names, including links of both kinds."""
    try:
        status = file.stat()
    except OSError:  # opening it later reports what is wrong
        return file
    return status.st_dev, status.st_ino


def _unreadable(path: str | None, error: OSError) -> ConfigError:
    return ConfigError("path", path, f"cannot read {error.filename}: {error.strerror}", HINT)
