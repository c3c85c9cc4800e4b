"""A model of transformers written by all ranks together: each writes shards of what it holds.

Nothing is gathered but weights that a file stores whole and ranks hold in parts (those of all experts
together, and of shared attention), one after the other, at the rank that writes them. Besides the model a
rank needs memory for its share of one layer, or one such weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.adapt.engine import Engine
from penstock.adapt.export import expert_names
from penstock.checkpoint.folder import INDEX, ONE
from penstock.checkpoint.storage import CODES, Outgoing, together, write_shard, writing_order
from penstock.families.adapters import ALONG_ROWS
from penstock.families.in_files import renumbered
from penstock.families.weights import EXPERT, LAYER
from penstock.mesh import Group
from penstock.sharding import Sharding, sharding_of
from penstock.writing import write_whole

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Maps tensors as a model has them to those in its files, which have other names."""

Shard = list["_Piece"]

LENGTH_BYTES = 8
"""Bytes at the start of a safetensors file that give the length of its header."""


class _Entry(NamedTuple):
    """Shape and type of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False, frozen=True)
class _Part:
    """A rank's tensors of one layer: those of its experts, or all others.

    first: the number of its first expert.
    """

    tensors: Mapping[str, Tensor]
    convert: Convert
    first: int = 0

    def made(self, *, described: bool = False) -> dict[str, Tensor]:
        """Return the part's tensors as in files; described: on the meta device, without values."""
        tensors = {name: each.to("meta") if described else each for name, each in self.tensors.items()}
        return {renumbered(name, self.first): each for name, each in self.convert(tensors).items()}


Join = Callable[[list[Tensor]], Tensor]
"""Joins the parts that ranks hold of a tensor, in the order of the ranks."""


@dataclass(frozen=True)
class _Piece:
    """A tensor of a file. entry: for the whole tensor, even where `part` has this rank's part alone."""

    name: str
    entry: _Entry
    part: _Part
    join: Join = ALONG_ROWS.join

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.entry.shape).numel() * self.entry.dtype.itemsize


@dataclass(frozen=True)
class _Joined:
    """A shard of pieces that these ranks join, one of which writes it. members: those with rank 0."""

    shard: Shard
    members: Sequence[int]


@dataclass
class _Made:
    """The part that was converted last: it usually holds the tensor that is written next, too."""

    part: _Part | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def take(self, piece: _Piece) -> Tensor:
        if self.part is not piece.part:
            self.tensors = {}  # frees the memory before the next part
            self.part, self.tensors = piece.part, piece.part.made()
        return self.tensors[piece.name]


