"""Section [virtual]: what is accepted, what is refused and how, what outputs say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from penstock.config import ConfigError, load, to_toml
from penstock.virtual import VirtualConfig
from tests.virtual.strategies import generated


def test_the_default_is_uniform_and_still() -> None:
    config = VirtualConfig()
    assert (config.routing, config.drift, config.change_at) == ("uniform", 0.0, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zipf_exponent": -0.1}, "zipf_exponent = -0.1: must be from 0 to 10 (0 is uniform"),
        ({"zipf_exponent": math.nan}, "zipf_exponent = nan: must be from 0 to 10"),
        ({"dirichlet_concentration": 0.0}, "dirichlet_concentration = 0.0: must be from 0.001 to 1e+06 ("),
        ({"routing": "zipf", "drift": 1.5}, "drift = 1.5: must be from 0 to 1"),
        (
            {"routing": "zipf", "change_at": 0},
            "change_at = 0: must be from 1 to 99999999 (steps",
        ),
        ({"seed": -1}, "seed = -1: must be from 0 to 9223372036854775807"),
        ({"routing": "recorded"}, "recorded = none: recorded routing needs the file of a run. Give its path"),
        ({"recorded": Path("r.jsonl")}, 'recorded = "r.jsonl": is read with recorded routing only, and rout'),
        ({"drift": 0.1}, "drift = 0.1: uniform routing has no preferences that could move"),
        ({"change_at": 3}, "change_at = 3: uniform routing has no preferences that could move"),
        (
            {"routing": "recorded", "recorded": Path("r.jsonl"), "drift": 0.1},
            "drift = 0.1: recorded routing has no preferences that could move",
        ),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VirtualConfig(**settings)
    assert str(caught.value).startswith(message)
    assert caught.value.hint


def test_another_routing_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="must be one of uniform, zipf, dirichlet, recorded"):
        load(VirtualConfig, None, ["routing=pareto"])


@given(config=generated())
def test_a_file_holds_it(config: VirtualConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "virtual.toml"
    path.write_text(to_toml(config))
    assert load(VirtualConfig, path) == config


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "virtual devices, uniform routing"),
        ({"routing": "zipf"}, "virtual devices, zipf routing (exponent 1)"),
        (
            {"routing": "dirichlet", "drift": 0.01, "change_at": 50},
            "virtual devices, dirichlet routing (concentration 0.3, drift 0.01 per step, redrawn at step 50)",
        ),
        (
            {"routing": "recorded", "recorded": Path("run/r.jsonl")},
            "virtual devices, recorded routing (run/r.jsonl)",
        ),
    ],
)
def test_outputs_say_what_is_virtual(settings: dict[str, Any], label: str) -> None:
    assert VirtualConfig(**settings).label == label


@given(generated())
def test_every_label_says_virtual(config: VirtualConfig) -> None:
    assert config.label.startswith(f"virtual devices, {config.routing} routing")
    assert replace(config, seed=config.seed + 1).label == config.label
