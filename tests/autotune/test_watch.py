"""The watch over step times, and what it finds in the durations of tasks."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.autotune.watch import Drift, Watch
from penstock.plan.plan_config import DROPPED_STEPS

LASTING, THRESHOLD = 8, 0.15
LEARNED = DROPPED_STEPS + LASTING

step_times = st.floats(1e-3, 1e2)
factors = st.one_of(st.floats(1.2, 20.0), st.floats(0.05, 0.8))


def watch() -> Watch:
    return Watch(THRESHOLD, LASTING)


def alarms(times: Iterable[float]) -> dict[int, Drift]:
    """Every alarm by the number of the step that raised it, from 1."""
    over = watch()
    found = {number: over.note(seconds) for number, seconds in enumerate(times, 1)}
    return {number: drift for number, drift in found.items() if drift is not None}


@given(step_times, st.lists(st.floats(0.935, 1.065), min_size=LEARNED, max_size=80))
def test_noise_below_the_threshold_is_no_drift(usual_s: float, noise: list[float]) -> None:
    assert alarms(usual_s * factor for factor in noise) == {}


@given(step_times, factors, st.integers(0, 2**32 - 1), st.integers(LEARNED, 40))
def test_a_change_in_either_direction_is_one_alarm(
    usual_s: float, factor: float, seed: int, steady: int
) -> None:
    """Not before half of the steps that it must last, and not after all of them."""
    noise = random.Random(seed)
    times = [usual_s * noise.uniform(0.99, 1.01) * (factor if i >= steady else 1) for i in range(steady + 60)]
    found = alarms(times)
    assert len(found) == 1
    ((step, drift),) = found.items()
    if steady >= LEARNED + LASTING:
        assert LASTING / 2 < step - steady <= LASTING
    assert drift.before_s == pytest.approx(usual_s, rel=0.02)
    assert (drift.now_s > drift.before_s) == (factor > 1)


@given(step_times, factors, st.integers(1, LASTING // 2), st.integers(LEARNED + LASTING, 40))
def test_a_hiccup_is_no_drift(usual_s: float, factor: float, length: int, steady: int) -> None:
    times = [usual_s] * steady + [factor * usual_s] * length + [usual_s] * 40
    assert alarms(times) == {}


@given(step_times, factors)
def test_every_change_is_an_alarm(usual_s: float, factor: float) -> None:
    """There and back again: behind an alarm the new times are what is usual."""
    times = [usual_s] * 30 + [factor * usual_s] * 30 + [usual_s] * 30
    there, back = alarms(times).values()
    assert there.before_s == back.now_s == usual_s
    assert there.now_s == back.before_s == factor * usual_s


def test_the_first_steps_count_for_nothing() -> None:
    assert alarms([100.0] * DROPPED_STEPS + [1.0] * 60) == {}
    assert len(alarms([100.0] * (DROPPED_STEPS + LASTING) + [1.0] * 60)) == 1


def test_another_plan_is_learned_anew() -> None:
    over = watch()
    for _ in range(30):
        over.note(1.0)
    over.reset()
    assert [over.note(3.0) for _ in range(60)] == [None] * 60


def test_it_says_which_steps_are_the_reference() -> None:
    over, learned = watch(), []
    for _ in range(LEARNED + 5):
        learned.append(over.learning)
        over.note(1.0)
    assert learned == [False] * DROPPED_STEPS + [True] * LASTING + [False] * 5


@pytest.mark.parametrize(("factor", "heard"), [(1.16, True), (1.14, False), (0.86, True), (0.88, False)])
def test_the_threshold_is_a_ratio(factor: float, heard: bool) -> None:
    """1.15 times as long, or 1/1.15 = 0.870 times."""
    assert bool(alarms([1.0] * 30 + [factor] * 30)) is heard
