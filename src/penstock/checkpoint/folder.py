"""The folder of a checkpoint: its name, its record and its checksums, read without trust and without torch.

A name in a folder may hide a link, a pipe, another folder or excessive data.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, Final

from pydantic import NonNegativeInt, ValidationError

from penstock.config import UNSET, ConfigError, read_json
from penstock.config.validate import adapter
from penstock.writing import UNFINISHED, free_name, make_durable, remove_tree, write_whole

logger = logging.getLogger(__name__)

ONE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
"""Where transformers finds a model's tensors: in a single file, which goes before the files of an index."""
LENGTH_BYTES: Final = 8
"""Bytes at the start of a safetensors file that give the length of its header."""

PREFIX: Final = "step-"
DAMAGED: Final = "damaged-"
RECORD: Final = "checkpoint.json"
SUMS: Final = "SHA256SUMS"
FORMAT: Final = 3
GLOBAL_BATCH: Final = "data.batch_per_device x (processes / tp_size)"
MOST_RECORD_BYTES: Final = 1 << 27
MOST_SUMS_BYTES: Final = 1 << 24
MOST_INDEX_BYTES: Final = 1 << 28
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", re.ASCII)
LINE: Final = re.compile(rf"([0-9a-f]{{64}})  ({NAME.pattern})\n", re.ASCII)
"""A digest and a name inside the folder: no name of this form leads out of it."""

DAMAGE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.ENXIO})
"""Error numbers of files that are missing, permanently unreadable, or no files. Others, such as that of a
missing permission, say nothing about the checkpoint."""


class DamagedError(ValueError):
    """A checkpoint is not as it was written: which file, and what is wrong with it."""


# ---- files -------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; raise DamagedError unless it is a regular file. Links are not followed."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in DAMAGE:
            raise DamagedError(f"{path.name} cannot be opened: {error.strerror}") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedError(f"{path.name} is not a regular file")
    return open(handle, "rb")  # noqa: PTH123  # a descriptor, not a path


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file of at most `most_bytes`; raise DamagedError for a longer file."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise DamagedError(f"{path.name} has more than {most_bytes:,} bytes")
    return data


