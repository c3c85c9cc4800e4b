"""The decoder is a Qwen3-MoE of transformers: by its configuration, its weights and what it computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, Qwen3MoeConfig

from penstock.adapt.trained import as_qwen3_moe
from penstock.config import ConfigError
from penstock.models import ModelConfig, MoEDecoder
from penstock.models.qwen3_moe import LACKS, config_json, lack_of, sections_of
from penstock.moe import MoEConfig
from penstock.train.run_state import DecoderNaming
from tests.support.draws import draws

SMALL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_len=12, vocab_size=29)
MOE = MoEConfig(num_experts=4, top_k=2, moe_ffn_hidden_size=8)
MODELS: dict[str, tuple[ModelConfig, MoEConfig]] = {
    "as it is": (SMALL, MOE),
    "grouped queries": (replace(SMALL, num_key_value_heads=2, head_dim=6), MOE),
    "dense layers, tied": (
        replace(SMALL, num_layers=3, moe_layers=(1,), ffn_hidden_size=24, tie_word_embeddings=True),
        MOE,
    ),
    "raw weights": (replace(SMALL, rope_theta=1e6, rms_norm_eps=1e-3), replace(MOE, norm_topk_prob=False)),
    "one choice": (SMALL, replace(MOE, top_k=1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same(name: str) -> None:
    """With a cache as without; it reads `config.json` alone."""
    model, moe = MODELS[name]
    decoder = MoEDecoder(model, moe).eval()
    decoder.initialise(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(6.0 if parameter.dim() >= 2 else torch.linspace(0.7, 1.3, parameter.numel()))
    theirs = as_qwen3_moe(
        model, moe, {name: tensor for name, tensor, _ in DecoderNaming(decoder).in_files()}
    ).eval()
    tokens_BL = torch.randint(29, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours_BLV, theirs_BLV = decoder(tokens_BL), theirs(tokens_BL).logits
        torch.testing.assert_close(ours_BLV, theirs_BLV, rtol=1e-4, atol=1e-5)
        assert ours_BLV.std() > 0.1
        likeliest = {"max_new_tokens": 5, "do_sample": False}
        told = [theirs.generate(tokens_BL[:1, :4], use_cache=cache, **likeliest) for cache in (True, False)]
    assert torch.equal(*told)


@st.composite
def described(draw: st.DrawFn) -> tuple[ModelConfig, MoEConfig]:
    heads, layers = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 5))
    moe_layers = draw(st.sets(st.integers(0, layers - 1), min_size=1))
    model = ModelConfig(
        num_layers=layers,
        hidden_size=8 * draw(st.integers(1, 9)),
        num_heads=heads,
        num_key_value_heads=draw(st.sampled_from([None, 1, heads])),
        head_dim=draw(st.sampled_from([None, 2, 64])),
        vocab_size=draw(st.integers(1, 99)),
        moe_layers=draw(st.sampled_from([None, tuple(sorted(moe_layers))])),
        ffn_hidden_size=draw(st.sampled_from([None, 24])),
        rope_theta=draw(st.sampled_from([1e4, 5e6])),
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        tie_word_embeddings=draw(st.booleans()),
    )
    experts = draw(st.integers(1, 9))
    moe = MoEConfig(
        num_experts=experts,
        top_k=(top_k := draw(st.integers(1, experts))),
        moe_ffn_hidden_size=draw(st.integers(1, 99)),
        norm_topk_prob=draw(st.sampled_from([None, True, False])) if top_k > 1 else False,
    )
    return model, moe


@draws(40)
@given(described())
def test_a_configuration_says_what_the_model_is(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[ModelConfig, MoEConfig]
) -> None:
    """What is written is read as the same model, by Penstock and by transformers."""
    model, moe = case
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config_json(model, moe)))
    found = sections_of(folder)
    again, experts = ModelConfig(**found["model"]), MoEConfig(**found["moe"])
    wanted = config_json(model, moe)
    unsaid = {"max_position_embeddings": model.seq_len, "penstock_training": wanted["penstock_training"]}
    assert config_json(again, experts) | unsaid == wanted
    theirs = AutoConfig.from_pretrained(folder)
    assert isinstance(theirs, Qwen3MoeConfig) and theirs.head_dim == model.head_size
    assert theirs.rope_parameters["rope_theta"] == model.rope_theta


OTHER: dict[str, dict[str, Any]] = {
    "gate": {"gate": "sigmoid"},
    "expert": {"expert": "gelu"},
    "shared_ffn_hidden_size": {"shared_ffn_hidden_size": 8},
    "num_groups": {"num_groups": 2, "group_top_k": 1},
    "expert_bias_rate": {"expert_bias_rate": 0.1},
    "routed_scaling_factor": {"routed_scaling_factor": 2.0},
    "capacity_factor": {"capacity_factor": 1.5},
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_qwen3_moe_lacks_is_refused_by_name(lack: str) -> None:
    moe = replace(MOE, **OTHER[lack])
    with pytest.raises(ConfigError) as caught:
        config_json(SMALL, moe)
    assert caught.value.key == f"moe.{lack}" and lack_of(moe) is not None
    assert lack_of(MOE) is None


def without(*keys: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda table: {key: value for key, value in table.items() if key not in keys}


def saying(**more: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda table: table | more


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (saying(model_type="mixtral"), "model_type"),
        (without("model_type"), "model_type"),
        (without("num_experts"), "num_experts"),
        (saying(attention_bias=True), "attention_bias"),
        (saying(use_sliding_window=True), "use_sliding_window"),
        (saying(hidden_act="gelu"), "hidden_act"),
        (saying(rope_parameters={"rope_type": "yarn", "factor": 4}), "rope_parameters.rope_type"),
        (saying(rope_scaling={"type": "linear"}, rope_parameters=None), "rope_scaling.rope_type"),
        (saying(rope_scaling={"rope_type": "yarn"}), "rope_scaling.rope_type"),
        (saying(rope_scaling="default"), "rope_scaling"),
        (saying(rope_parameters={"rope_theta": "much"}), "rope_theta"),
        (saying(mlp_only_layers="all"), "mlp_only_layers"),
        (saying(decoder_sparse_step=0), "decoder_sparse_step"),
        (saying(mlp_only_layers=[0, 1]), "mlp_only_layers"),
        (saying(hidden_size="wide"), "model.hidden_size"),
        (saying(num_hidden_layers=10**9), "num_layers"),
        (saying(num_experts_per_tok=99), "top_k"),
    ],
)
def test_another_configuration_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], key: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(change(config_json(SMALL, MOE))))
    with pytest.raises(ConfigError) as caught:
        sections_of(file)
    assert caught.value.key.endswith(key)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        sections_of(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        sections_of(tmp_path / "nothing")


def test_earlier_files_have_the_base_of_positions_elsewhere(tmp_path: Path) -> None:
    table = config_json(replace(SMALL, rope_theta=5e5), MOE)
    del table["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert sections_of(tmp_path)["model"]["rope_theta"] == 5e5
