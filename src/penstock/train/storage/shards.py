"""Shards of a checkpoint: safetensors files, one per rank that has something to save.

The format is a length, a JSON header and raw numbers, so a file can hold nothing that runs. Files are written
here tensor by tensor, since the library's own writer holds a copy of everything in memory (PyTorch's writer
of this format holds two); they are read by the library, which checks the header against the file's size.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from penstock.train.storage.files import DamagedError, open_regular
from penstock.train.storage.joining import Joining
from penstock.train.storage.stored import Entry, Stored, writing_order
from penstock.writing import replacing

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

SUFFIX: Final = ".safetensors"
ALIGNMENT: Final = 8

DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES: Final = {dtype: code for code, dtype in DTYPES.items()}


# ---- writing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A tensor to be written. load: returns the tensor when its turn comes."""

    name: str
    entry: Entry
    load: Callable[[], Tensor]

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.entry.shape).numel() * self.entry.dtype.itemsize


def write_shard(path: Path, tensors: Iterable[Outgoing]) -> str:
    """Write a file of the safetensors format and wait until the disk has it; return its SHA-256.

    The digest is of what was to be written, so a disk that writes something else is noticed, too. It needs
    memory for one tensor.
    """
    ordered = sorted(tensors, key=lambda each: writing_order(each.name, each.entry.dtype))
    digest = hashlib.sha256()
    with replacing(path, durable=True) as file:
        for piece in (_header(ordered), *map(_raw, ordered)):
            data = piece()
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


def _header(tensors: Sequence[Outgoing]) -> Callable[[], Buffer]:
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in tensors:
        start, end = end, end + each.size_bytes
        code = CODES[each.entry.dtype]
        table[each.name] = {"dtype": code, "shape": list(each.entry.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return lambda: len(text).to_bytes(8, "little") + text


def _raw(each: Outgoing) -> Callable[[], Buffer]:
    def load() -> Buffer:
        tensor = each.load().detach().cpu().contiguous()
        assert (tuple(tensor.shape), tensor.dtype) == (each.entry.shape, each.entry.dtype), each.name
        numbers: Buffer = tensor.reshape(-1).view(torch.uint8).numpy().data
        return numbers

    return load


class ShardWriter(StorageWriter):
    """Writes what `torch.distributed.checkpoint.save` deals to this rank into one file in `folder`.

    joining: brings the parts of those tensors that ranks share. digests: SHA-256 of the files that this rank
    has written, by name.
    """

    def __init__(self, folder: Path, joining: Joining) -> None:
        self._folder, self._joining = folder, joining
        self.digests: dict[str, str] = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the ranks' files."""
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans, start=1)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; a rank without tensors writes none, but may have to send parts."""
        outgoing = [self._outgoing(item, planner) for item in plan.items]
        with self._joining.on_behalf_of(each.name for each in outgoing):
            if outgoing:
                name = f"shard-{plan.storage_data:05d}{SUFFIX}"
                self.digests[name] = write_shard(self._folder / name, outgoing)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: every file describes its own content."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is no state to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder exists already."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any name: the writer knows its folder."""
        del checkpoint_id
        return True

    def _outgoing(self, item: WriteItem, planner: SavePlanner) -> Outgoing:
        name, data = item.index.fqn, item.tensor_data
        assert data is not None and data.chunk.sizes == data.size, f"{name} is no whole tensor"
        entry = Entry(shape=tuple(data.size), dtype=data.properties.dtype)

        def load() -> Tensor:
            tensor = self._joining.take(name) if self._joining.joins(name) else planner.resolve_data(item)
            assert isinstance(tensor, Tensor), name
            return tensor

        return Outgoing(name=name, entry=entry, load=load)


# ---- reading -----------------------------------------------------------------------------------------------


class Shards(Stored):
    """The tensors in these files of `folder`. Raises DamagedError if a file is not what it should be."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.entries: dict[str, Entry] = {}
        self._paths: dict[str, Path] = {}
        for name in sorted(names):
            self._add(folder / name)

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of these names file by file, reading only the pages that they need."""
        for path in sorted({self._paths[name] for name in names}):
            with _opened(path) as file:
                for name in (name for name in names if self._paths[name] == path):
                    yield name, file.get_tensor(name)

    def _add(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  # it is not a dict
                if name in self.entries:
                    raise DamagedError(f"{name} is in {path.name} and in {self._paths[name].name}")
                kind = file.get_slice(name)
                if kind.get_dtype() not in DTYPES:
                    raise DamagedError(f"{name} in {path.name} is of an unknown type, {kind.get_dtype()}")
                shape = tuple(kind.get_shape())
                self.entries[name] = Entry(shape=shape, dtype=DTYPES[kind.get_dtype()])
                self._paths[name] = path


class _opened:  # noqa: N801  # reads as a function
    """Opens a safetensors file while entered; raises DamagedError for whatever the library rejects."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Any:
        open_regular(self._path).close()
        try:
            self._file = safe_open(self._path, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:
            raise self._damaged(error) from error
        return self._file.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._file.__exit__(kind, error, trace)
        if isinstance(error, SafetensorError):
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> DamagedError:
        return DamagedError(f"{self._path.name} is no safetensors file: {error}")
