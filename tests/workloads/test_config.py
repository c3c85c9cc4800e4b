"""Workloads by name: what is accepted, what is refused and how, what outputs say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from penstock.config import ConfigError, load, to_toml
from penstock.lab.virtual import VirtualConfig
from penstock.workloads import RoutingConfig
from tests.workloads.strategies import generated


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"routing": "recorded"}, "recorded = none: recorded routing needs the file of a run. Give its path"),
        ({"recorded": Path("r.jsonl")}, 'recorded = "r.jsonl": changes nothing with even routing. Leave it'),
        (
            {"drift": 0.1},
            "drift = 0.1: changes nothing with even routing. Leave it out, or set routing to",
        ),
        ({"routing": "zipf", "hot_share": 0.7}, "hot_share = 0.7: changes nothing with zipf routing. Leave"),
        ({"routing": "burst", "period": 3, "burst_steps": 4}, "burst_steps = 4: a burst cannot be longer th"),
        (
            {"routing": "recorded", "recorded": Path("r.jsonl"), "drift": 0.1},
            "drift = 0.1: changes nothing with recorded routing",
        ),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VirtualConfig(**settings)
    assert str(caught.value).startswith(message)
    assert caught.value.hint


@given(config=generated())
def test_a_file_holds_it(config: RoutingConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "virtual.toml"
    path.write_text(to_toml(config))
    assert load(RoutingConfig, path) == config


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "virtual devices, even routing"),
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
def test_what_outputs_say_begins_with_the_name(config: RoutingConfig) -> None:
    assert config.words.startswith(f"{config.routing} routing")
    assert replace(config, seed=config.seed + 1).words == config.words


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("hot_rank", RoutingConfig(routing="hot_rank")),
        ("gini=0.5,seed=3", RoutingConfig(routing="gini", gini=0.5, seed=3)),
        ("zipf,zipf_exponent=1.5,seed=3", RoutingConfig(routing="zipf", zipf_exponent=1.5, seed=3)),
    ],
)
def test_a_workload_in_a_word(text: str, config: RoutingConfig) -> None:
    assert RoutingConfig.parse(text) == config


def test_a_recorded_run_in_a_word(tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    path.write_text("")
    assert RoutingConfig.parse(str(path)) == RoutingConfig(routing="recorded", recorded=path)


@pytest.mark.parametrize(
    "text", ["", "zipf,1.5", "zipf,exponent=2", "no/such/file.jsonl", "even,drift=0.1", "gini=2"]
)
def test_words_that_are_no_workload_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        RoutingConfig.parse(text)
