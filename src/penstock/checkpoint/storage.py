"""Tensors of a checkpoint: parts that ranks hold, written beside the steps of training, read into any layout.

A rank that shares a tensor with others holds a part of it, which is rarely one box of the whole: a share of
an optimiser's state is a run of consecutive numbers. Every run is cut into as few boxes as there are, which
torch's planner deals to the ranks, and finds again under another layout.

A shard is a safetensors file with the offsets of its boxes in the header, as torch's HuggingFaceStorageWriter
writes it and its reader reads it: a length, JSON and raw numbers, so a file can hold nothing that runs. It is
written here, tensor by tensor, since torch's writer holds two copies of everything in memory, and opens files
in place. Threads of all ranks write, and a folder has its name when all is on disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    DTYPE_MAP,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
)
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _check_box_bounds,
    _check_box_overlap,
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

from penstock.checkpoint.folder import LENGTH_BYTES, DamagedError, open_regular
from penstock.config import ConfigError
from penstock.device import device_of
from penstock.mesh import Mesh
from penstock.sharding import Named, Place, Sharding, boxes_of, joined
from penstock.topology import Control
from penstock.topology.faults import reason
from penstock.writing import replacing

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

SUFFIX: Final = ".safetensors"
SHARD, MODEL = "shard", "model"
"""How names of files begin: of all tensors but the model's, and of these where transformers reads them."""

ALIGNMENT: Final = 8
CODES: Final = {dtype: code for code, dtype in DTYPE_MAP.items()} | {torch.bool: "BOOL"}
HOSTILE: Final = (
    SafetensorError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    RuntimeError,
)
"""What torch's reader raises for files that are no shards; it expects none."""

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not as it was written; an older one may be intact. Raised on all ranks alike."""


def together(control: Control, purpose: str, work: Callable[[], T], rank: int | None = None) -> T:
    """Run `work` on all ranks, or on `rank` alone, and wait for all; all ranks call it.

    Args:
        purpose: What the message of a failure says was done.
        rank: The only rank that works; None = all work.

    Returns:
        What `work` returns on this rank, if it has worked.

    Raises:
        CheckpointError: The work has failed on any rank; all ranks raise it, and it names the first.
        DamagedCheckpointError: It has failed with a DamagedError.
        ConfigError: It has failed with this.
    """

    def attempt() -> T:
        try:
            return work()
        except ConfigError:
            raise
        except Exception as error:  # of any kind: the others wait, and must be told
            damaged = isinstance(error, DamagedError)
            kind = "" if damaged else f"{type(error).__name__}: "
            where = f" on rank {control.rank}" if control.world_size > 1 else ""
            text = f"{purpose} failed{where}: {kind}{reason(error)}"
            raise (DamagedCheckpointError if damaged else CheckpointError)(text) from error

    with control.waiting_for_files():
        return control.agreed(attempt, purpose, by=rank, raises=(ConfigError, CheckpointError))


# ---- parts -------------------------------------------------------------------------------------------------

State = dict[str, "Part"]
"""What a rank has of all tensors of a checkpoint, by logical name."""


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: Type of its numbers.
        boxes: Views of the boxes, to read and to write, by their offsets in the whole.
    """

    shape: torch.Size
    dtype: torch.dtype
    boxes: dict[Place, Tensor]

    @staticmethod
    def of(tensor: Tensor, sharding: Sharding | None = None) -> Part:
        """Describe a tensor.

        Args:
            sharding: Which part of the whole it is; None = it is the whole.
        """
        if sharding is None:
            return Part(tensor.shape, tensor.dtype, {(0,) * tensor.dim(): tensor})
        if (offset := sharding.offset) is not None:
            return Part(torch.Size(sharding.shape), tensor.dtype, {offset: tensor})
        assert tensor.is_contiguous(), "parts of parameters are"
        return Part.of_runs([(0, tensor.view(-1))], tensor, sharding)

    @staticmethod
    def of_runs(runs: Iterable[tuple[int, Tensor]], local: Tensor, sharding: Sharding | None) -> Part:
        """Describe runs of consecutive numbers of a local tensor.

        Args:
            runs: The place of the first number of each in the flat tensor, and its numbers.
            local: A tensor of the shape of the part that the runs lie in.
            sharding: Which part of the whole that is; None = it is the whole.
        """
        boxes: dict[Place, Tensor] = {}
        dtype = local.dtype
        for first, numbers in runs:
            begin, dtype, last = 0, numbers.dtype, first + len(numbers)
            extents = boxes_of(local.shape, first, last) if sharding is None else sharding.boxes(first, last)
            for offsets, sizes in extents:
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


