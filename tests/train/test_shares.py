"""Sizes that do not divide what they cut are refused, with the nearest valid one, before a process starts."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError, load
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.topology import ParallelConfig
from penstock.train.config import RunConfig
from penstock.train.shares import check_shares


@pytest.mark.parametrize(
    ("settings", "ranks", "key", "words"),
    [
        (["parallel.mp_size=8"], 8, "mp_size", r"model\.num_heads \(4\).* valid: 4; or model\.num_heads=8\."),
        (["parallel.mp_size=3"], 3, "mp_size", r"model\.num_heads \(4\).* Nearest valid: 1\."),
        (["parallel.mp_size=4", "model.vocab_size=258"], 4, "mp_size", r"valid: 2; or model\.vocab_size=256"),
        (["parallel.mp_size=4", "model.vocab_size=259"], 4, "mp_size", r"valid: 1; or model\.vocab_size=260"),
        (
            ["parallel.mp_size=4", "model.moe_layers=[0]", "model.ffn_hidden_size=6"],
            4,
            "mp_size",
            r"model\.ffn_hidden_size \(6\).* Nearest valid: 2; or model\.ffn_hidden_size=4\.",
        ),
        (["parallel.mp_size=4", "model.seq_len=3"], 4, "mp_size", r"seq_len = 3\. Nearest valid: 2\."),
        (
            ["parallel.esp_size=4", "moe.moe_ffn_hidden_size=6"],
            8,
            "esp_size",
            r"moe\.moe_ffn_hidden_size \(6\).* Nearest valid: 2; or moe\.moe_ffn_hidden_size=4\.",
        ),
    ],
)
def test_what_does_not_divide_is_refused(settings: list[str], ranks: int, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(RunConfig, None, settings).resolved(ranks)
    assert caught.value.key == f"parallel.{key}"


def test_what_is_not_there_is_not_cut() -> None:
    """The width of dense layers where all layers have experts."""
    check_shares(ModelConfig(ffn_hidden_size=6), MoEConfig(), ParallelConfig(mp_size=4, esp_size=4), 4)


def test_a_presets_sizes_count_and_not_the_defaults() -> None:
    config = RunConfig(model=ModelConfig(preset="BERT-Large-MoE"), parallel=ParallelConfig(mp_size=8))
    assert config.resolved(8).model.num_heads % 8 == 0
    with pytest.raises(ConfigError, match=r"model\.num_heads"):
        replace(config, model=ModelConfig(preset="BERT-Large-MoE", num_heads=2)).resolved(8)


@given(
    heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    vocab=st.integers(256, 300),
    width=st.integers(1, 24),
    mp=st.integers(1, 12),
    ranks=st.integers(1, 12),
)
def test_the_proposed_size_is_accepted(heads: int, vocab: int, width: int, mp: int, ranks: int) -> None:
    small = ModelConfig(num_layers=2, moe_layers=(0,), seq_len=5, hidden_size=24, head_dim=2)
    model = replace(small, num_heads=heads, vocab_size=vocab, ffn_hidden_size=width)
    fits = gcd(heads, vocab, width) % mp == 0 and mp <= 5
    try:
        check_shares(model, MoEConfig(), ParallelConfig(mp_size=mp), ranks)
    except ConfigError as error:
        assert not fits
        nearest = int(error.hint.removeprefix("Nearest valid: ").partition(";")[0].rstrip("."))
        check_shares(model, MoEConfig(), ParallelConfig(mp_size=nearest), ranks)
        assert ranks % nearest == 0
    else:
        assert fits
