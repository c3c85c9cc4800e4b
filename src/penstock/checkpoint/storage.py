"""Tensors of a checkpoint: parts that ranks hold, written beside the steps of training, read into any layout.

A rank that shares a tensor with others holds a part of it, which is rarely one box of the whole: a share of
an optimiser's state is a run of consecutive numbers. Every run is cut into as few boxes as there are, which
torch's planner deals to the ranks, and finds again under another layout.

A shard is a safetensors file with the offsets of its boxes in the header, as torch's HuggingFaceStorageWriter
writes it and its reader reads it: a length, JSON and raw numbers, so a file can hold nothing that runs. It is
written here, tensor by tensor, since torch's writer holds two copies of everything in memory, and opens files
in place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
)
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from penstock.checkpoint.folder import INDEX, DamagedError, open_regular
from penstock.sharding import Place, Sharding, boxes_of
from penstock.topology import Control
from penstock.topology.faults import reason
from penstock.writing import replacing, write_whole

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

SUFFIX: Final = ".safetensors"
SHARD, MODEL = "shard", "model"
"""How names of files begin: of all tensors but the model's, and of these where transformers reads them."""

ALIGNMENT: Final = 8

CODES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HOSTILE: Final = (
    SafetensorError,
    AttributeError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    OverflowError,
    RuntimeError,
)
"""What torch's reader raises for files that are no shards; it expects none."""

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; an older one may be intact. Raised on all ranks alike."""


def together(control: Control, purpose: str, work: Callable[[], T], rank: int | None = None) -> T:
    """Return what `work` returns on this rank, after all ranks have run it, or `rank` alone.

    A failure on any rank raises CheckpointError on every rank, DamagedCheckpointError for a DamagedError. If
    only `rank` works, it alone gets a result.
    """
    result: T | None = None
    failure: tuple[bool, str] | None = None
    if rank in (None, control.rank):
        try:
            result = work()
        except Exception as error:  # of any kind: the others wait, and must be told
            damaged = isinstance(error, DamagedError)
            kind = "" if damaged else f"{type(error).__name__}: "
            failure = damaged, f"{purpose} failed: {kind}{reason(error)}"
    for damaged, text in filter(None, control.gather(failure, purpose)):
        raise (DamagedCheckpointError if damaged else CheckpointError)(text)
    return result  # type: ignore[return-value]  # only the rank that has worked reads it


# ---- parts -------------------------------------------------------------------------------------------------

State = dict[str, "Part"]
"""What a rank has of all tensors of a checkpoint, by logical name."""


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor. shape: of the whole. boxes: by offset, views to read and to write."""

    shape: torch.Size
    dtype: torch.dtype
    boxes: dict[Place, Tensor]

    @staticmethod
    def of(tensor: Tensor, sharding: Sharding | None = None) -> Part:
        """Describe a tensor. sharding: its part of the whole; None: it is the whole."""
        if sharding is None:
            return Part(tensor.shape, tensor.dtype, {(0,) * tensor.dim(): tensor})
        if (offset := sharding.offset) is not None:
            return Part(torch.Size(sharding.shape), tensor.dtype, {offset: tensor})
        assert tensor.is_contiguous(), "parts of parameters are"
        return Part.of_runs([(0, tensor.view(-1))], tensor, sharding)

    @staticmethod
    def of_runs(runs: Iterable[tuple[int, Tensor]], local: Tensor, sharding: Sharding | None) -> Part:
        """Describe runs of consecutive numbers of a local tensor, each with its first number, flat.

        local: has the shape of the part that the runs lie in, which `sharding` describes.
        """
        boxes: dict[Place, Tensor] = {}
        dtype = local.dtype
        for first, numbers in runs:
            begin, dtype, last = 0, numbers.dtype, first + len(numbers)
            found = boxes_of(local.shape, first, last) if sharding is None else sharding.boxes(first, last)
            for offsets, sizes in found:
                boxes[offsets] = numbers[begin : begin + prod(sizes)].view(sizes)
                begin += prod(sizes)
        return Part(local.shape if sharding is None else torch.Size(sharding.shape), dtype, boxes)

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor; torch's planner asks for it by this name."""
        return self.shape

    def __create_write_items__(self, name: str, part: object) -> list[WriteItem]:
        """Return what torch's planner calls requests to write."""
        del part
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes as torch's planner describes them."""
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=box.shape)
            for offsets, box in self.boxes.items()
        ]


