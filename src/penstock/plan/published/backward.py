"""The backward pass as a partition of gradients sees it: gaps in backward order, the highest layer first."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost import AlphaBeta
from penstock.plan.published.degree import DEGREES, Degree, MoEPart, exact


@dataclass(frozen=True, kw_only=True)
class Made:
    """Gradients that a layer's backward pass leaves behind."""

    layer: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class GapLayer:
    """An MoE layer with all that follows it in the backward pass, up to the next one ("generalised layer").

    layer: of its MoE part. part: backward. dense_s: computation after the MoE part, during which the network
    between nodes is idle. made: gradients that exist when the next such layer begins.
    """

    layer: int
    part: MoEPart
    dense_s: float
    made: tuple[Made, ...]


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The backward pass for a partition. above: gradients of blocks above the first MoE layer."""

    num_layers: int
    gaps: tuple[GapLayer, ...]
    all_reduce: AlphaBeta
    above: tuple[Made, ...] = ()
    degrees: tuple[int, ...] = DEGREES

    def degree(self, gap: GapLayer, reduce_s: float = 0.0) -> Degree:
        return exact(gap.part, reduce_s, self.degrees)

    def tail_s(self, left_bytes: float) -> float:
        """Return the seconds of reducing what is left, exposed after everything else."""
        return self.all_reduce.seconds(left_bytes)
