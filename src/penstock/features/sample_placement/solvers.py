"""Assignment at the least total cost to places of limited room: two exact solvers by name.

`network_simplex` solves the transportation problem, I x C numbers for I goers and C places (POT's solver).
`kuhn_munkres` repeats every place once for each goer that it takes and solves the I x I assignment (NetMoE,
Eq 10), which is what the paper does and takes far longer. Both have integral optima and no randomness. Costs
are integers small enough to be exact in float64, so the same input gives the same places in every process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, cast

import numpy as np

from penstock.routing.integers import Floats, Ints

Solver = Callable[[Floats, Ints], Ints]
"""Places [I] from costs [I, C] and room [C], which sums to I."""

MOST_PIVOTS: Final = 10**9
"""More than any problem takes; POT's own limit stops at 100,000, before thousands of samples are optimal."""
OPTIMAL: Final = 1
"""POT's code of a plan that cannot be improved."""
BACKENDS: Final = {
    "torch": "POT_BACKEND_DISABLE_PYTORCH",
    "jax": "POT_BACKEND_DISABLE_JAX",
    "cupy": "POT_BACKEND_DISABLE_CUPY",
    "tensorflow": "POT_BACKEND_DISABLE_TENSORFLOW",
}
"""Libraries that POT loads where it finds them, and the variable that prevents it."""


MANY: Final = 1 << 16
"""The number of costs from which guessing prices saves more time than it takes."""


def network_simplex(costs_IC: Floats, room_C: Ints) -> Ints:
    """Return places by POT's network simplex; with many costs, started from guessed prices of places."""
    prices_C = guessed_prices(costs_IC, room_C) if costs_IC.size >= MANY else None
    start = None if prices_C is None else ((costs_IC + prices_C).min(axis=1), -prices_C)
    alpha_I, beta_C = (None, None) if start is None else start
    room = np.ascontiguousarray(room_C, np.float64)
    plan_IC, *_, code = _emd()(
        np.ones(len(costs_IC)), room, np.ascontiguousarray(costs_IC), MOST_PIVOTS, 1, alpha_I, beta_C
    )
    assert code == OPTIMAL, f"POT's network simplex ends with code {code}"
    places_I: Ints = plan_IC.argmax(axis=1)
    return places_I


def guessed_prices(costs_IC: Floats, room_C: Ints, rounds: int = 20) -> Floats:
    """Return prices of places [C] at which about as many goers find a place the cheapest as it has room for.

    Places that too many choose become dearer, in ever smaller steps. Prices are integers, as the costs are.
    """
    prices_C = np.zeros(len(room_C), np.int64)
    step = int(np.ptp(costs_IC, axis=1).sum()) // (2 * len(costs_IC))
    for _ in range(rounds):
        chosen_I = (costs_IC + prices_C).argmin(axis=1)
        above_C = np.bincount(chosen_I, minlength=len(room_C)) - room_C
        prices_C += step * above_C // np.maximum(room_C, 1)
        step = step * 4 // 5
    return prices_C.astype(np.float64)


def kuhn_munkres(costs_IC: Floats, room_C: Ints) -> Ints:
    """Return places by SciPy's assignment solver, with one column for every goer that a place takes."""
    from scipy.optimize import linear_sum_assignment

    place_of_column: Ints = np.repeat(np.arange(len(room_C)), room_C)
    _, columns = linear_sum_assignment(costs_IC[:, place_of_column])
    places_I: Ints = place_of_column[columns]
    return places_I


SOLVERS: Final[dict[str, Solver]] = {"network_simplex": network_simplex, "kuhn_munkres": kuhn_munkres}


def find_solver(name: str) -> Solver:
    """Return a solver by its name. Raises ValueError for an unknown name."""
    if name not in SOLVERS:
        raise ValueError(f"no solver is called {name!r}; there are {', '.join(SOLVERS)}")
    return SOLVERS[name]


@cache
def prepare(name: str) -> None:
    """Load what a solver needs, which takes a second, so that the first step does not wait for it."""
    find_solver(name)(np.zeros((1, 1)), np.ones(1, np.int64))


@cache
def _emd() -> Callable[..., Any]:
    """Return the function below `ot.emd`, without checks that take three times as long as a small problem."""
    with _without_backends():
        from ot.lp.emd_wrap import emd_c
    return cast(Callable[..., Any], emd_c)


@contextmanager
def _without_backends() -> Iterator[None]:
    """Keep POT from importing tensor libraries that are not loaded yet: it gets numpy arrays alone."""
    added = [key for module, key in BACKENDS.items() if module not in sys.modules and key not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]
