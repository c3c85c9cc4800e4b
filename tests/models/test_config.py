"""Section `[model]`: what it refuses, and with which way out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.models import ModelConfig


@pytest.mark.parametrize(
    ("settings", "key", "hint"),
    [
        ({"num_layers": 0}, "num_layers", "Nearest valid: 1."),
        ({"hidden_size": 0}, "hidden_size", "Nearest valid: 1."),
        ({"num_heads": 0}, "num_heads", "Nearest valid: 1."),
        ({"seq_len": 0}, "seq_len", "Nearest valid: 1."),
        ({"vocab_size": 0}, "vocab_size", "Nearest valid: 1."),
        ({"hidden_size": 128, "num_heads": 5}, "num_heads", "Nearest valid: 4;"),
        ({"hidden_size": 12, "num_heads": 20}, "num_heads", "Nearest valid: 6;"),
        ({"dropout": 1.0}, "dropout", "0"),
        ({"dropout": -0.1}, "dropout", "0"),
        ({"dropout": float("nan")}, "dropout", "0"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size", "Nearest valid: 1."),
        (
            {"num_heads": 6, "num_key_value_heads": 4, "head_dim": 8},
            "num_key_value_heads",
            "Nearest valid: 3",
        ),
        ({"head_dim": 7}, "head_dim", "Nearest valid: 8."),
        ({"rope_theta": 0.0}, "rope_theta", "Nearest valid: 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps", "0"),
        ({"moe_layers": ()}, "moe_layers", "Give some."),
        ({"num_layers": 3, "moe_layers": (0, 3)}, "moe_layers", "Nearest: 2."),
        ({"num_layers": 3, "moe_layers": (-1,)}, "moe_layers[0]", "Nearest valid: 0."),
    ],
)
def test_refuses_with_a_way_out(settings: dict[str, Any], key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**settings)
    assert caught.value.key == key
    assert hint in caught.value.hint


@given(st.integers(1, 64), st.integers(1, 80))
def test_the_nearest_number_of_heads_is_valid_and_near(hidden_size: int, num_heads: int) -> None:
    if hidden_size % (2 * num_heads) == 0:
        assert ModelConfig(hidden_size=hidden_size, num_heads=num_heads).num_heads == num_heads
        return
    with pytest.raises(ConfigError) as caught:
        ModelConfig(hidden_size=hidden_size, num_heads=num_heads)
    assert (
        ModelConfig(hidden_size=hidden_size, num_heads=num_heads, head_dim=6).attention_size == 6 * num_heads
    )
    if hidden_size % 2:
        assert caught.value.hint == "Set head_dim."
        return
    nearest = int(caught.value.hint.removeprefix("Nearest valid: ").partition(";")[0])
    assert ModelConfig(hidden_size=hidden_size, num_heads=nearest).num_heads == nearest
    distance = abs(nearest - num_heads)
    assert all(hidden_size % (2 * n) for n in range(max(1, num_heads - distance + 1), num_heads + distance))


def test_all_layers_are_moe_unless_some_are_named() -> None:
    assert [ModelConfig(num_layers=3).is_moe(layer) for layer in range(3)] == [True] * 3
    some = ModelConfig(num_layers=3, moe_layers=(1,))
    assert [some.is_moe(layer) for layer in range(3)] == [False, True, False]


def test_dense_layers_are_four_times_as_wide_by_default() -> None:
    assert ModelConfig(hidden_size=96).dense_hidden_size == 384
    assert ModelConfig(hidden_size=96, ffn_hidden_size=100).dense_hidden_size == 100
