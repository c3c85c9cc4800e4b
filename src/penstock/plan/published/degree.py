"""The number of chunks into which the MoE part of a layer is cut, by an exact formula.

The MoE part of FSMoE (ASPLOS 2025), in R chunks on three lanes, with gradients reduced in between:

    inter    D1 .. DR   reduction   C1 .. CR
    intra    AG1 .. AGR   RS1 .. RSR
    compute  X1 .. XR

A chunk's durations are `alpha + linear / R`. Without legs inside the node (AG and RS of 0 seconds) this is
the pipeline of Tutel and PipeMoE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.cost import AlphaBeta

DEGREES = tuple(range(1, 17))
"""The degrees that are tried unless a caller gives others."""

ROUNDING = 1e-12


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A whole buffer moved or computed in chunks: a start-up per chunk, and a time that all chunks share."""

    alpha_s: float = 0.0
    linear_s: float = 0.0

    def chunk_s(self, degree: float) -> float:
        """Return the seconds of one of `degree` equal chunks."""
        return self.alpha_s + self.linear_s / degree

    def times(self, factor: float) -> Linear:
        return Linear(alpha_s=self.alpha_s * factor, linear_s=self.linear_s * factor)


@dataclass(frozen=True, kw_only=True)
class MoEPart:
    """Times of the MoE part of one layer in one direction.

    Attributes:
        a2a: Each of the two all-to-alls between nodes.
        ag, rs: The gather before the experts and the scatter after them, inside the node.
        experts: The computation of the experts.
    """

    a2a: Linear
    ag: Linear = Linear()
    rs: Linear = Linear()
    experts: Linear

    @property
    def backward(self) -> MoEPart:
        """The backward part if experts take twice as long, in the start-up as well as in the linear term."""
        return replace(self, experts=self.experts.times(2))

    def chunk_s(self, degree: float) -> tuple[float, ...]:
        """Return the seconds of one of `degree` chunks: an all-to-all, gather, scatter and experts."""
        return tuple(each.chunk_s(degree) for each in (self.a2a, self.ag, self.rs, self.experts))


@dataclass(frozen=True, kw_only=True)
class Degree:
    """A degree, and the seconds of the MoE part that its planner expects with it."""

    chunks: int
    seconds: float


def makespan_s(part: MoEPart, degree: int, reduce_s: float = 0.0) -> float:
    """Return the MoE part's seconds in `degree` chunks with `reduce_s` of reductions between all-to-alls.

    It is the longest path through the three lanes, hence exact: the busy network between nodes, the two
    slower of three neighbours in a row, or the slowest of all.
    """
    a2a_s, ag_s, rs_s, experts_s = part.chunk_s(degree)
    once_s = 2 * a2a_s + ag_s + rs_s
    return max(
        2 * degree * a2a_s + reduce_s,
        once_s + (degree - 1) * (max(a2a_s, ag_s) + max(a2a_s, rs_s)),
        once_s + experts_s + (degree - 1) * max(a2a_s, ag_s, experts_s, rs_s),
    )


def idle_s(part: MoEPart, degree: int) -> float:
    """Return the idle seconds of the network between nodes inside the MoE part: reductions there are free."""
    return makespan_s(part, degree) - 2 * degree * part.a2a.chunk_s(degree)


def exact(part: MoEPart, reduce_s: float = 0.0, degrees: Sequence[int] = DEGREES) -> Degree:
    """Return the best of `degrees` by the exact formula; the smallest of equally good ones.

    Args:
        reduce_s: The seconds of reductions between the all-to-alls.
    """
    return smallest_best(degrees, lambda degree: makespan_s(part, degree, reduce_s))


Loaded = Sequence[tuple[MoEPart, float]]
"""Parts of several layers, each with its seconds of reductions."""


def total_s(parts: Loaded, degree: int) -> float:
    """Return the seconds of all parts with one degree."""
    return sum(makespan_s(part, degree, reduce_s) for part, reduce_s in parts)


def common_degree(parts: Loaded, degrees: Sequence[int] = DEGREES) -> Degree:
    """Return the best degree that all parts can share; its seconds are those of all parts."""
    return smallest_best(degrees, lambda degree: total_s(parts, degree))


def smallest_best(degrees: Sequence[int], seconds_of: Callable[[int], float]) -> Degree:
    """Return the first of the best degrees; ignore rounding, or a tie could give more chunks for nothing."""
    seconds = [seconds_of(degree) for degree in degrees]
    at_most_s = min(seconds) * (1 + ROUNDING)
    place = next(i for i, each in enumerate(seconds) if each <= at_most_s)
    return Degree(chunks=degrees[place], seconds=seconds[place])


# ---- the backward pass as a partition of gradients sees it: gaps in backward order, the highest layer
# first


@dataclass(frozen=True, kw_only=True)
class Made:
    """Gradients that a layer's backward pass leaves behind."""

    layer: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class GapLayer:
    """An MoE layer with all that follows it in the backward pass, up to the next one ("generalised layer").

    Attributes:
        layer: The layer of its MoE part.
        part: The MoE part, backward.
        dense_s: The computation after the MoE part, during which the network between nodes is idle.
        made: The gradients that exist when the next such layer begins.
    """

    layer: int
    part: MoEPart
    dense_s: float
    made: tuple[Made, ...]


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The backward pass for a partition.

    Attributes:
        gaps: The MoE layers, the highest first.
        all_reduce: The seconds of a sum of gradients, by its bytes.
        above: The gradients of blocks above the first MoE layer.
    """

    num_layers: int
    gaps: tuple[GapLayer, ...]
    all_reduce: AlphaBeta
    above: tuple[Made, ...] = ()
    degrees: tuple[int, ...] = DEGREES

    def degree(self, gap: GapLayer, reduce_s: float = 0.0) -> Degree:
        return exact(gap.part, reduce_s, self.degrees)