class Writing:
    """One save. state: this rank's tensors by the model's names. most_bytes: limit of a shard.

    All ranks construct it together, and call `write` if it `fits`.
    """

    def __init__(
        self, model: Any, engine: Engine, state: Mapping[str, Tensor], convert: Convert, most_bytes: int
    ) -> None:
        self._layout, self._control = engine.layout, engine.stack.machinery.control
        self._experts, self._tensor = (
            self._layout.mesh.members(0, axes) for axes in (Group.EXPERT, Group.TENSOR)
        )
        self._made = _Made()
        spread = expert_names(model, engine).keys() if self._layout.ep_size > 1 else set[str]()
        shared = _shared_names(model) if self._layout.mp_size > 1 else {}
        own, joined, cut = self._pieces(state, spread, shared, convert)
        self._own = _shards(own, most_bytes)
        self._joined = [_Joined(shard, self._experts) for shard in _shards(joined, most_bytes)]
        self._joined += [_Joined(shard, self._tensor) for shard in _shards(cut, most_bytes)]
        described = [[(each.name, each.entry, each.size_bytes) for each in shard] for shard in self._own]
        everyone = self._control.gather(described, "telling what each rank writes")
        last = [[(p.name, p.entry, p.size_bytes) for p in each.shard] for each in self._joined]
        self._written = [*chain.from_iterable(everyone), *last]
        self._before = sum(map(len, everyone[: self._control.rank]))
        self.fits = self._is_all_of(state, spread, shared, convert)

    def write(self, folder: Path) -> None:
        """Write all shards and their index. Raises CheckpointError, on all ranks."""
        purpose, names = f"saving {folder}", self._names()
        own = names[self._before : self._before + len(self._own)]
        together(self._control, purpose, lambda: self._write_own(folder, own))
        for number, each in enumerate(self._joined):
            path = folder / names[len(names) - len(self._joined) + number]
            writer = each.members[number % len(each.members)]
            together(self._control, purpose, partial(self._write_joined, path, each, writer))
        together(self._control, purpose, lambda: self._write_index(folder, names), rank=0)
        together(self._control, purpose, lambda: self._check_files(folder, names), rank=0)

    def _pieces(
        self,
        state: Mapping[str, Tensor],
        spread: Iterable[str],
        shared: Mapping[str, Sharding],
        convert: Convert,
    ) -> tuple[list[_Piece], list[_Piece], list[_Piece]]:
        """Return the pieces that this rank writes by itself, and those that ranks of experts and of shared
        attention join.

        Of the ranks that hold a piece the first writes it.
        """
        layout, own, joined, cut = self._layout, list[_Piece](), list[_Piece](), list[_Piece]()
        for name, sharding in shared.items():
            if name in state:
                part = _Part({name: state[name]}, convert)
                for there, each in part.made(described=True).items():
                    entry = _Entry(shape=sharding.shape, dtype=each.dtype)
                    cut.append(_Piece(there, entry, part, sharding.join))
        whole = {name: each for name, each in state.items() if name not in shared}
        for of_experts, tensors in _by_layer(whole, set(spread)):
            count = len(next(iter(tensors.values())))
            part = _Part(tensors, convert, layout.ep_rank * count if of_experts else 0)
            for name, each in part.made(described=True).items():
                if of_experts and not EXPERT.search(name):
                    joined.append(_Piece(name, _entry(each, layout.ep_size), part))
                elif layout.rank in (self._experts if of_experts else (0,)):
                    own.append(_Piece(name, _entry(each), part))
        return own, joined, cut

    def _is_all_of(
        self,
        state: Mapping[str, Tensor],
        spread: Iterable[str],
        shared: Mapping[str, Sharding],
        convert: Convert,
    ) -> bool:
        """Return whether all ranks together write what one rank with the whole model would write."""
        whole, spread, ranks = {}, set(spread), self._layout.ep_size
        for name, each in state.items():
            shape = ALONG_ROWS.whole_shape(tuple(each.shape), ranks) if name in spread else each.shape
            shape = shared[name].shape if name in shared else shape
            whole[name] = torch.empty(shape, dtype=each.dtype, device="meta")
        wanted = {name: _entry(each) for name, each in convert(whole).items()}
        written = [(name, entry) for shard in self._written for name, entry, _ in shard]
        known = all(entry.dtype in CODES for _, entry in written)
        return known and len(written) == len(wanted) and dict(written) == wanted

    def _names(self) -> list[str]:
        """Return the names of all files, in their order, as transformers names them."""
        count = len(self._written)
        if count == 1:
            return [ONE]
        return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]

    def _write_own(self, folder: Path, names: list[str]) -> None:
        for name, shard in zip(names, self._own, strict=True):
            write_shard(folder / name, [_outgoing(each, partial(self._made.take, each)) for each in shard])

    def _write_joined(self, path: Path, joined: _Joined, writer: int) -> None:
        """Write pieces that ranks join; where the writer fails, it still takes what the others send."""
        shard, members = sorted(joined.shard, key=_place), joined.members
        left = iter(shard)
        try:
            if self._control.rank == writer:
                taken = [
                    _outgoing(each, lambda: self._collect(next(left), members, writer)) for each in shard
                ]
                write_shard(path, taken)
        finally:
            for each in left if self._control.rank in members else ():
                self._collect(each, members, writer)

    def _collect(self, piece: _Piece, members: Sequence[int], writer: int) -> Tensor:
        held = self._made.take(piece).detach().cpu()
        parts = self._control.collect(held, members, writer, f"saving {piece.name}")
        return piece.join(parts) if parts else held

    def _write_index(self, folder: Path, names: list[str]) -> None:
        if len(names) < 2:
            return
        pieces = list(chain.from_iterable(self._written))
        total = {
            "total_parameters": sum(torch.Size(entry.shape).numel() for _, entry, _ in pieces),
            "total_size": sum(size_bytes for _, _, size_bytes in pieces),
        }
        pairs = zip(names, self._written, strict=True)
        weight_map = {name: file for file, shard in pairs for name, _, _ in shard}
        table = {"metadata": total, "weight_map": weight_map}
        write_whole(folder / INDEX, json.dumps(table, indent=2, sort_keys=True) + "\n")

    def _check_files(self, folder: Path, names: list[str]) -> None:
        """Raise OSError unless rank 0 sees the files that all ranks report as written."""
        for name, shard in zip(names, self._written, strict=True):
            with (folder / name).open("rb") as file:
                header_bytes = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
            expected = header_bytes + sum(size_bytes for _, _, size_bytes in shard)
            if (found := (folder / name).stat().st_size) != expected:
                raise OSError(f"{folder / name} has {found} bytes instead of {expected}")


def _shared_names(model: Any) -> dict[str, Sharding]:
    """Return how ranks share parameters with others, by the names of these parameters."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: found for name, p in named if (found := sharding_of(p)) is not None}


def _by_layer(state: Mapping[str, Tensor], spread: set[str]) -> Iterator[tuple[bool, dict[str, Tensor]]]:
    """Yield tensors that are converted together: whether they are of experts, and the tensors."""
    found: dict[tuple[str, bool], dict[str, Tensor]] = {}
    for name, tensor in state.items():
        layer = LAYER.match(name)
        found.setdefault((layer[0] if layer else "", name in spread), {})[name] = tensor
    for (_, of_experts), tensors in found.items():
        yield of_experts, tensors


def _shards(pieces: Iterable[_Piece], most_bytes: int) -> list[Shard]:
    """Divide pieces into as few shards as their order allows; a tensor larger than the limit has its own."""
    shards: list[Shard] = []
    room = 0
    for each in pieces:
        if not shards or each.size_bytes > room:
            shards.append([])
            room = most_bytes
        shards[-1].append(each)
        room -= each.size_bytes
    return shards


def _entry(tensor: Tensor, ranks: int = 1) -> _Entry:
    shape = tuple(tensor.shape)
    return _Entry(shape=shape if ranks == 1 else ALONG_ROWS.whole_shape(shape, ranks), dtype=tensor.dtype)


def _outgoing(piece: _Piece, load: Callable[[], Tensor]) -> Outgoing:
    return Outgoing(name=piece.name, shape=piece.entry.shape, dtype=piece.entry.dtype, load=load)


def _place(piece: _Piece) -> tuple[int, str]:
    return writing_order(piece.name, piece.entry.dtype)
