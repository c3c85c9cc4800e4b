"""Which part of a whole parameter a rank holds, where ranks share it. Marks stay with the parameter.

A whole parameter has the name and shape that it has on one process: checkpoints, initial weights and exports
know no other form. A rank's part is cut from it by `Sharding.part` and put back by `Sharding.join`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from penstock.copies import Mark, Shared
from penstock.mesh import Axes, Group, Mesh
from penstock.topology import Control

MARK = "penstock_sharding"

Place = tuple[int, ...]
Box = tuple[Place, Place]
"""Offsets and sizes in a whole tensor."""


@dataclass(frozen=True, kw_only=True)
class Sharding(Shared):
    """One of `count` equal parts of a whole tensor.

    For experts, a Sharding describes one expert's tensor, without the dimension that counts experts;
    `StackedSharding` has it.

    Attributes:
        axes: The axes of the mesh along which the parts are spread; part i is at place i.
        shape: The shape of the whole tensor.
        view: The shape to which the whole is reshaped so that `dim` is the dimension that is cut: a fused
            matrix of queries, keys and values [3 A K, M] is cut as [3, A K, M] along 1, so that every part
            has heads of all three.
        dim: The dimension of `view` that is cut.
        index: This rank's part.
        count: The number of parts.
    """

    axes: Axes
    shape: tuple[int, ...]
    view: tuple[int, ...]
    dim: int
    index: int
    count: int

    def __post_init__(self) -> None:
        assert prod(self.shape) == prod(self.view), f"{self.view} is no view of {self.shape}"
        assert self.view[self.dim] % self.count == 0, f"{self.view} cannot be cut into {self.count} parts"
        assert 0 <= self.index < self.count, f"part {self.index} of {self.count}"

    @staticmethod
    def along(
        dim: int, shape: Sequence[int], axes: Axes, index: int, count: int, view: Sequence[int] = ()
    ) -> Sharding:
        """Describe a tensor that is cut along dimension `dim` of `view`; without a view, of its own shape."""
        return Sharding(
            axes=axes,
            shape=tuple(shape),
            view=tuple(view or shape),
            dim=dim,
            index=index,
            count=count,
        )

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of a part: that of the whole, with as few of its dimensions changed as possible."""
        dim = self.dim
        if self.view != self.shape:
            before, sizes = prod(self.view[:dim]), range(len(self.shape))
            dim = next((at for at in sizes if prod(self.shape[: at + 1]) > before), 0)
        return (*self.shape[:dim], self.shape[dim] // self.count, *self.shape[dim + 1 :])

    @property
    def offset(self) -> Place | None:
        """Where this rank's part begins in the whole; None if it is no single box of it."""
        if self.view != self.shape:
            return None
        before = self.index * self.part_shape[self.dim]
        return tuple(before * (dim == self.dim) for dim in range(len(self.shape)))

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the boxes in the whole tensor of the numbers from `start` to `stop` of this rank's part."""
        if (offset := self.offset) is not None:
            for offsets, sizes in boxes_of(self.part_shape, start, stop):
                yield tuple(map(sum, zip(offset, offsets, strict=True))), sizes
            return
        whole = prod(self.view[self.dim :])  # every index of the dimensions before has a piece of the part
        piece = whole // self.count
        for number in range(start // piece, -(-stop // piece)):
            shift = number * (whole - piece) + self.index * piece
            begin, end = max(start, number * piece), min(stop, (number + 1) * piece)
            yield from boxes_of(self.shape, begin + shift, end + shift)

    @property
    def cuts(self) -> tuple[tuple[Axes, int], ...]:
        """Dimensions that are cut, by the axes along which their pieces are spread."""
        return ((self.axes, self.dim),)

    @property
    def transposed(self) -> Sharding:
        """The same part of a transposed matrix, which is cut along the other of its dimensions."""
        assert self.view == self.shape, "parts of a view are no parts of a transposed one"
        return Sharding.along(1 - self.dim, self.shape[::-1], self.axes, self.index, self.count)

    @property
    def in_words(self) -> str:
        """Which part this is, in words."""
        return f"part {self.index} of {self.count} along {' x '.join(self.axes)}"

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor of `shape`; a copy unless it lies in one piece."""
        return self.part_of(whole, self.index)

    def part_of(self, whole: Tensor, index: int) -> Tensor:
        """Return the part at place `index` of a whole tensor of `shape`."""
        width = self.view[self.dim] // self.count
        return whole.view(self.view).narrow(self.dim, index * width, width).reshape(self.part_shape)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, joined from all parts in the order of their places."""
        width = self.view[self.dim] // self.count
        shape = (*self.view[: self.dim], width, *self.view[self.dim + 1 :])
        return torch.cat([part.reshape(shape) for part in parts], dim=self.dim).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class StackedSharding(Sharding):
    """A part of a parameter of all experts, one after the other: of one rank's experts, a part of each.

    The fields say how experts are dealt: `index` and `count` along dimension 0. Parts are in the order of the
    ranks with the same experts, and of these in turn.

    Attributes:
        each: Which part of every expert this rank has.
    """

    each: Sharding

    @staticmethod
    def of(
        each: Sharding, slots: int, num_experts: int, place: int = 0, axes: Axes | None = None
    ) -> StackedSharding:
        """Describe `slots` of these experts, at a place among the ranks that have the others.

        Args:
            each: The part of every expert that this rank has.
            slots: The number of experts on a rank.
            place: The place of this rank among those that have the other experts.
            axes: The axes of these ranks and of those with the other parts; None: the axes of the parts
                alone.
        """
        shape = (num_experts, *each.shape)
        return StackedSharding(
            axes=axes or each.axes,
            shape=shape,
            view=shape,
            dim=0,
            index=place,
            count=num_experts // slots,
            each=each,
        )

    @property
    def in_words(self) -> str:
        index, count = self.index * self.each.count + self.each.index, self.count * self.each.count
        return f"part {index} of {count} along {' x '.join(self.axes)}"

    @property
    def part_shape(self) -> tuple[int, ...]:
        return (self.shape[0] // self.count, *self.each.part_shape)

    @property
    def offset(self) -> Place | None:
        offset = self.each.offset
        return None if offset is None else (self.index * self.part_shape[0], *offset)

    @property
    def cuts(self) -> tuple[tuple[Axes, int], ...]:
        return (Group.EXPERT, 0), (self.each.axes, 1 + self.each.dim)

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        size, first = prod(self.each.part_shape), self.index * self.part_shape[0]
        for expert in range(start // size, -(-stop // size)):
            begin, end = max(start - expert * size, 0), min(stop - expert * size, size)
            for offsets, sizes in self.each.boxes(begin, end):
                yield (first + expert, *offsets), (1, *sizes)

    def part(self, whole: Tensor) -> Tensor:
        return self.part_of(whole, self.index * self.each.count + self.each.index)

    def part_of(self, whole: Tensor, index: int) -> Tensor:
        place, shard = divmod(index, self.each.count)
        slots = self.part_shape[0]
        experts = whole[place * slots : (place + 1) * slots]
        return torch.stack([self.each.part_of(expert, shard) for expert in experts])

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        ranks = range(0, len(parts), self.each.count)
        held = (zip(*parts[first : first + self.each.count], strict=True) for first in ranks)
        return torch.stack([self.each.join(of_one) for experts in held for of_one in experts])


def boxes_of(shape: Place, start: int, stop: int) -> Iterator[Box]:
    """Yield the fewest boxes, in their order, that have the numbers from `start` to `stop` of a tensor."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # they begin and end in the same row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, row - (first * row - start), row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Place, row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes_of(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


@dataclass(frozen=True, eq=False)
class PartMark(Mark):
    """The mark that is set on a parameter.

    Attributes:
        sharding: Which part it is.
        ranks: The ranks that hold the other parts, for what sums over them; None: not known.
    """

    sharding: Sharding
    ranks: object = None


@dataclass(frozen=True)
class Shard:
    """Which of `size` ranks that share parameters this is; a subclass says along which axes they stand."""

    rank: int = 0
    size: int = 1
    axes: ClassVar[Axes]

    def cut(self, dim: int, shape: Sequence[int], view: Sequence[int] = ()) -> Sharding:
        """Return this rank's part of a matrix, cut along `dim` of `view` (without one, of the matrix)."""
        return Sharding.along(dim, shape, self.axes, self.rank, self.size, view)

    def among(self, found: dict[str, Sharding]) -> dict[str, Sharding]:
        """Return the shardings that a module declares for its parameters; none where they are whole."""
        return found if self.size > 1 else {}


def shardings_of(model: nn.Module) -> dict[str, Sharding]:
    """Return the sharding of every parameter that is a part of a larger one, by its name in `model`.

    A module declares them for its own parameters in an attribute `shardings`, by their names in the module.
    """
    shardings: dict[str, Sharding] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, sharding in getattr(module, "shardings", {}).items():
            shardings[f"{prefix}.{name}" if prefix else name] = sharding
    return shardings


def mark_shards(model: nn.Module, ranks: object = None) -> None:
    """Mark every parameter of `model` that is a part of a larger one.

    The marks are for code that meets a parameter without its module.

    Args:
        ranks: See `PartMark`.

    Raises:
        ValueError: If a parameter no longer exists, or does not have the shape of its part.
    """
    for name, sharding in shardings_of(model).items():
        wanted, whole = sharding.part_shape, list(sharding.shape)
        remedy = "Keep its name and shape, or build a new stack without shards"
        what = f"one of {sharding.count} parts {list(wanted)} of a parameter {whole} that ranks share"
        owner, _, own = name.rpartition(".")
        try:  # adapters of peft have what they wrap as an attribute of this name, but no parameter
            parameter = dict(model.get_submodule(owner).named_parameters(recurse=False))[own]
        except (AttributeError, KeyError) as error:
            raise ValueError(f"{name} is gone, and was {what}. {remedy} ({error})") from error
        if tuple(parameter.shape[-len(wanted) :]) != wanted:  # experts are stacked along one more dimension
            raise ValueError(f"{name} is {list(parameter.shape)}, and should be {what}. {remedy}")
        setattr(parameter, MARK, PartMark(sharding, ranks))


def sharding_of(parameter: Tensor) -> Sharding | None:
    """Return which part of a larger parameter this is; None for a whole one or one that was never marked."""
    mark = getattr(parameter, MARK, None)
    return mark.sharding if isinstance(mark, PartMark) else None


# ---- whole tensors of parts that several ranks hold --------------------------------------------------------


Named = tuple[str, Tensor, Sharding | None]
"""What a rank has of a tensor, by its name on any layout, with what part of the whole that is."""


def joined(
    named: Iterable[Named], mesh: Mesh, control: Control, purpose: str, at: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield, whole and on the host, tensors that ranks share: each on one of these ranks, which take turns.

    All ranks call it with the same tensors.

    Args:
        at: The one rank that gets all of them; None = one of every group.
    """
    for number, (name, part, sharding) in enumerate(named):
        assert sharding is not None, "it is shared"
        members = mesh.members(control.rank, sharding.axes)
        there = members[number % len(members)] if at is None else at
        if there in members and (parts := control.collect(part.cpu(), members, there, purpose)):
            yield name, sharding.join(parts)
