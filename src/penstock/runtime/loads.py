"""The loads of experts in the last steps of a stack, as its steps gather them.

Shapes: P ranks, B samples, Y MoE layers, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.placement import Replication

Loads = npt.NDArray[np.int32]
STEPS_KEPT = 32


@dataclass(frozen=True)
class SampleLoads:
    """How often each of some samples chose each expert, [B, E]. ids_B: the numbers of the samples."""

    ids_B: Tensor
    chosen_BE: Tensor


LayerLoads = Sequence[Sequence[SampleLoads]]
"""By MoE layer and microbatch."""


class LoadHistory:
    """How often tokens of each rank chose each expert, [P, Y, E] for every step, before any drop.

    P are the ranks of the world; of ranks that have the same tokens the first one counts them. All ranks have
    the same history. It has only steps that were trained on, and whose graph gathers loads. steps: how many
    there have been in all. of_samples: loads of the samples that this rank had in the last step, by MoE layer
    and microbatch. replications: those of the last step, by MoE layer; () where no replicas may be held.
    """

    def __init__(self, kept: int = STEPS_KEPT) -> None:
        self._kept: deque[Tensor | Loads] = deque(maxlen=kept)
        self.steps = 0
        self.of_samples: LayerLoads = ()
        self.replications: tuple[Replication, ...] = ()

    def add(
        self, loads_PYE: Tensor, of_samples: LayerLoads = (), replications: Sequence[Replication | None] = ()
    ) -> None:
        """Add the loads of one more step. They stay on their device until they are first read."""
        self._kept.append(loads_PYE)
        self.of_samples = of_samples
        self.replications = tuple(replication for replication in replications if replication is not None)
        self.steps += 1

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Loads:
        """Return the loads of a kept step: -1 = the last. Costs a copy from a GPU when first read."""
        found = self._kept[index]
        if isinstance(found, Tensor):
            found = self._kept[index] = found.cpu().numpy()
        return found

    def __iter__(self) -> Iterator[Loads]:
        """Yield the loads of the kept steps, oldest first."""
        return (self[i] for i in range(len(self)))

    @property
    def last(self) -> Loads | None:
        """The loads of the last step; None before the first."""
        return self[-1] if self._kept else None
