"""Factors of contention and of whole steps, recovered from steps that were made with known ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.cost.cluster_file import StepFit
from penstock.cost.contention import MOST_CONTENDED, Contention, Sighting, fit_contention, fit_steps
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
