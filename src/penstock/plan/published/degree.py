"""How many chunks the MoE part of a layer is cut into: the published closed forms, and the exact one.

The MoE part of FSMoE (ASPLOS 2025), in R chunks on three lanes, with gradients reduced in between:

    inter    D1 .. DR   reduction   C1 .. CR
    intra    AG1 .. AGR   RS1 .. RSR
    compute  X1 .. XR

A chunk's durations are `alpha + linear / R`. Without legs inside the node (AG and RS of 0 seconds) this is
the pipeline of Tutel and PipeMoE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

DEGREES = tuple(range(1, 17))
"""What is tried unless a caller knows better."""

ROUNDING = 1e-12
START_DEGREE = 2.0
"""Where the solver begins; its guess is fixed, as in the published code."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A whole buffer moved or computed in chunks: a start-up for each, and what all of them share."""

    alpha_s: float = 0.0
    linear_s: float = 0.0

    def chunk_s(self, degree: float) -> float:
        """Seconds of one of `degree` equal chunks."""
        return self.alpha_s + self.linear_s / degree

    def times(self, factor: float) -> Linear:
        return Linear(alpha_s=self.alpha_s * factor, linear_s=self.linear_s * factor)


@dataclass(frozen=True, kw_only=True)
class MoEPart:
    """What the MoE part of one layer takes in one direction.

    a2a: between nodes, each of the two. ag, rs: inside the node, before and behind the experts.
    """

    a2a: Linear
    ag: Linear = Linear()
    rs: Linear = Linear()
    experts: Linear

    @property
    def backward(self) -> MoEPart:
        """The way back, if experts take twice as long: of both terms, not of the size in one of them too."""
        return replace(self, experts=self.experts.times(2))

    def chunk(self, degree: float) -> Chunk:
        return Chunk(
            degree,
            self.a2a.chunk_s(degree),
            self.ag.chunk_s(degree),
            self.rs.chunk_s(degree),
            self.experts.chunk_s(degree),
        )


@dataclass(frozen=True)
class Chunk:
    """Seconds of one of `degree` chunks."""

    degree: float
    a2a_s: float
    ag_s: float
    rs_s: float
    experts_s: float


