"""Open models by name: their sizes are the published ones, and each has a plan."""

from __future__ import annotations

import json

import pytest

from penstock.cli import main
from penstock.plan.models import MODELS, open_models

BILLIONS = {
    "deepseek-v2": 236,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "ernie-4.5-21b-a3b": 21.8,
    "glm-4.5-air": 107,
    "gpt-oss-120b": 117,
    "gpt-oss-20b": 20.9,
    "granite-3.1-3b-a800m": 3.3,
    "llama-4-scout": 108,
    "mixtral-8x22b": 141,
    "mixtral-8x7b": 46.7,
    "olmoe-1b-7b": 6.92,
    "phi-3.5-moe": 41.9,
    "qwen3-235b-a22b": 235,
    "qwen3-30b-a3b": 30.5,
}
"""Parameters as published, in 1e9."""


def test_their_names_are_nobody_elses() -> None:
    assert open_models().keys() == BILLIONS.keys() and not open_models().keys() & MODELS.keys()


@pytest.mark.parametrize("name", BILLIONS)
def test_they_have_as_many_parameters_as_published(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    table = json.loads(open_models()[name].read_text())
    config = AutoConfig.for_model(table.pop("model_type"), **table)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert numbers / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "deepseek-v2-lite"])
def test_a_plan_says_what_comes_out(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", name, "--cluster", "2x8xH100,net=8x400gbit", "--budget", "0.01"]
    assert main([*words, "--zero-stage", "1", "--price", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    speed = plan["throughput"]
    assert speed["tokens_per_s"] == pytest.approx(16 * speed["tokens_per_s_per_device"])
    assert 0.01 < speed["utilisation_of_data_sheet"] < 0.6
    hours = 1e9 / speed["tokens_per_s"] / 3600
    assert speed["price_per_billion_tokens"] == pytest.approx(hours * 16 * 2)
    assert any("data sheet" in note for note in plan["notes"])


@pytest.mark.parametrize(
    "words", [["--layers", "4"], ["--nodes", "2"], ["--price", "-1"], ["--ep-size", "3"]]
)
def test_what_no_option_replaces_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--model", "olmoe-1b-7b", "--cluster", "2x8xH100,net=8x400gbit", *words]
    assert main(given) == 2
    assert words[0].removeprefix("--").replace("-", "_") in capsys.readouterr().err.replace("-", "_")
