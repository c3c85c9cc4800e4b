"""Factors of contention and of whole steps, recovered from steps that were made with known ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.cost.cluster_file import StepFit
from penstock.cost.contention import MOST_CONTENDED, Contention, Sighting, fit_contention, fit_steps
from penstock.cost.fit import KEPT, _not_negative, fit_line
from penstock.cost.measured import STOPPED, listed, scattered
from tests.support.draws import draws


def seen(
    truth: Contention, shares: list[float], *, noise: float = 0.0, hiccups: int = 0, seed: int = 0
) -> list[Sighting]:
    """Tasks of different lengths with these shares of contention; the first few were disturbed."""
    rng = np.random.default_rng(seed)
    ratios = [truth.ratio(share) * float(rng.normal(1.0, noise)) for share in shares]
    ratios[:hiccups] = [2.5 * ratio for ratio in ratios[:hiccups]]
    lengths = rng.uniform(1e-3, 2e-2, len(shares))
    return [
        Sighting(modelled_s=float(length), ratio=ratio, share=share)
        for length, ratio, share in zip(lengths, ratios, shares, strict=True)
    ]


@draws(10)
@given(
    st.floats(0.8, 1.4),
    st.floats(1.0, 2.0),
    st.integers(0, 1000),
    st.permutations([0.1 * n for n in range(11)] * 2),
)
def test_known_factors_are_found_among_scatter_and_hiccups(
    alone: float, beside: float, seed: int, shares: list[float]
) -> None:
    truth = Contention(solo=alone, contended=beside)
    exact = fit_contention(seen(truth, shares, seed=seed))
    assert exact is not None and exact.words == ""
    assert (exact.solo, exact.contended) == pytest.approx((alone, beside), rel=1e-3)
    rough = fit_contention(seen(truth, shares, noise=0.02, hiccups=2, seed=seed))
    assert rough is not None
    for share in (0.0, 0.5, 1.0):
        assert rough.ratio(share) == pytest.approx(truth.ratio(share), rel=0.12)


def test_alike_shares_leave_the_usual_factor() -> None:
    """Nobody can tell a slow task from one with contention; the time with that contention is right all the
    same."""
    truth = Contention(solo=1.1, contended=1.5)
    found = fit_contention(seen(truth, [0.9, 1.0, 0.95, 1.0, 0.9]), usual=1.2)
    assert found is not None and found.contended == 1.2
    assert found.ratio(0.95) == pytest.approx(truth.ratio(0.95), rel=0.03)


def test_factors_keep_their_bounds() -> None:
    shares = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    faster, slower = (fit_contention(seen(Contention(contended=beside), shares)) for beside in (0.7, 9.0))
    assert faster is not None and faster.contended == 1.0
    assert slower is not None and slower.contended == MOST_CONTENDED


def test_what_says_nothing_is_refused_in_words() -> None:
    assert fit_contention(seen(Contention(), [0.0, 0.5, 1.0])) is None, "three tasks are too few"
    shares = [0.1 * n for n in range(11)]
    slow = fit_contention(seen(Contention(solo=2.5), shares))
    wild = fit_contention([Sighting(modelled_s=1.0, ratio=ratio, share=0.5) for ratio in (0.4, 1.0, 2.5) * 3])
    assert wild is not None and "it differs by" in wild.words
    assert (
        slow is not None and slow.words == "it takes 2.50 times as long in real steps, too far off to be sure"
    )


def test_whole_steps_have_a_typical_ratio_and_an_interval() -> None:
    """A plan counts once, however many steps it has, and a hiccup does not widen anything."""
    calm = fit_steps([[1.10, 1.12, 1.11], [1.08, 1.10, 1.09, 1.09, 1.09], [1.13, 1.13, 1.13]])
    assert calm.ratio == pytest.approx(1.11) and calm.steps == 11
    assert 1.05 < calm.low < 1.08 and 1.13 < calm.high < 1.18
    hiccup = fit_steps([[1.10, 1.12, 1.11], [1.08, 1.10, 1.09, 1.09, 4.0], [1.13, 1.13, 1.13]])
    assert hiccup.high == pytest.approx(calm.high, rel=0.01)
    unlike = fit_steps([[0.9, 0.9, 0.9], [1.1, 1.1, 1.1], [1.0, 1.0, 1.0]])
    assert unlike.low < 0.9 and unlike.high > 1.1
    assert unlike.around(2.0) == pytest.approx((2.0 * unlike.low, 2.0 * unlike.high))


def test_a_ratio_outside_of_its_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not lie between low"):
        StepFit(ratio=1.2, low=0.9, high=1.1)


# ---- what measurements could not tell ----------------------------------------------------------------------


def test_kinds_that_differ_from_step_to_step_share_a_line() -> None:
    """On a busy machine there are a dozen of them; what is said for other reasons stays as it is."""
    differing = [
        scattered(what, Contention(scatter=share).words) for what, share in (("AT.F", 0.58), ("U.F", 0.73))
    ]
    far = scattered("X.B", Contention(solo=3.0).words)
    assert listed([*differing, far, STOPPED]) == (
        "not corrected by real steps, in which durations scatter: AT.F (58 %), U.F (73 %)",
        far,
        STOPPED,
    )
    assert listed([differing[0], STOPPED]) == (differing[0], STOPPED)
    assert listed([]) == ()


# ---- lines through durations -------------------------------------------------------------------------------


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
