"""FSMoE's own way to choose a degree: closed forms of four cases, and a solver for each.

`penstock.plan.published.degree` says what the symbols mean, and has the exact formula that takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.plan.published.degree import DEGREES, Degree, MoEPart, smallest_best

START_DEGREE = 2.0
"""Where the solver begins; its guess is fixed, as in the published code."""


def case_times(part: MoEPart, degree: float, reduce_s: float = 0.0) -> tuple[float, float, float, float]:
    """Return the closed forms of the four cases (Section 4 of the paper), by case less one.

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
    """Return by how many seconds each case's conditions hold; those of a case with a negative number do not.

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
    """Return what the paper expects: the time of the case whose conditions hold; at a tie they do not.

    It equals `makespan_s` where AG and RS take equally long, and is too short at times elsewhere.
    """
    inter_s, experts_s, over_s = _margins(part, degree, reduce_s)
    case = 0 if over_s > 0 else 1 if experts_s > 0 else 2 if inter_s > 0 else 3
    return case_times(part, degree, reduce_s)[case]


def _margins(part: MoEPart, degree: float, reduce_s: float) -> tuple[float, float, float]:
    """Return left sides less right sides: of Q1; of Q2 or Q3; of that one of Q4 to Q7 that counts."""
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
    """Search as published: in each case the best real R >= 1 by SLSQP, and the least of the four.

    R is a whole number, so the better neighbour of the least one is taken, by the closed form (the published
    code rounds within powers of two instead). The seconds are those of the closed form, too.
    """
    from scipy.optimize import minimize

    unit_s = closed_form_s(part, 1, reduce_s) or 1.0  # the solver stops at absolute differences
    optima: list[tuple[float, float]] = []
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
            optima.append((float(result.fun), float(result.x[0])))
    real = min(optima)[1] if optima else 1.0  # all four can fail where conditions meet in a kink
    neighbours = {_nearest(degrees, math.floor(real)), _nearest(degrees, math.ceil(real))}
    return smallest_best(sorted(neighbours), lambda degree: closed_form_s(part, degree, reduce_s))


def _nearest(degrees: Sequence[int], wanted: int) -> int:
    return min(degrees, key=lambda degree: abs(degree - wanted))