def tensors_in(state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield what this rank has of every tensor, by the tensor's name."""
    return ((name, box) for name, part in state.items() for box in part.boxes.values())


def make_whole(state: State, named: Iterable[Named], mesh: Mesh, control: Control, purpose: str) -> None:
    """Make tensors of a state whole that ranks share, each on one of these: transformers reads no parts.

    All ranks call it with the same tensors. A rank needs memory on the host for those that it makes whole.
    """
    shared = [each for each in named if each[2] is not None]
    for name, _, _ in shared:
        del state[name]
    state |= {name: Part.of(whole) for name, whole in joined(shared, mesh, control, purpose)}


class Dealing:
    """Deals to every rank what it writes, so that each box is written once; the same until parts change."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._asked: list[WriteItem] | None = None
        self._dealt: list[WriteItem] = []

    def deal(self, state: State, purpose: str) -> list[tuple[str, Place]]:
        """Return names and offsets of this rank's boxes. All ranks call it.

        Raises:
            ValueError: The boxes of all ranks have a gap or an overlap; all ranks raise it.
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


class Outgoing(NamedTuple):
    """A box of a tensor, which is to be written.

    Attributes:
        name: The tensor's name.
        offsets: The box's place in the whole tensor.
        box: Its numbers.
    """

    name: str
    offsets: Place
    box: Tensor


Files = dict[str, list[Outgoing]]
"""What a rank writes, by the names of the files."""


def write_shard(path: Path, tensors: Iterable[Outgoing]) -> str:
    """Write a file of the safetensors format and wait until the disk has it; return its SHA-256.

    The digest is of what was to be written, so a disk that writes something else is noticed, too. What lies
    elsewhere than in memory of the host, or not in one piece, is copied tensor by tensor.
    """
    # Wide numbers first, so that each is aligned to its width.
    ordered = sorted(tensors, key=lambda each: (-each.box.dtype.itemsize, each.name))
    digest = hashlib.sha256()
    with replacing(path, durable=True) as file:
        numbers = (each.box.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data for each in ordered)
        offsets = {each.name: {SAVED_OFFSETS_KEY: each.offsets} for each in ordered}
        about = {CUSTOM_METADATA_KEY: json.dumps(offsets), DCP_VERSION_KEY: str(HF_DCP_VERSION)}
        table: dict[str, Any] = {"__metadata__": {FORMAT_KEY: FORMAT_VALUE, **about}}
        end = 0
        for name, _, box in ordered:
            start, end = end, end + box.nbytes
            table[name] = {"dtype": CODES[box.dtype], "shape": list(box.shape), "data_offsets": [start, end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        pieces: Iterable[Buffer] = chain([len(text).to_bytes(LENGTH_BYTES, "little") + text], numbers)
        for data in pieces:
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


# ---- reading -----------------------------------------------------------------------------------------------


class _Named(FileSystem):
    """What torch's reader takes for a folder: files by name."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        del path
        return self._files


class Stored:
    """The tensors in the shards of a folder.

    Args:
        names: Names of the shards.
        prefix: How names of tensors begin that are looked at.
        others: Whether there may be shards that are not named.

    Attributes:
        whole: Shape and type of each of these tensors, by name.

    Raises:
        DamagedError: A shard is not what it should be.
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
            raise DamagedError(f"its shards are none: {type(error).__name__}: {error}") from error

    def load(self, state: State) -> None:
        """Read the parts of a state, whose names and shapes are those stored.

        Raises:
            DamagedError: A part cannot be read.
        """
        planner = Loading(state)
        planner.metadata = self._metadata
        try:
            self._reader.read_data(planner.create_local_plan(), planner)
        except (SafetensorError, AssertionError, KeyError, ValueError, RuntimeError) as error:
            raise DamagedError(f"its shards cannot be read: {type(error).__name__}: {error}") from error


def _checked(name: str, found: Any) -> tuple[torch.Size, torch.dtype]:
    """Return shape and type of a stored tensor. Raises DamagedError unless its boxes fill it."""
    assert isinstance(found, TensorStorageMetadata), "safetensors hold nothing else"
    if not fills(found.size, found.chunks):
        filled = sum(prod(chunk.sizes) for chunk in found.chunks)
        raise DamagedError(f"the parts of {name} {list(found.size)} have {filled} numbers")
    return found.size, found.properties.dtype


def fills(shape: Sequence[int], boxes: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether every number of a tensor is in one of these boxes, and none in two."""
    inside = all(
        len(box.offsets) == len(shape) and _check_box_bounds(torch.Size(shape), box) for box in boxes
    )
    return inside and sum(prod(box.sizes) for box in boxes) == prod(shape) and not _overlap(boxes)


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether two boxes have a number in common, each compared with those that reach its first row."""
    open_boxes: list[ChunkStorageMetadata] = []
    for box in sorted(chunks, key=lambda each: tuple(each.offsets)):
        first = box.offsets[0] if box.offsets else 0
        open_boxes = [
            each for each in open_boxes if not each.offsets or each.offsets[0] + each.sizes[0] > first
        ]
        if any(_check_box_overlap(each, box) for each in open_boxes):
            return True
        open_boxes.append(box)
    return False


def misfits(
    state: State,
    stored: Mapping[str, tuple[torch.Size, torch.dtype]],
    everyone: Collection[str],
    alike: Collection[torch.dtype] = (),
) -> str | None:
    """Return what a checkpoint has otherwise than a state; None if it fits.

    Args:
        stored: Shape and type of every tensor of the checkpoint.
        everyone: Names of the tensors of all ranks.
        alike: Types that may stand for each other.
    """
    for name, part in state.items():
        if name not in stored:
            return f"{name} is missing in it"
        shape, dtype = stored[name]
        if shape != part.shape:
            return f"{name} has shape {list(shape)} there and {list(part.shape)} here"
        if dtype != part.dtype and not {dtype, part.dtype} <= {*alike}:
            return f"{name} has numbers of type {dtype} there and {part.dtype} here"
    return next((f"{name} exists there and not here" for name in stored if name not in everyone), None)


NOT_FINITE: Final = "holds numbers that are not finite"


def first_not_finite(
    tensors: Iterable[tuple[str, Tensor]], most: Callable[[str], float] = lambda name: math.inf
) -> str | None:
    """Return the name of the first tensor with a NaN, an infinity or too large a number, or None.

    It takes one pass over memory and allocates nothing. Integer tensors are always finite.

    Args:
        most: Returns the largest magnitude that a tensor of this name may have.
    """
    floating = [(name, each) for name, each in tensors if each.is_floating_point() and each.numel()]
    if not floating:
        return None
    names, numbers = zip(*floating, strict=True)
    # The largest magnitude is taken, since a norm of squares could overflow although every number is finite.
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for place, each in enumerate(numbers):
        by_device[each.device].append(place)
    sizes = torch.empty(len(numbers), dtype=torch.float64, device="cpu")
    for places in by_device.values():  # one copy of each device
        largest = torch._foreach_norm([numbers[place] for place in places], math.inf)
        sizes[places] = torch.stack([each.double() for each in largest]).cpu()
    limits = torch.tensor([most(name) for name in names], dtype=torch.float64, device="cpu")
    finite = (sizes.isfinite() & (sizes <= limits)).tolist()
    return next((name for name, whole in zip(names, finite, strict=True) if not whole), None)


class Replacement(Protocol):
    """New files for a folder, which are written in the folder `work`; rank 0 alone calls the methods.

    `begin` makes that folder; what a killed save has left is given up first. `finish` puts the complete files
    in the place of older ones, given the digests of those that ranks have written. `give_up` undoes what was
    not completed, and removes the files, which may be what fills the disk.
    """

    @property
    def work(self) -> Path: ...
    def begin(self) -> None: ...
    def finish(self, digests: Mapping[str, str]) -> None: ...
    def give_up(self) -> None: ...


def of_rank(
    tensors: Iterable[Outgoing], control: Control, kind_of: Callable[[str], str] = lambda _: SHARD
) -> Files:
    """Return the files of a rank, named after it: one of each kind, and more for several boxes of a tensor.

    Args:
        kind_of: Returns how the name of a tensor's file begins.
    """
    files: Files = {}
    met = Counter[str]()
    for outgoing in tensors:
        before = met[outgoing.name]
        met[outgoing.name] += 1
        name = f"{kind_of(outgoing.name)}-{control.rank + 1:05d}{f'-{before + 1}' if before else ''}{SUFFIX}"
        files.setdefault(name, []).append(outgoing)
    return files


class Saving:
    """What all ranks write of a state, on its way to the disk: a thread of each writes, and meets no other.

    All ranks construct it, and call its methods, together.

    Args:
        files: What puts the files in their place.
        control: Exchanges between all ranks.
        purpose: What the message of a failure says was done.
        state_in: Returns what this rank has of the state, and may write into the folder before.
        dealing: Deals boxes to ranks; None = one for this save alone.
        divide: Divides boxes into files; all ranks call it.
        copies: Whether the state may change as soon as this is constructed, and not only after `finish`.

    Raises:
        CheckpointError: A rank could not begin; all ranks raise it, and what was there before is there still.
    """

    def __init__(
        self,
        files: Replacement,
        control: Control,
        purpose: str,
        state_in: Callable[[Path], State],
        dealing: Dealing | None = None,
        divide: Callable[[list[Outgoing], Control], Files] = of_rank,
        *,
        copies: bool = True,
    ) -> None:
        self.folder, self._files, self._control, self._purpose = files.work, files, control, purpose
        self._written: Future[dict[str, str]] | None = None
        with self._giving_up():
            together(control, purpose, files.begin, rank=0)
            state = state_in(self.folder)
            dealt = (dealing or Dealing(control)).deal(state, purpose)
            boxes = [Outgoing(name, at, state[name].boxes[at].detach()) for name, at in dealt]
            if copies:
                boxes = [each._replace(box=each.box.to("cpu", copy=True)) for each in boxes]
            for device in {each.box.device for each in boxes}:  # the thread reads in a stream of its own
                device_of(device).synchronize(device)
            writer = ThreadPoolExecutor(1, "penstock-checkpoint")
            self._written = writer.submit(self._write, divide(boxes, control))
            writer.shutdown(wait=False)

    def _write(self, files: Files) -> dict[str, str]:
        """Write this rank's files, on the thread; return the digest of each."""
        digests = {}
        for name, tensors in files.items():
            digests[name] = write_shard(self.folder / name, tensors)
            tensors.clear()  # the memory is free before the next one
        return digests

    def has_ended(self) -> bool:
        """Return whether all ranks have written, or one has failed."""
        assert self._written is not None, "it has begun"
        done = self._written.done()
        failed = done and self._written.exception() is not None
        missing, failures = self._control.largest((float(not done), float(failed)), self._purpose)
        return bool(failures) or not missing

    def finish(self) -> None:
        """Wait until all ranks have written, and let the files take their place; once.

        Raises:
            CheckpointError: That has failed; all ranks raise it, and what was there before is there still.
        """
        if self._written is None:
            return
        with self._giving_up():
            own = together(self._control, self._purpose, self._written.result)
            digests = {n: d for one in self._control.gather(own, self._purpose) for n, d in one.items()}
            together(self._control, self._purpose, lambda: self._complete(digests), rank=0)
        self._written = None

    def _complete(self, digests: Mapping[str, str]) -> None:
        if unseen := [name for name in digests if not (self.folder / name).exists()]:
            why = f"rank 0 does not see {unseen[0]}, which another rank has written: use a shared folder"
            raise OSError(why)
        self._files.finish(digests)

    def wait(self) -> None:
        """Wait until this rank's thread has ended, whatever has become of it."""
        if self._written is not None:
            self._written.exception()

    def drop(self) -> None:
        """Give up what is being written, whatever has become of it."""
        self.wait()
        self._written = None
        if self._control.rank == 0:
            with suppress(OSError):  # what stays costs room, and the next save removes it
                self._files.give_up()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            raise