class Dealing:
    """Deals to every rank what it writes, so that each box is written once; the same until parts change."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._asked: list[WriteItem] | None = None
        self._dealt: list[WriteItem] = []

    def deal(self, state: State, purpose: str) -> list[tuple[str, Place]]:
        """Return names and offsets of this rank's boxes. All ranks call it.

        Raises ValueError, on all ranks, unless all boxes together are all tensors, without a gap or overlap.
        """
        plan = create_default_local_save_plan(dict(state), is_coordinator=False)
        if self._control.any(plan.items != self._asked, purpose):
            plans = self._control.gather(plan, purpose)
            dealt, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
            self._asked, self._dealt = plan.items, dealt[self._control.rank].items
        return [(item.index.fqn, tuple(item.index.offset or ())) for item in self._dealt]


class Loading(DefaultLoadPlanner):
    """Loads a state into the boxes of its parts."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False)
        self.state_dict = dict(state)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the box that begins at an offset."""
        part: Part = self.state_dict[index.fqn]
        return part.boxes[tuple(index.offset or ())]


# ---- writing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A tensor to be written. load: returns it when its turn comes. offsets: of a box in a larger tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], Tensor]
    offsets: Place | None = None

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def writing_order(name: str, dtype: torch.dtype) -> tuple[int, str]:
    """Return a tensor's sorting key in a file: wide numbers first, so that each is aligned to its width."""
    return -dtype.itemsize, name


def write_shard(path: Path, tensors: Iterable[Outgoing]) -> str:
    """Write a file of the safetensors format and wait until the disk has it; return its SHA-256.

    The digest is of what was to be written, so a disk that writes something else is noticed, too. It needs
    memory for one tensor.
    """
    ordered = sorted(tensors, key=lambda each: writing_order(each.name, each.dtype))
    digest = hashlib.sha256()
    with replacing(path, durable=True) as file:
        for piece in (lambda: _header(ordered), *map(_raw, ordered)):
            data = piece()
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


