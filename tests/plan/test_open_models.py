"""Open models by name: their sizes are the published ones, and each has a plan."""

from __future__ import annotations

import json

import pytest

from penstock.cli import main
from penstock.cost.model_flops import PASSES, ModelFlops
from penstock.decision import GradientBytes
from penstock.families.sections import described_in, gradient_bytes_of
from penstock.plan.models import MODELS, open_models
from penstock.step import StepShape
from penstock.topology import Layout

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


def mean_keys(seq_len: int, window: int) -> float:
    """Keys of a causal token with a window, by counting them; less the half of one that is itself."""
    return sum(min(token, window) for token in range(1, seq_len + 1)) / seq_len - 0.5


SWIGLU, KEYS = 3, 4096 / 2
FORWARD = {
    # Attention's matrices, router, experts and shared ones; scores of 192 + 128 numbers for a key and head.
    "deepseek-v3": 61 * 2 * (7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168)
    + 61 * 2 * 128 * (192 + 128) * KEYS
    + 58 * 2 * (7168 * 256 + (8 + 1) * SWIGLU * 7168 * 2048)
    + 3 * 2 * SWIGLU * 7168 * 18432
    + 2 * 7168 * 129280,
    "gpt-oss-20b": 24 * 2 * (2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64 + 2880 * 32 + 4 * SWIGLU * 2880 * 2880)
    + 12 * 4 * 64 * 64 * (KEYS + mean_keys(4096, 128))
    + 2 * 2880 * 201088,
    "llama-4-scout": 48 * 2 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 5120 * 16 + 2 * SWIGLU * 5120 * 8192)
    + 48 * 4 * 5120 * KEYS  # whole chunks
    + 2 * 5120 * 202048,
    "glm-4.5-air": 46 * 2 * (2 * 4096 * 96 * 128 + 2 * 4096 * 8 * 128)
    + 46 * 4 * 96 * 128 * KEYS
    + 45 * 2 * (4096 * 128 + (8 + 1) * SWIGLU * 4096 * 1408)
    + 2 * SWIGLU * 4096 * 10944
    + 2 * 4096 * 151552,
}
"""Operations of a token in a forward pass of 4096 tokens, counted by hand from the published sizes."""


@pytest.mark.parametrize("name", BILLIONS)
def test_they_have_the_published_parameters_and_operations(name: str) -> None:
    found = described_in(open_models()[name])
    numbers = sum(parameter.numel() for parameter in found.model.parameters())
    assert numbers / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    if name in FORWARD:
        sizes = GradientBytes((0,), (0,), (0,))
        work = found.sizes.workload(Layout(world_size=1, ep_size=1, rank=0), sizes, 1, 4096)
        flops = ModelFlops.of(work, [block is not None for block in found.blocks], None)
        assert flops.per_token / PASSES == pytest.approx(FORWARD[name], rel=1e-3)


def test_a_run_of_them_has_float32_weights_whatever_the_file_says() -> None:
    name = "olmoe-1b-7b"
    layout, shape = Layout(world_size=1, ep_size=1, rank=0), StepShape(moe_layers=(True,) * 16)
    found = gradient_bytes_of(open_models()[name], layout, shape, edp=True)
    assert sum(map(sum, found.by_kind.values())) == pytest.approx(4e9 * BILLIONS[name], rel=0.01)


@pytest.mark.parametrize("name", ["olmoe-1b-7b", pytest.param("deepseek-v2-lite", marks=pytest.mark.soak)])
@pytest.mark.slow
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


@pytest.mark.slow
def test_near_its_bound_a_plan_also_says_how_little_of_the_devices_is_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--model", "olmoe-1b-7b", "--cluster", "4x8xA100-80GB,net=10gbit", "--budget", "0.01"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    speed, a100_flops_per_s = plan["throughput"], 312e12
    used = speed["flops_per_s_per_device"] / a100_flops_per_s
    assert speed["utilisation_of_data_sheet"] == pytest.approx(used)
    assert used < 0.1 and plan["lower_bound_s"] / plan["predicted_s"] > 0.9
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "efficiency" in shown and "MFU" in shown
