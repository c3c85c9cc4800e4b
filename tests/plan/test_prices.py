"""Costs that are finite in the file and absurd in a step: one line that names the task, never a traceback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.config.bounds import types_of
from penstock.cost import ClusterConfig, ProfiledCluster
from penstock.plan import explain, find_plan, reasons
from tests.plan.problems import FILE, problem
from tests.support.draws import draws

RATES = (
    "flops_per_s",
    "memory_bytes_per_s",
    "link_latency_s",
    "link_bytes_per_s",
    "intra_latency_s",
    "intra_bytes_per_s",
    "task_overhead_s",
)


def rated(rates: Mapping[str, float]) -> ClusterConfig:
    """A cluster with rates that no file may have: what is fitted or scaled is not read."""
    made = ClusterConfig()
    for key, value in rates.items():
        object.__setattr__(made, key, value)
    return made


def on(rates: ClusterConfig) -> ProfiledCluster:
    return ProfiledCluster.build(replace(FILE, rates=rates))


@pytest.mark.parametrize(
    ("key", "value", "task"),
    [
        ("link_latency_s", 1e308, "L0.N.m0.F"),
        ("link_bytes_per_s", 1e-308, "L0.N.m0.F"),
        ("task_overhead_s", 1e300, "L0.EM.m0.F"),
        ("flops_per_s", 1e-300, "L0.AT.m0.F"),
        ("link_latency_s", 1e12, "L0.N.m0.F"),
    ],
)
def test_the_longest_task_is_named(key: str, value: float, task: str) -> None:
    each = problem(cluster=on(rated({key: value})))
    with pytest.raises(ConfigError, match="that is not realistic") as caught:
        find_plan(each)
    assert task in str(caught.value) and "cluster file" in str(caught.value)


def test_a_step_that_takes_no_time_is_refused() -> None:
    """Every rate as large as floats are: ratios of such times mean nothing."""
    fast = rated({key: 1e-300 if key.endswith("_s") and "per" not in key else 1e300 for key in RATES})
    with pytest.raises(ConfigError, match="that is not realistic"):
        find_plan(problem(cluster=on(fast)))


TYPES = types_of(ClusterConfig)
EXTREMES = [
    st.sampled_from((bounds.low, math.sqrt(bounds.low * bounds.high), bounds.high))
    for bounds in (get_args(TYPES[key])[1] for key in RATES)
]
"""The least and the largest that a file may say of each rate, and a number between them."""


@pytest.mark.slow
@draws(8)
@example((1e18, 1e18, 1e-12, 1e18, 1e-12, 1e18, 1e-12), True)
@given(st.tuples(*EXTREMES), st.booleans())
def test_any_rates_of_a_file_end_in_a_plan_or_in_a_line(values: tuple[float, ...], plain: bool) -> None:
    given: dict[str, Any] = dict(zip(RATES, values, strict=True))
    rates = ClusterConfig(**given)
    each = problem((True,), cluster=rates if plain else on(rates), dispatches=("flat", "hierarchical_2d"))
    try:
        found = find_plan(each, budget=0.01, effort="low")
        lines = (explain if plain else reasons)(each, found).lines  # the former plans again, several times
    except ConfigError as error:
        assert "cluster" in str(error)
        return
    assert 0 < found.best.predicted_s < math.inf
    assert not any(word in line for word, line in product((" nan", " inf "), lines))