def read_table(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file; raise DamagedError for anything else, however deeply nested."""
    try:
        table = json.loads(read_regular(path, most_bytes))
    except DamagedError:
        raise
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path.name} is not JSON that can be read: {error}") from error
    if not isinstance(table, dict):
        raise DamagedError(f"{path.name} holds no JSON object")
    return table


# ---- checksums ---------------------------------------------------------------------------------------------


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits; it takes about a second per GiB."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of the files in `folder`, sorted by name."""
    text = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    write_whole(folder / SUMS, text, durable=True)


def read_sums(folder: Path) -> dict[str, str]:
    """Return the digests of the files in `folder`, by name.

    Raises:
        DamagedError: A single character is not as `write_sums` writes it.
    """
    text = read_regular(folder / SUMS, MOST_SUMS_BYTES).decode("ascii", errors="replace")
    matches = list(LINE.finditer(text))
    if not matches or "".join(match[0] for match in matches) != text:
        raise DamagedError(f"{SUMS} is not a list of digests and names")
    digests = {match[2]: match[1] for match in matches}
    if len(digests) < len(matches):
        raise DamagedError(f"{SUMS} names a file twice")
    return digests


def compare(folder: Path, digests: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise DamagedError for the first of `names` whose content is not what was written."""
    for name in names:
        if digest_of(folder / name) != digests[name]:
            raise DamagedError(f"{name} has changed since it was written: its checksum is wrong")


# ---- the record --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a checkpoint says about its state.

    Attributes:
        step: Number of steps that were taken.
        processes: Number of processes that wrote it.
        identity: Settings on which the position in the data depends, by configuration key.
        settings: The configuration, section by section.
        plan_settled: Whether the plan saved with the checkpoint had been tried, ordered and tuned to the end.
        files: Names of all other files but the checksums.
        tokenizer: Sha256 of the text's tokenizer, or `bytes`; None = none is known.
        steps: What the next step needs that is no tensor.
    """

    step: NonNegativeInt
    processes: NonNegativeInt
    identity: Mapping[str, object]
    settings: Mapping[str, Any] | None
    plan_settled: bool
    files: Sequence[str] = ()
    tokenizer: str | None = None
    steps: Mapping[str, Any] | None = None

    def write(self, folder: Path) -> None:
        """Write the record into a checkpoint's folder, a line for each of its entries."""
        table = {"format": FORMAT, **asdict(self)}
        lines = (f' "{key}": {json.dumps(value, allow_nan=False)}' for key, value in table.items())
        write_whole(folder / RECORD, "{\n" + ",\n".join(lines) + "\n}\n", durable=True)

    @staticmethod
    def read(folder: Path) -> Record:
        """Read a record.

        Raises:
            DamagedError: The file holds anything else.
            ConfigError: It holds a record of another format.
        """
        table = read_table(folder / RECORD, MOST_RECORD_BYTES)
        version = table.pop("format", None)
        if version != FORMAT:
            why = f"{folder} is of format {str(version)[:20]}, and this version of Penstock reads {FORMAT}"
            raise ConfigError("train.resume", True, why, "Continue with the version that wrote it.")
        try:
            record: Record = adapter(Record).validate_json(json.dumps(table), strict=True)
        except ValidationError as found:
            raise DamagedError(f"{RECORD} is not what a checkpoint says about itself") from found
        return record

    def check_identity(self, path: Path, identity: Mapping[str, object]) -> None:
        """Raise ConfigError for the first key that differs; before the first step, keys may differ."""
        if self.step == 0:
            return
        for key in {**identity, **self.identity}:
            value = identity.get(key)
            if self.identity.get(key) != value:
                was = str(self.identity.get(key))[:80]
                why = f"{path} was made with {was}, and samples would be repeated or left out"
                raise ConfigError(
                    key, value, why, "Use the same value, or start a new run in another output.dir."
                )


def write_index(folder: Path, names: Iterable[str]) -> None:
    """Write the index by which transformers finds the tensors in some files of a folder."""
    weight_map: dict[str, str] = {}
    numbers = size_bytes = 0
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
        tensors = {key: each for key, each in header.items() if key != "__metadata__"}
        weight_map |= dict.fromkeys(tensors, name)
        numbers += sum(prod(each["shape"]) for each in tensors.values())
        size_bytes += max((each["data_offsets"][1] for each in tensors.values()), default=0)
    table = {"metadata": {"total_parameters": numbers, "total_size": size_bytes}, "weight_map": weight_map}
    write_whole(folder / INDEX, json.dumps(table, indent=2) + "\n", durable=True)


def model_files(folder: Path) -> list[str]:
    """Return the names of the files in which transformers finds a model's tensors; [] where it finds none.

    A single file goes before the files of an index.

    Raises:
        ConfigError: The index is none, or leads out of the folder.
    """
    index, hint = folder / INDEX, "Copy it again from where the model's files come from."
    if (folder / ONE).exists():
        return [ONE]
    if not index.exists():
        return []
    table = read_json(index, hint, MOST_INDEX_BYTES)
    listed = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(listed, dict) or not listed or not all(isinstance(n, str) for n in listed.values()):
        raise ConfigError(str(index), UNSET, "has no weight_map that says which file holds each tensor", hint)
    if outside := [name for name in listed.values() if Path(name).name != name or name == ".."]:
        why = f"names {outside[0]}: files of a model lie in its folder, and it may lead nowhere else"
        raise ConfigError(str(index), UNSET, why, hint)
    return sorted(set(listed.values()))


# ---- names -------------------------------------------------------------------------------------------------


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return all finished checkpoints in `folder`, oldest first, without looking at their contents.

    A save that was killed may leave two of one step; the one with the longer name is usually the newer one.

    Raises:
        OSError: The folder exists and cannot be read; it may hold checkpoints.
    """
    return list(filter(is_complete, all_checkpoints(folder)))


def is_complete(path: Path) -> bool:
    """Tell whether a checkpoint was finished, by the file that is written last."""
    return (path / SUMS).exists()


def all_checkpoints(folder: Path) -> list[Path]:
    """Return whatever has the name of a checkpoint, finished or not, as `complete_checkpoints` does."""
    try:
        there = list(folder.iterdir())  # Path.glob finds nothing where it may not look
    except FileNotFoundError:
        return []
    checkpoints = [path for path in there if re.fullmatch(rf"{PREFIX}\d{{8,18}}", path.name)]
    return sorted(checkpoints, key=lambda path: (step_of(path), len(path.name)))


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix(PREFIX))


def complete(work: Path, final: Path, record: Record, digests: Mapping[str, str], keep: int) -> None:
    """Describe what was written in `work`, give it its final name, and remove all but the newest `keep`.

    Warns of older ones that cannot be removed.

    Args:
        digests: Digests of the files whose writers have computed them, by name.
    """
    # Not what other programs leave in a folder, such as .DS_Store, .nfs0001 and locks of synchronisers.
    names = sorted(path.name for path in work.iterdir() if NAME.fullmatch(path.name) and path.is_file())
    Record(**{**vars(record), "files": names}).write(work)
    others = {name: digest_of(work / name) for name in (*names, RECORD) if name not in digests}
    write_sums(work, {**digests, **others})
    for entry in (*(work / name for name in others), work):
        make_durable(entry)
    try:
        _name(work, final)
        checkpoints = complete_checkpoints(final.parent)
    except OSError as error:
        if os.path.lexists(work):
            raise
        failures = [error]
    else:
        old = [p for p in checkpoints if p in checkpoints[:-keep] or step_of(p) == record.step]
        failures = _failures(_hide, (p for p in old if p != final))  # the only one that is known to be whole
        try:
            failures += _failures(remove_tree, final.parent.glob(f"{UNFINISHED}*"))
        except OSError as error:  # of listing them
            failures.append(error)
    if failures:
        logger.warning(f"{final} is saved, and then removing older ones failed: {failures[0]}")


def _failures(work: Callable[[Path], object], paths: Iterable[Path]) -> list[OSError]:
    """Do the work on every path, also after one on which it has failed; return the errors."""
    errors = []
    for path in paths:
        try:
            work(path)
        except OSError as error:
            errors.append(error)
    return errors


def _name(work: Path, final: Path) -> None:
    """Give a complete checkpoint its name.

    One of the same step is replaced by way of a name with more zeros, which counts as well: no step is
    without any name, on every file system.
    """
    folder = final.parent
    if os.path.lexists(final):
        longer = final
        while os.path.lexists(longer):
            longer = longer.with_name(f"{PREFIX}0{longer.name.removeprefix(PREFIX)}")
        work.rename(longer)
        make_durable(folder)
        _hide(final)
        work = longer
    work.rename(final)
    make_durable(folder)


def _hide(path: Path) -> None:
    """Take a checkpoint's name away before it is removed, so that no half of it is taken for a whole."""
    hidden = path.with_name(f"{UNFINISHED}{path.name}")
    remove_tree(hidden)
    path.rename(hidden)


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it is neither the newest nor counted."""
    target = path.with_name(f"{DAMAGED}{path.name}")
    path.rename(free_name(target) if os.path.lexists(target) else target)
