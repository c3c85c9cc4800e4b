"""Lines through durations: exact ones are found, wrong points do not bend them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost.fit import KEPT, _not_negative, fit_line

SIZES = [float(1 << power) for power in range(12, 25)]


def line(alpha_s: float, beta: float, sizes: list[float] = SIZES) -> list[tuple[float, float]]:
    return [(size, alpha_s + beta * size) for size in sizes]


@given(
    st.lists(st.tuples(st.floats(1e-3, 1), st.floats(1e-3, 1), st.floats(1e-3, 1)), min_size=2, max_size=9)
)
def test_two_unknowns_are_those_of_scipy(rows: list[tuple[float, float, float]]) -> None:
    from scipy.optimize import nnls  # here alone, as it takes a second to load

    matrix, values = np.array(rows)[:, :2], np.array(rows)[:, 2]
    expected, distance = nnls(matrix, values)
    found = np.array(_not_negative(matrix, values))
    assert found.min() >= 0
    assert float(np.linalg.norm(matrix @ found - values)) == pytest.approx(distance, rel=1e-6, abs=1e-9)
    if np.linalg.cond(matrix) < 1e4:
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.floats(0, 1e-2), st.floats(1e-10, 1e-6), st.integers(2, len(SIZES)))
def test_a_line_without_noise_is_found(alpha_s: float, beta: float, count: int) -> None:
    points = line(alpha_s, beta, SIZES[-count:])
    found = fit_line(points)
    for size, seconds in points:
        assert found.seconds(size) == pytest.approx(seconds, rel=1e-5)
    assert all(found.used) and found.residual < 1e-5
    assert found.r2 == pytest.approx(1.0, abs=1e-6)


@given(
    st.floats(0, 1e-3),
    st.floats(1e-9, 1e-7),
    st.sets(st.integers(0, len(SIZES) - 1), min_size=1, max_size=len(SIZES) // 5),
    st.floats(2, 30),
    st.booleans(),
)
def test_a_fifth_of_the_points_may_be_wrong(
    alpha_s: float, beta: float, wrong: set[int], factor: float, too_short: bool
) -> None:
    right = line(alpha_s, beta)
    factor = 1 / factor if too_short else factor
    points = [(size, t * factor) if i in wrong else (size, t) for i, (size, t) in enumerate(right)]
    found = fit_line(points)
    for size, seconds in right:
        assert found.seconds(size) == pytest.approx(seconds, rel=1e-4)
    assert found.used == tuple(i not in wrong for i in range(len(points)))


@given(st.integers(0, 2**32 - 1), st.floats(0, 1e-3), st.floats(1e-9, 1e-7))
def test_noise_is_averaged_out(seed: int, alpha_s: float, beta: float) -> None:
    scatter = np.random.default_rng(seed).normal(1, 0.02, len(SIZES))
    noisy = [(size, t * float(s)) for (size, t), s in zip(line(alpha_s, beta), scatter, strict=True)]
    found = fit_line(noisy)
    assert found.seconds(SIZES[-1]) == pytest.approx(alpha_s + beta * SIZES[-1], rel=0.1)
    assert sum(found.used) >= KEPT * len(SIZES)
    assert found.residual < 0.2 and 0.9 < found.r2 <= 1


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-7, 10)), min_size=1, max_size=20))
def test_any_durations_give_a_line_that_rises(points: list[tuple[float, float]]) -> None:
    found = fit_line(points)
    assert found.alpha_s >= 0 and found.beta > 0
    assert np.isfinite([found.alpha_s, found.beta, found.r2, found.residual]).all()
    assert 0 <= found.r2 <= 1 and len(found.used) == len(points) and any(found.used)


def test_trusted_sizes_are_never_outliers_of_many_small_ones() -> None:
    """As measured beside other programs: small exchanges were held up, and large ones tell the rate."""
    points = [(2.0**12, 4e-3), (2.0**14, 3.1e-3), (2.0**16, 3.3e-3), (2.0**18, 4e-3), (2.0**20, 10.7e-3)]
    points.append((2.0**22, 43.3e-3))
    assert not fit_line(points).used[-1]
    found = fit_line(points, trusted=2)
    assert found.used[-2:] == (True, True)
    assert found.seconds(2.0**22) == pytest.approx(43.3e-3, rel=0.1)


def test_what_does_not_grow_stays_flat() -> None:
    found = fit_line([(1e6, 2e-3), (2e6, 2.1e-3), (3e6, 1.9e-3)])
    for size in (1e6, 2e6, 3e6):
        assert found.seconds(size) == pytest.approx(2e-3, rel=0.06)


def test_one_size_alone_is_a_rate() -> None:
    found = fit_line([(1000.0, 2e-3), (1000.0, 4e-3), (1000.0, 3e-3)])
    assert found.alpha_s == 0 and found.beta == pytest.approx(3e-6)
