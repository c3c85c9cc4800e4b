"""Both solvers against brute force, ties and room of zero included."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.features.sample_placement import assign as transport
from penstock.features.sample_placement.assign import SOLVERS, find_solver
from penstock.routing.sizes import Floats, Ints


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, Ints]:
    """Costs [I, C] with many ties, and room [C]."""
    room = np.array(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any)))
    numbers = st.lists(
        st.integers(0, 4), min_size=int(room.sum()) * len(room), max_size=int(room.sum()) * len(room)
    )
    return np.array(draw(numbers), np.float64).reshape(-1, len(room)), room


def cost(costs: Floats, places: Ints) -> float:
    return float(costs[np.arange(len(places)), places].sum())


@pytest.mark.parametrize("name", SOLVERS)
@given(problem=problems())
def test_no_arrangement_is_cheaper(name: str, problem: tuple[Floats, Ints]) -> None:
    costs, room = problem
    goers = np.repeat(np.arange(len(room)), room)
    places = find_solver(name)(costs, room)
    assert np.bincount(places, minlength=len(room)).tolist() == room.tolist()
    assert cost(costs, places) == min(
        cost(costs, np.array(other)) for other in set(itertools.permutations(goers.tolist()))
    )


def test_they_agree_on_large_costs() -> None:
    """Costs as large as those of 4,096 samples of 4,096 tokens, where rounding would show."""
    rng = np.random.default_rng(0)
    room = np.array([40, 0, 30, 50])
    costs = rng.integers(0, 1 << 45, (120, 4)).astype(np.float64)
    first, second = (cost(costs, solve(costs, room)) for solve in SOLVERS.values())
    assert first == second


def test_guessed_prices_change_nothing_but_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for thousands of samples, on problems small enough to solve the other way."""
    monkeypatch.setattr(transport, "MANY", 0)
    rng = np.random.default_rng(0)
    for most in (2, 50, 1 << 20):
        room = np.array([30, 0, 50, 20])
        costs = rng.integers(0, most, (100, 4)).astype(np.float64)
        places = find_solver("network_simplex")(costs, room)
        assert np.bincount(places, minlength=4).tolist() == room.tolist()
        assert cost(costs, places) == cost(costs, find_solver("kuhn_munkres")(costs, room))


def test_an_unknown_solver_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"no solver is called 'greedy'; there are network_simplex, kuhn_munkres"
    ):
        find_solver("greedy")
