"""What a rank holds of the tensors of a run: a whole tensor, or one of its equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.mesh import Axes
from penstock.sharding import Sharding


class Parted(Protocol):
    """Which part of a whole tensor a rank has. axes: those along which the ranks with the other parts lie."""

    @property
    def axes(self) -> Axes: ...

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor made of all parts, in the order of their places."""
        ...


@dataclass(frozen=True)
class Held:
    """A tensor of the run's state on this rank. sharding: its part of the whole; None: the whole."""

    tensor: Tensor
    sharding: Sharding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape) if self.sharding is None else self.sharding.shape

    @property
    def stand_in(self) -> Tensor:
        """Tensor of the whole's shape and type without its memory, for code that asks for nothing else."""
        if self.sharding is None:
            return self.tensor
        return torch.empty((), dtype=self.tensor.dtype).expand(self.sharding.shape)

    def fill(self, whole: Tensor) -> None:
        """Copy this rank's part from the whole tensor."""
        self.tensor.copy_(whole if self.sharding is None else self.sharding.part(whole))
