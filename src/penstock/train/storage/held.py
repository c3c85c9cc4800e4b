"""What a rank has of the tensors of a run: all of one, or one of equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.mesh import Axes
from penstock.sharding import Sharding


class Parted(Protocol):
    """Which part of a whole tensor a rank has. axes: along which the ranks with the other parts are."""

    @property
    def axes(self) -> Axes: ...

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor of all parts, in the order of their places."""
        ...


@dataclass(frozen=True)
class Held:
    """A tensor of the run's state on this rank. sharding: which part of the whole it is; None: all of it."""

    tensor: Tensor
    sharding: Sharding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return tuple(self.tensor.shape) if self.sharding is None else self.sharding.shape

    @property
    def stand_in(self) -> Tensor:
        """For code that asks for size and type alone: as large as the whole, without its memory."""
        if self.sharding is None:
            return self.tensor
        return torch.empty((), dtype=self.tensor.dtype).expand(self.sharding.shape)

    def fill(self, whole: Tensor) -> None:
        """Take from the whole tensor what belongs to this rank."""
        self.tensor.copy_(whole if self.sharding is None else self.sharding.part(whole))
