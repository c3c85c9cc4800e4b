"""Checkpoints of earlier versions: PyTorch's own format, whose `.metadata` is a pickle and has no checksums.

The pickle is read without being run. A shard holds files of `torch.save`, which PyTorch loads with
`weights_only=True`: that builds tensors and nothing else.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from penstock.train.storage.files import DamagedError, open_regular, read_regular
from penstock.train.storage.inert_pickle import Made, Named, Pairs, parse
from penstock.train.storage.shards import DTYPES
from penstock.train.storage.stored import Entry, Stored

METADATA: Final = ".metadata"
MOST_BYTES: Final = 1 << 26
MOST_SHOWN: Final = 80
SHARD: Final = re.compile(r"__\d{1,9}_\d{1,9}\.distcp", re.ASCII)
MODULE: Final = "torch.distributed.checkpoint"
TYPES: Final = {str(dtype): dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The position of a tensor in a file, in bytes."""

    file: str
    offset: int
    length: int


class OldShards(Stored):
    """The tensors of a checkpoint in `folder`. Raises DamagedError if it was not made by Penstock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        root = parse(read_regular(folder / METADATA, MOST_BYTES))
        state = _table(_state(root, f"{MODULE}.metadata.Metadata"))
        described, located = (_pairs(state.get(key)) for key in ("state_dict_metadata", "storage_data"))
        self.entries = {_text(name): _entry(each) for name, each in described}
        self._extents = {_name(key): _extent(each) for key, each in located}
        if not len(described) == len(located) == len(self.entries):
            raise DamagedError(f"{METADATA} names a tensor twice")
        if self.entries.keys() != self._extents.keys():
            raise DamagedError(f"{METADATA} describes other tensors than it locates")

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names file by file, in the order of each file."""
        wanted = sorted(names, key=lambda name: (self._extents[name].file, self._extents[name].offset))
        files = sorted({self._extents[name].file for name in wanted})
        for file in files:
            with open_regular(self._folder / file) as opened:
                for name in (name for name in wanted if self._extents[name].file == file):
                    yield name, _load(opened, self._extents[name], self.entries[name])


def _load(file: IO[bytes], extent: Extent, entry: Entry) -> Tensor:
    """Load a `torch.save` file from inside a shard. Raises DamagedError unless `entry` describes it."""
    present = file.seek(0, io.SEEK_END)
    if extent.offset + extent.length > present:  # checked before memory is allocated for it
        raise DamagedError(f"{extent.file} ends before the tensors that should be in it")
    file.seek(extent.offset)
    data = io.BytesIO(file.read(extent.length))
    try:
        _check_packed(data)
        data.seek(0)
        tensor = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises almost anything
        raise DamagedError(f"{extent.file} holds no tensor at {extent.offset}: {error}") from error
    if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
        raise DamagedError(f"{extent.file} holds another tensor at {extent.offset} than {METADATA} says")
    return tensor


def _check_packed(data: io.BytesIO) -> None:
    """Raise DamagedError for compressed content: a few bytes could unfold to any size."""
    with zipfile.ZipFile(data) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise DamagedError(f"{member.filename} is compressed, which torch.save never does")


# ---- what the pickle says ----------------------------------------------------------------------------------


def _state(found: object, name: str) -> Any:
    """Return the state of an object, which must be of the class `name`."""
    if not isinstance(found, Made) or found.name != name:
        what = found.name if isinstance(found, Made | Named) else type(found).__name__
        raise DamagedError(f"{METADATA} holds {what[:MOST_SHOWN]!r} where {name} should be")
    return found.state


def _pairs(found: object) -> Pairs:
    if not isinstance(found, Pairs):
        raise DamagedError(f"{METADATA} holds {type(found).__name__} where a dictionary should be")
    return found


def _table(found: object) -> Mapping[str, Any]:
    return {_text(key): value for key, value in _pairs(found)}


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise DamagedError(f"{METADATA} holds {type(found).__name__} where a name should be")
    return found


def _whole(found: object) -> int:
    if type(found) is not int or found < 0:
        raise DamagedError(f"{METADATA} holds something else where a size should be")
    return found


def _size(found: object) -> tuple[int, ...]:
    """Return the shape that a torch.Size, made from a tuple, stands for."""
    if isinstance(found, Made) and found.name == "torch.Size" and len(found.arguments) == 1:
        (numbers,) = found.arguments
        if isinstance(numbers, tuple):
            return tuple(_whole(number) for number in numbers)
    raise DamagedError(f"{METADATA} holds something else where a shape should be")


def _entry(found: object) -> Entry:
    state = _table(_state(found, f"{MODULE}.metadata.TensorStorageMetadata"))
    properties = _state(state.get("properties"), f"{MODULE}.metadata.TensorProperties")
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, Named) or dtype.name not in TYPES:
        raise DamagedError(f"{METADATA} names an unknown type of numbers")
    shape, chunks = _size(state.get("size")), state.get("chunks")
    if not isinstance(chunks, list) or len(chunks) != 1:
        raise DamagedError(f"{METADATA} describes a tensor in pieces, and there were none in this format")
    return Entry(shape=shape, dtype=TYPES[dtype.name])


def _name(found: object) -> str:
    return _text(_table(_state(found, f"{MODULE}.metadata.MetadataIndex")).get("fqn"))


def _extent(found: object) -> Extent:
    state = _table(_state(found, f"{MODULE}.filesystem._StorageInfo"))
    file = _text(state.get("relative_path"))
    if not SHARD.fullmatch(file) or state.get("transform_descriptors"):
        raise DamagedError(f"{METADATA} names {file[:MOST_SHOWN]!r}, which is no shard of a checkpoint")
    return Extent(file=file, offset=_whole(state.get("offset")), length=_whole(state.get("length")))
