"""Who goes where at the least total cost, when every place has so much room: two exact solvers by name.

`network_simplex` solves the transportation problem, I x C numbers for I goers and C places (POT's `ot.emd`).
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
from typing import Final, cast

import numpy as np

from penstock.placing.integers import Floats, Ints

Solver = Callable[[Floats, Ints], Ints]
"""Places [I] from costs [I, C] and room [C], which sums to I."""

MOST_PIVOTS: Final = 10**9
"""More than any problem takes; POT's own limit stops at 100,000, before thousands of samples are optimal."""
BACKENDS: Final = {
    "torch": "POT_BACKEND_DISABLE_PYTORCH",
    "jax": "POT_BACKEND_DISABLE_JAX",
    "cupy": "POT_BACKEND_DISABLE_CUPY",
    "tensorflow": "POT_BACKEND_DISABLE_TENSORFLOW",
}
"""Libraries that POT loads where it finds them, and what keeps it from that."""


def network_simplex(costs_IC: Floats, room_C: Ints) -> Ints:
    """Places by the network simplex method of POT."""
    plan_IC: Floats = _emd()(
        np.ones(len(costs_IC)),
        room_C.astype(np.float64),
        np.ascontiguousarray(costs_IC),
        numItermax=MOST_PIVOTS,
        check_marginals=False,
        center_dual=False,
    )
    places_I: Ints = plan_IC.argmax(axis=1)
    return places_I


def kuhn_munkres(costs_IC: Floats, room_C: Ints) -> Ints:
    """Places by SciPy's assignment solver, on a column for every goer that a place takes."""
    from scipy.optimize import linear_sum_assignment

    place_of_column: Ints = np.repeat(np.arange(len(room_C)), room_C)
    _, columns = linear_sum_assignment(costs_IC[:, place_of_column])
    places_I: Ints = place_of_column[columns]
    return places_I


SOLVERS: Final[dict[str, Solver]] = {"network_simplex": network_simplex, "kuhn_munkres": kuhn_munkres}


def find_solver(name: str) -> Solver:
    """A solver by its name. Raises ValueError for a name that none has."""
    if name not in SOLVERS:
        raise ValueError(f"no solver is called {name!r}; there are {', '.join(SOLVERS)}")
    return SOLVERS[name]


@cache
def prepare(name: str) -> None:
    """Load what a solver needs, which takes a second, so that the first step does not wait for it."""
    find_solver(name)(np.zeros((1, 1)), np.ones(1, np.int64))


@cache
def _emd() -> Callable[..., Floats]:
    with _without_backends():
        import ot
    return cast(Callable[..., Floats], ot.emd)


@contextmanager
def _without_backends() -> Iterator[None]:
    """Keep POT from loading tensor libraries that nobody has loaded: it is given numpy arrays alone."""
    added = [key for module, key in BACKENDS.items() if module not in sys.modules and key not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        yield
    finally:
        for key in added:
            del os.environ[key]
