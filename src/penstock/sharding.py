"""Which part of a whole parameter a rank holds, where ranks share it. Marks stay with the parameter.

A whole parameter has the name and shape that it has on one process: checkpoints, initial weights and exports
know no other form. A rank's part is cut from it by `Sharding.part` and put back by `Sharding.join`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from penstock.mesh import Axes
from penstock.partial_state import mark_share

MARK = "penstock_sharding"


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """One of `count` equal parts of a whole tensor.

    axes: the axes of the mesh along which the parts are spread; part i is at place i. shape: the shape of the
    whole tensor. view: the shape to which the whole is reshaped so that `dim` is the dimension that is cut: a
    fused matrix of queries, keys and values [3 A K, M] is cut as [3, A K, M] along 1, so that every part has
    heads of all three. index: this rank's part. For experts, a Sharding describes one expert's tensor,
    without the dimension that counts experts.
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
        if self.view == self.shape:
            return (*self.shape[: self.dim], self.shape[self.dim] // self.count, *self.shape[self.dim + 1 :])
        return (self.shape[0] // self.count, *self.shape[1:])

    @property
    def transposed(self) -> Sharding:
        """The same part of a transposed matrix, which is cut along the other of its dimensions."""
        assert self.view == self.shape, "parts of a view are no parts of a transposed one"
        whole = self.shape[::-1]
        return Sharding(
            axes=self.axes, shape=whole, view=whole, dim=1 - self.dim, index=self.index, count=self.count
        )

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """Return this very object: a copy of a parameter is the same part."""
        del memo
        return self


@dataclass(frozen=True, eq=False)
class _Mark:
    """The mark that is set on a parameter."""

    sharding: Sharding

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle the mark as an empty OrderedDict, a type that torch.load always accepts."""
        return OrderedDict, ()


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
    found: dict[str, Sharding] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, sharding in getattr(module, "shardings", {}).items():
            found[f"{prefix}.{name}" if prefix else name] = sharding
    return found


def mark_states_of_shards(model: nn.Module) -> None:
    """Mark the state dicts of every module of `model` that declares shardings, see `mark_share`."""
    for module in model.modules():
        shardings: dict[str, Sharding] = getattr(module, "shardings", {})
        if shardings:
            mark_share(
                module, "; ".join(sorted({each.in_words for each in shardings.values()})), [*shardings]
            )


def mark_shards(model: nn.Module) -> None:
    """Mark every parameter of `model` that is a part of a larger one, for code that meets it without its
    module.

    Raises ValueError for a parameter that no longer exists, or whose shape is not that of its part.
    """
    for name, sharding in shardings_of(model).items():
        setattr(_part_called(name, sharding, model), MARK, _Mark(sharding))


def _part_called(name: str, sharding: Sharding, model: nn.Module) -> nn.Parameter:
    wanted, whole = sharding.part_shape, list(sharding.shape)
    remedy = "Keep its name and shape, or build a new stack without shards"
    what = f"one of {sharding.count} parts {list(wanted)} of a parameter {whole} that ranks share"
    try:
        parameter = model.get_parameter(name)
    except AttributeError as error:
        raise ValueError(f"{name} is gone, and was {what}. {remedy} ({error})") from error
    if tuple(parameter.shape[-len(wanted) :]) != wanted:  # experts are stacked along one more dimension
        raise ValueError(f"{name} is {list(parameter.shape)}, and should be {what}. {remedy}")
    return parameter


def sharding_of(parameter: Tensor) -> Sharding | None:
    """Return which part of a larger parameter this is; None for a whole one or one that was never marked."""
    mark = getattr(parameter, MARK, None)
    return mark.sharding if isinstance(mark, _Mark) else None
