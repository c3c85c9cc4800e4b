"""The gap of the backward pass in which each gradient is reduced: what FSMoE's partition decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.graph import ScheduleError

Part = Literal["moe", "dense", "tail"]
"""Between the two all-to-all groups of a layer's MoE part; under its attention; after everything else."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A gap on the lane `inter` of the backward pass.

    Attributes:
        layer: The layer of the gap; it has no meaning for the tail.
    """

    layer: int
    part: Part


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Bytes of one layer's replicated gradients, and the gap in which they are reduced."""

    size_bytes: int
    slot: Slot


TAIL = Slot(layer=0, part="tail")


@dataclass(frozen=True)
class Partition:
    """For every layer, the portions of its gradients, in the order in which they are reduced.

    A gap must come after the gradients are made, so it belongs to a lower layer: this layer's own "dense" gap
    does not count, since attention makes the gradients that it would carry.
    """

    portions: tuple[tuple[Portion, ...], ...]

    def __post_init__(self) -> None:
        for layer, portions in enumerate(self.portions):
            for portion in portions:
                if portion.size_bytes < 1:
                    raise ScheduleError(f"layer {layer}: a portion of {portion.size_bytes} bytes is none")
                if portion.slot.layer < 0:
                    raise ScheduleError(f"layer {layer}: there is no layer {portion.slot.layer} with a gap")
                if portion.slot.part != "tail" and portion.slot.layer >= layer:
                    raise ScheduleError(
                        f"layer {layer}: no gradients yet in a gap of layer {portion.slot.layer}"
                    )

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Bytes by layer and portion, for StepShape.all_reduce_parts."""
        return tuple(tuple(portion.size_bytes for portion in portions) for portions in self.portions)