def _header(tensors: Sequence[Outgoing]) -> bytes:
    about = {FORMAT_KEY: FORMAT_VALUE}
    offsets = {each.name: {SAVED_OFFSETS_KEY: each.offsets} for each in tensors if each.offsets is not None}
    if offsets:
        about |= {CUSTOM_METADATA_KEY: json.dumps(offsets), DCP_VERSION_KEY: str(HF_DCP_VERSION)}
    table: dict[str, Any] = {"__metadata__": about}
    end = 0
    for each in tensors:
        start, end = end, end + each.size_bytes
        code = CODES[each.dtype]
        table[each.name] = {"dtype": code, "shape": list(each.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _raw(each: Outgoing) -> Callable[[], Buffer]:
    def load() -> Buffer:
        tensor = each.load().detach().cpu().contiguous()
        assert (tuple(tensor.shape), tensor.dtype) == (each.shape, each.dtype), each.name
        numbers: Buffer = tensor.reshape(-1).view(torch.uint8).numpy().data
        return numbers

    return load


class Saving:
    """A copy of what this rank writes of a state, on its way to the disk: a thread writes it.

    The thread meets no other rank. kind_of: how the name of a tensor's file begins. All ranks construct it
    together; what it copies may change as soon as that has returned.
    """

    def __init__(
        self,
        state: State,
        folder: Path,
        dealing: Dealing,
        control: Control,
        purpose: str,
        kind_of: Callable[[str], str] = lambda _: SHARD,
    ) -> None:
        self.folder, self._control, self._purpose = folder, control, purpose
        shards: dict[tuple[str, int], list[Outgoing]] = {}
        met = Counter[str]()
        for name, offsets in dealing.deal(state, purpose):
            box = state[name].boxes[offsets].detach().to("cpu", copy=True)
            shards.setdefault((kind_of(name), met[name]), []).append(  # a file has one box of a tensor
                Outgoing(
                    name=name,
                    shape=tuple(box.shape),
                    dtype=box.dtype,
                    load=lambda box=box: box,  # type: ignore[misc]  # a default that binds
                    offsets=offsets,
                )
            )
            met[name] += 1
        writer = ThreadPoolExecutor(1, "penstock-checkpoint")
        self._written: Future[dict[str, str]] = writer.submit(self._write, shards)
        writer.shutdown(wait=False)

    def _write(self, shards: Mapping[tuple[str, int], list[Outgoing]]) -> dict[str, str]:
        """Write this rank's shards, on the thread; return the digest of each file."""
        digests = {}
        for (kind, before), tensors in shards.items():
            name = f"{kind}-{self._control.rank + 1:05d}{f'-{before + 1}' if before else ''}{SUFFIX}"
            digests[name] = write_shard(self.folder / name, tensors)
            tensors.clear()  # the memory is free before the next shard
        return digests

    def has_ended(self) -> bool:
        """Return whether all ranks have written, or one has failed. All ranks call it, between two steps."""
        done = self._written.done()
        failed = done and self._written.exception() is not None
        missing, failures = self._control.largest((float(not done), float(failed)), self._purpose)
        return bool(failures) or not missing

    def digests(self) -> dict[str, str]:
        """Return the digests of the files of all ranks, when they are on disk. All ranks call it.

        Raises CheckpointError, on all ranks, if one could not write.
        """
        mine = together(self._control, self._purpose, self._written.result)
        return {name: each for one in self._control.gather(mine, self._purpose) for name, each in one.items()}

    def wait(self) -> None:
        """Wait until this rank's thread has ended, whatever has become of it."""
        self._written.exception()


def write_index(folder: Path, kind: str) -> None:
    """Write the index by which transformers finds tensors: those in files whose names begin with `kind`."""
    found: dict[str, str] = {}
    size_bytes = 0
    for path in sorted(folder.glob(f"{kind}-*{SUFFIX}")):
        size_bytes += path.stat().st_size
        with safe_open(path, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), path.name)
    table = {"metadata": {"total_size": size_bytes}, "weight_map": found}
    write_whole(folder / INDEX, json.dumps(table, indent=2) + "\n", durable=True)


# ---- reading -----------------------------------------------------------------------------------------------


class _Named(FileSystem):
    """What torch's reader takes for a folder: files by name."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        del path
        return self._files


class Stored:
    """The tensors in all shards of `folder`. Raises DamagedError if one is not what it should be.

    names: of the shards, which must be all that are there, unless there may be `others`. whole: shape and
    type of each tensor whose name begins with `prefix`, by name.
    """

    def __init__(
        self, folder: Path, names: Collection[str], prefix: str = "", *, others: bool = False
    ) -> None:
        for name in {*names, *(path.name for path in folder.glob(f"*{SUFFIX}") if not others)}:
            if name not in names:
                raise DamagedError(f"{name} does not belong to it")
            open_regular(folder / name).close()
            try:
                with safe_open(folder / name, framework="pt"):
                    pass
            except (SafetensorError, OSError, ValueError) as error:
                raise DamagedError(f"{name} is no safetensors file: {error}") from error
        try:
            self._reader = HuggingFaceStorageReader(str(folder))
            self._reader.fs = _Named([str(folder / name) for name in names])
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
            described = self._metadata.state_dict_metadata.items()
            self.whole = {name: _checked(name, each) for name, each in described if name.startswith(prefix)}
            for index, info in self._reader.storage_data.items():
                if index.fqn in self.whole and info.dtype != self.whole[index.fqn][1]:
                    raise DamagedError(f"{index.fqn} has numbers of two types")
        except DamagedError:
            raise
        except HOSTILE as error:
            raise DamagedError(f"its shards are none: {_said(error)}") from error

    def load(self, state: State) -> None:
        """Read the parts of a state, whose names and shapes are those stored. Raises DamagedError."""
        planner = Loading(state)
        planner.metadata = self._metadata
        try:
            self._reader.read_data(planner.create_local_plan(), planner)
        except (SafetensorError, AssertionError, KeyError, ValueError, RuntimeError) as error:
            raise DamagedError(f"its shards cannot be read: {_said(error)}") from error


def _checked(name: str, found: Any) -> tuple[torch.Size, torch.dtype]:
    """Return shape and type of a stored tensor. Raises DamagedError unless its boxes fill it."""
    assert isinstance(found, TensorStorageMetadata), "safetensors hold nothing else"
    filled = sum(prod(chunk.sizes) for chunk in found.chunks)
    inside = all(
        len(chunk.offsets) == len(found.size) and min(chunk.offsets, default=0) >= 0 for chunk in found.chunks
    )
    if not inside or filled != prod(found.size) or _overlap(found.chunks):
        raise DamagedError(f"the parts of {name} {list(found.size)} have {filled} numbers")
    return found.size, found.properties.dtype


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether two boxes of a tensor have a number in common.

    Boxes are met by the first row that they have, and compared with those that reach it: of a thousand ranks'
    shares, which follow one another, only with their neighbours.
    """
    open_boxes: list[ChunkStorageMetadata] = []
    for box in sorted(chunks, key=lambda each: tuple(each.offsets)):
        first = box.offsets[0] if box.offsets else 0
        open_boxes = [
            each for each in open_boxes if not each.offsets or each.offsets[0] + each.sizes[0] > first
        ]
        if any(_meet(each, box) for each in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _meet(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + n and b < a + m
        for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def misfits(
    state: State, stored: Mapping[str, tuple[torch.Size, torch.dtype]], everyone: Collection[str]
) -> str | None:
    """Return what a checkpoint has otherwise than a state, or None. everyone: names of all ranks."""
    for name, part in state.items():
        if name not in stored:
            return f"{name} is missing in it"
        shape, dtype = stored[name]
        if shape != part.shape:
            return f"{name} has shape {list(shape)} there and {list(part.shape)} here"
        if dtype != part.dtype:
            return f"{name} has numbers of type {dtype} there and {part.dtype} here"
    return next((f"{name} exists there and not here" for name in stored if name not in everyone), None)