@dataclass(frozen=True, kw_only=True)
class Degree:
    """A degree and the seconds of the MoE part that its planner expects of it."""

    chunks: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Forward and backward apart."""

    forward: Degree
    backward: Degree


def makespan_s(part: MoEPart, degree: int, reduce_s: float = 0.0) -> float:
    """Seconds of the MoE part in `degree` chunks with `reduce_s` of reductions between its all-to-alls.

    The longest path through the three lanes, hence exact: the busy network between nodes, the two slower of
    three neighbours in a row, or the slowest of all.
    """
    chunk = part.chunk(degree)
    a2a_s, ag_s, rs_s, experts_s = chunk.a2a_s, chunk.ag_s, chunk.rs_s, chunk.experts_s
    once_s = 2 * a2a_s + ag_s + rs_s
    return max(
        2 * degree * a2a_s + reduce_s,
        once_s + (degree - 1) * (max(a2a_s, ag_s) + max(a2a_s, rs_s)),
        once_s + experts_s + (degree - 1) * max(a2a_s, ag_s, experts_s, rs_s),
    )


def idle_s(part: MoEPart, degree: int) -> float:
    """Seconds for which the network between nodes rests inside the MoE part: reductions there are free."""
    return makespan_s(part, degree) - 2 * degree * part.a2a.chunk_s(degree)


def exact(part: MoEPart, reduce_s: float = 0.0, degrees: Sequence[int] = DEGREES) -> Degree:
    """The best of `degrees` by the exact formula; the smallest of equally good ones."""
    return _smallest_best(degrees, lambda degree: makespan_s(part, degree, reduce_s))


# ---- FSMoE's four cases ------------------------------------------------------------------------------------


def case_times(part: MoEPart, degree: float, reduce_s: float = 0.0) -> tuple[float, float, float, float]:
    """The closed forms of the four cases (Section 4 of the paper), by case less one.

    The busy resource is: network between nodes with reductions; experts; all-to-alls; network in the node.
    """
    chunk = part.chunk(degree)
    a2a_s, inside_s = chunk.a2a_s, chunk.ag_s + chunk.rs_s
    return (
        2 * degree * a2a_s + reduce_s,
        2 * a2a_s + inside_s + degree * chunk.experts_s,
        2 * degree * a2a_s + inside_s,
        2 * a2a_s + degree * inside_s,
    )


def case_slacks(part: MoEPart, degree: float, reduce_s: float = 0.0) -> tuple[float, float, float, float]:
    """By how many seconds each case's conditions hold; those of a case with a negative number do not.

    The published conditions Q4 to Q7 all say that reductions are longer than what the network between nodes
    has to spare, so one number stands for the four.
    """
    inter_s, experts_s, over_s = _margins(part, degree, reduce_s)
    return (
        over_s,
        min(experts_s, -over_s),
        min(inter_s, -experts_s, -over_s),
        min(-inter_s, -experts_s, -over_s),
    )


def closed_form_s(part: MoEPart, degree: float, reduce_s: float = 0.0) -> float:
    """What the paper expects: the time of the case whose conditions hold; at a tie they do not.

    It equals `makespan_s` where AG and RS take equally long, and is too short at times elsewhere.
    """
    inter_s, experts_s, over_s = _margins(part, degree, reduce_s)
    case = 0 if over_s > 0 else 1 if experts_s > 0 else 2 if inter_s > 0 else 3
    return case_times(part, degree, reduce_s)[case]


def _margins(part: MoEPart, degree: float, reduce_s: float) -> tuple[float, float, float]:
    """Left sides less right sides: of Q1; of Q2 or Q3; of that one of Q4 to Q7 that counts."""
    chunk = part.chunk(degree)
    a2a_s, inside_s, experts_s = chunk.a2a_s, chunk.ag_s + chunk.rs_s, degree * chunk.experts_s
    inter_margin_s = a2a_s - chunk.ag_s
    between_s = 2 * (degree - 1) * a2a_s
    experts_margin_s = experts_s - (between_s if inter_margin_s > 0 else (degree - 1) * inside_s)
    if experts_margin_s > 0:
        spare_s = experts_s - between_s + inside_s
    elif inter_margin_s > 0:
        spare_s = inside_s
    else:
        spare_s = degree * inside_s - between_s
    return inter_margin_s, experts_margin_s, reduce_s - spare_s


def fsmoe_cases(part: MoEPart, reduce_s: float = 0.0, degrees: Sequence[int] = DEGREES) -> Degree:
    """The published search: in each case the best real R >= 1 by SLSQP, and the least of the four.

    R is a whole number, so the better neighbour of the least one is taken, by the closed form (the published
    code rounds within powers of two instead). The seconds are those of the closed form, too.
    """
    from scipy.optimize import minimize

    unit_s = closed_form_s(part, 1, reduce_s) or 1.0  # the solver stops at absolute differences
    found: list[tuple[float, float]] = []
    for case in range(4):
        result = minimize(
            lambda r, case=case: case_times(part, r[0], reduce_s)[case] / unit_s,
            [min(START_DEGREE, degrees[-1])],
            method="SLSQP",
            bounds=[(1.0, float(max(degrees)))],
            constraints=[
                {"type": "ineq", "fun": lambda r, case=case: case_slacks(part, r[0], reduce_s)[case] / unit_s}
            ],
        )
        if result.success:
            found.append((float(result.fun), float(result.x[0])))
    real = min(found)[1] if found else 1.0  # all four can fail where conditions meet in a kink
    neighbours = {_nearest(degrees, math.floor(real)), _nearest(degrees, math.ceil(real))}
    return _smallest_best(sorted(neighbours), lambda degree: closed_form_s(part, degree, reduce_s))


def _nearest(degrees: Sequence[int], wanted: int) -> int:
    return min(degrees, key=lambda degree: abs(degree - wanted))


DegreePlanner = Callable[[MoEPart, float, Sequence[int]], Degree]
"""Of a part, the seconds of reductions in it and the allowed degrees."""

DEGREE_PLANNERS: dict[str, DegreePlanner] = {"exact": exact, "fsmoe_cases": fsmoe_cases}


def plan_degrees(
    forward: MoEPart,
    backward: MoEPart,
    reduce_s: float = 0.0,
    planner: str = "exact",
    degrees: Sequence[int] = DEGREES,
) -> Degrees:
    """Forward, where nothing is reduced, and backward apart."""
    plan = DEGREE_PLANNERS[planner]
    return Degrees(forward=plan(forward, 0.0, degrees), backward=plan(backward, reduce_s, degrees))


Loaded = Sequence[tuple[MoEPart, float]]
"""Parts of several layers, each with its seconds of reductions."""


def total_s(parts: Loaded, degree: int) -> float:
    """Seconds of all parts with one degree."""
    return sum(makespan_s(part, degree, reduce_s) for part, reduce_s in parts)


def common_degree(parts: Loaded, degrees: Sequence[int] = DEGREES) -> Degree:
    """The best degree that all parts can share; seconds: of all."""
    return _smallest_best(degrees, lambda degree: total_s(parts, degree))


def _smallest_best(degrees: Sequence[int], seconds_of: Callable[[int], float]) -> Degree:
    """The first of the best; rounding does not count, or a tie could end in more chunks for nothing."""
    seconds = [seconds_of(degree) for degree in degrees]
    at_most_s = min(seconds) * (1 + ROUNDING)
    place = next(i for i, each in enumerate(seconds) if each <= at_most_s)
    return Degree(chunks=degrees[place], seconds=seconds[place])
