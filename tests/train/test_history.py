"""What is kept of the steps of a run: little, and enough for its summary."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from statistics import fmean, median

import pytest

from penstock.train.history import TYPICAL, History
from penstock.train.metrics import StepMetrics
from tests.support.metrics import step as step_metrics


def test_first_last_and_skipped_steps() -> None:
    history = History()
    steps = [replace(step_metrics(n), loss=float(n), skipped=n in (1, 4) or None) for n in range(1, 5)]
    for each in steps:
        history.add(each)
    assert (history.first, history.last_applied, history.last) == (steps[1], steps[2], steps[3])
    assert history.skipped == 2


def test_medians_leave_the_first_steps_out_and_mean_layers() -> None:
    history = History()
    layers = [(1.0, 3.0), (5.0, 5.0), (2.0, 2.0), None, (1.0, 2.0), (4.0, 6.0)]
    for number, each in enumerate(layers):
        history.add(replace(step_metrics(number + 1), iteration_s=float(number), loads_in_common=each))
    assert history.typical("iteration_s") == median([2, 3, 4, 5])
    assert history.typical("loads_in_common") == median([2, fmean((1, 2)), 5])
    assert history.typical("rows_crossing_nodes") is None


def test_a_short_run_counts_all_its_steps() -> None:
    history = History()
    history.add(replace(step_metrics(1), iteration_s=3.0))
    assert history.typical("iteration_s") == 3.0


@pytest.mark.slow
def test_a_long_run_takes_some_bytes_per_step() -> None:
    """Steps of a model with 24 MoE layers; as they come from a step, each takes kilobytes."""

    def metrics(number: int) -> StepMetrics:
        layers = tuple(float(number + layer) for layer in range(24))
        return replace(step_metrics(number), loads_in_common=layers, rows_crossing_nodes=layers)

    history, steps = History(), 3000
    tracemalloc.start()
    try:
        for number in range(1, steps + 1):
            history.add(metrics(number))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 2 * 8 * len(TYPICAL) * steps
