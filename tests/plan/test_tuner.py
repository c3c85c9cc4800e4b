"""Tuners of the all-reduce chunk size, on functions whose minimum is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.tuner import LEAST_BYTES, MOST_CHUNKS, Sample, SizeRange, Tuner, TunerName, build_tuner
from tests.support.draws import draws

NAMES: tuple[TunerName, ...] = ("bayesian", "grid", "random")
SIZES = SizeRange(least_bytes=1 << 17, most_bytes=1 << 24)
SAMPLES = 8
EACH = [pytest.param("bayesian", marks=pytest.mark.slow), "grid", "random"]

byte_counts = st.integers(1, 1 << 32)
StepTime = Callable[[int], float]


def bumpy(size_bytes: int) -> float:
    """Start-ups of small chunks, waiting behind large ones, and a bump between two minima."""
    place = SIZES.place(size_bytes)
    return 1 + 0.5 * (place - 0.7) ** 2 + 0.08 * math.cos(4 * math.pi * place)


def tuned(
    name: TunerName, step_s: StepTime, *, start: int = 1 << 20, seed: int = 0
) -> tuple[Tuner, list[int]]:
    tuner = build_tuner(name, start_bytes=start, sizes=SIZES, samples=SAMPLES, seed=seed)
    asked = []
    for _ in range(SAMPLES):
        asked.append(tuner.ask())
        tuner.tell(asked[-1], step_s(asked[-1]))
    return tuner, asked


def least(step_s: StepTime) -> float:
    return min(step_s(SIZES.at(i / 1000)) for i in range(1001))


# ---- the range ---------------------------------------------------------------------------------------------


@given(st.lists(byte_counts, min_size=1, max_size=5).map(tuple))
def test_a_range_cuts_no_layer_into_too_many_pieces(layers: tuple[int, ...]) -> None:
    sizes = SizeRange.of(layers)
    assert LEAST_BYTES <= sizes.least_bytes <= sizes.most_bytes
    assert sizes.most_bytes >= max(layers)
    assert all(-(-layer // sizes.least_bytes) <= MOST_CHUNKS for layer in layers)


@given(st.lists(byte_counts, min_size=1, max_size=5).map(tuple), st.floats(0, 1), byte_counts)
def test_places_and_sizes(layers: tuple[int, ...], place: float, size: int) -> None:
    sizes = SizeRange.of(layers)
    assert sizes.least_bytes <= sizes.at(place) <= sizes.most_bytes
    assert 0 <= sizes.place(size) <= 1
    back = sizes.at(sizes.place(size))
    assert abs(back - sizes.clamp(size)) <= 512 + 1e-6 * back  # rounded to 1 KiB


def test_a_model_without_gradients_to_reduce_has_one_size() -> None:
    sizes = SizeRange.of((0, 0))
    assert sizes.least_bytes == sizes.most_bytes == sizes.at(0.3) == LEAST_BYTES
    assert sizes.place(1 << 20) == 0


# ---- every tuner -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
@draws(8)
@given(start=byte_counts)
def test_the_first_size_is_the_start(name: TunerName, start: int) -> None:
    tuner = build_tuner(name, start_bytes=start, sizes=SIZES, samples=SAMPLES)
    assert tuner.ask() == tuner.ask() == SIZES.clamp(start)


@pytest.mark.parametrize("name", EACH)
def test_the_same_seed_asks_for_the_same_whole_numbers_in_the_range(name: TunerName) -> None:
    (tuner, asked), (_, again) = (tuned(name, bumpy, seed=3) for _ in range(2))
    assert asked == again
    assert all(type(size) is int for size in asked)
    assert all(SIZES.least_bytes <= size <= SIZES.most_bytes for size in asked)
    assert tuner.best.size_bytes in asked and tuner.best.seconds == bumpy(tuner.best.size_bytes)


def test_another_seed_asks_for_other_random_sizes() -> None:
    assert tuned("random", bumpy, seed=3)[1] != tuned("random", bumpy, seed=4)[1]


@pytest.mark.slow
def test_one_sample_is_the_best_there_is() -> None:
    for name in NAMES:
        tuner = build_tuner(name, start_bytes=1 << 20, sizes=SIZES, samples=SAMPLES)
        tuner.tell(1 << 20, 0.5)
        assert tuner.best == Sample(size_bytes=1 << 20, seconds=0.5)


def test_more_samples_than_agreed_begin_again() -> None:
    tuner = build_tuner("grid", start_bytes=1 << 20, sizes=SIZES, samples=3)
    asked = []
    for _ in range(5):
        asked.append(tuner.ask())
        tuner.tell(asked[-1], 1.0)
    assert asked[3:] == asked[:2]


@pytest.mark.parametrize("name", EACH)
def test_a_range_of_one_size(name: TunerName) -> None:
    sizes = SizeRange(least_bytes=4096, most_bytes=4096)
    tuner = build_tuner(name, start_bytes=1 << 20, sizes=sizes, samples=4)
    for _ in range(4):
        assert tuner.ask() == 4096
        tuner.tell(4096, 1.0)


# ---- how good they are -------------------------------------------------------------------------------------


def test_a_grid_covers_the_range() -> None:
    _, asked = tuned("grid", bumpy)
    places = sorted(SIZES.place(size) for size in asked[1:])
    steps = [b - a for a, b in pairwise(places)]
    assert places[0] < 0.1 and places[-1] > 0.9 and max(steps) < 1.1 * min(steps)


@pytest.mark.slow
@pytest.mark.parametrize("start", [pytest.param(1 << 17, marks=pytest.mark.slow), 1 << 20, 1 << 24])
def test_a_bayesian_tuner_finds_the_better_of_two_minima(start: int) -> None:
    """Also from the far end; the other minimum is 10 % slower, and a grid is no better by 3 %."""
    found = tuned("bayesian", bumpy, start=start)[0].best.seconds
    assert found <= 1.03 * tuned("grid", bumpy, start=start)[0].best.seconds
    assert found <= 1.03 * least(bumpy)


@pytest.mark.soak
def test_a_bayesian_tuner_on_random_valleys() -> None:
    """Every valley within 3 % of its bottom, on average nearer than random search comes."""
    regret: dict[TunerName, list[float]] = {"bayesian": [], "random": []}
    for seed in range(5):
        bottom = random.Random(100 + seed).random()

        def valley(size: int, bottom: float = bottom) -> float:
            return 1 + 0.6 * (SIZES.place(size) - bottom) ** 2

        for name, lost in regret.items():
            lost.append(tuned(name, valley, seed=seed)[0].best.seconds - 1)
    assert max(regret["bayesian"]) < 0.03
    assert sum(regret["bayesian"]) <= sum(regret["random"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3))])
def test_noise_does_not_lead_it_far_away(seed: int) -> None:
    """3 % of noise on a valley of 25 %: the true time of what it keeps is within 5 % of the best."""
    noise = random.Random(seed)

    def noisy(size: int) -> float:
        return valley(size) * noise.gauss(1, 0.03)

    def valley(size: int) -> float:
        return 1 + 0.5 * (SIZES.place(size) - 0.3) ** 2

    best = tuned("bayesian", noisy, start=SIZES.most_bytes, seed=seed)[0].best
    assert valley(best.size_bytes) <= 1.05
