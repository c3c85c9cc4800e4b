"""What makes the model cannot change between two starts of a run; the rest can, and is listed."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import ConfigError, load, to_dict
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.topology import ParallelConfig
from penstock.train.config import OutputConfig, RunConfig, TrainConfig
from penstock.train.optimizer import OptimizerConfig
from penstock.train.resume import MAY_CHANGE, OF_FILE, changes, check_model

PATH = Path("step-00000020")
BEFORE = RunConfig(moe=MoEConfig(num_experts=8, num_groups=4, group_top_k=2, capacity_factor=1.5))
"""With other values than None wherever a field may have one, so that there is something to change."""

OTHER: dict[str, Any] = {
    "model.preset": "flowmoe/gpt2-tiny",
    "model.config": Path("config.json"),
    "model.model_type": "mixtral",
    "model.config_sha256": "4a44dc15",
    "model.num_layers": 5,
    "model.hidden_size": 64,
    "model.num_heads": 8,
    "model.num_key_value_heads": 2,
    "model.head_dim": 8,
    "model.rope_theta": 1e6,
    "model.rms_norm_eps": 1e-5,
    "model.seq_len": 64,
    "model.vocab_size": 300,
    "model.moe_layers": (0,),
    "model.ffn_hidden_size": 99,
    "model.dropout": 0.5,
    "moe.num_experts": 16,
    "moe.top_k": 3,
    "moe.moe_ffn_hidden_size": 99,
    "moe.expert": "gelu",
    "moe.shared_ffn_hidden_size": 99,
    "moe.gate": "sigmoid",
    "moe.gate_proj_size": 99,
    "moe.norm_topk_prob": False,
    "moe.routed_scaling_factor": 2.0,
    "moe.num_groups": 2,
    "moe.group_top_k": 3,
    "moe.expert_bias_rate": 0.5,
    "moe.capacity_factor": 2.0,
    "moe.min_capacity": 9,
    "moe.slots_per_expert": 9,
    "moe.permutation": "einsum",
    "moe.dispatch": "flat",
    "moe.one_copy_per_rank": True,
    "moe.bound_factor": 1.5,
    "moe.comm_dtype": "int8",
    "moe.aux_loss_coeff": 0.5,
    "moe.z_loss_coeff": 0.5,
    "moe.aux_loss_group": "sequence",
}


def keys() -> list[str]:
    """Every field of both sections, those that will be added later included."""
    sections = (("model", ModelConfig), ("moe", MoEConfig))
    return [f"{name}.{field.name}" for name, cls in sections for field in fields(cls)]


def changed(key: str) -> RunConfig:
    if key not in OTHER:  # a field that this test has never heard of
        name = key.partition(".")[2]
        section = getattr(BEFORE, key.partition(".")[0])
        value = getattr(section, name)
        assert isinstance(value, bool), f"{key}: write another value of it into OTHER"
        return replace(BEFORE, **{key.partition(".")[0]: replace(section, **{name: not value})})
    section, _, name = key.partition(".")
    # They exclude capacity_factor, or need a file.
    if key in ("moe.one_copy_per_rank", "moe.bound_factor", "model.model_type"):
        moved = replace(getattr(BEFORE, section))
        object.__setattr__(moved, name, OTHER[key])
        return replace(BEFORE, **{section: moved})
    return replace(BEFORE, **{section: replace(getattr(BEFORE, section), **{name: OTHER[key]})})


@pytest.mark.parametrize("key", keys())
def test_every_field_is_refused_by_name_or_may_change_for_a_reason(key: str) -> None:
    now = changed(key)
    if key in MAY_CHANGE:
        check_model(now, to_dict(BEFORE), PATH)
        assert [line.split()[0] for line in changes(now, to_dict(BEFORE))] == [key]
        return
    with pytest.raises(ConfigError, match=f"{PATH} was trained with") as caught:
        check_model(now, to_dict(BEFORE), PATH)
    assert caught.value.key == ("model.config" if key == OF_FILE else key)


def test_every_exception_is_a_field_and_has_a_reason() -> None:
    assert set(keys()) >= MAY_CHANGE.keys()
    assert all(MAY_CHANGE.values())


def test_both_values_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(changed("model.num_heads"), to_dict(BEFORE), PATH)
    assert str(caught.value).startswith("model.num_heads = 8: step-00000020 was trained with 4;")
    assert "Use model.num_heads=4" in str(caught.value)


@pytest.mark.parametrize(
    "now",
    [
        replace(BEFORE, model=replace(BEFORE.model, moe_layers=(0, 1, 2, 3))),
        replace(BEFORE, model=replace(BEFORE.model, ffn_hidden_size=4 * 128)),
        replace(BEFORE, moe=replace(BEFORE.moe, norm_topk_prob=True)),
    ],
)
def test_the_same_said_in_other_words_is_the_same(now: RunConfig) -> None:
    check_model(now, to_dict(BEFORE), PATH)
    check_model(BEFORE, to_dict(now), PATH)


def test_a_field_that_an_earlier_version_did_not_have_had_its_default() -> None:
    settings = to_dict(BEFORE)
    del settings["moe"]["shared_ffn_hidden_size"]
    check_model(BEFORE, settings, PATH)
    with pytest.raises(ConfigError, match="trained with 0"):
        check_model(changed("moe.shared_ffn_hidden_size"), settings, PATH)


@pytest.mark.parametrize(
    "section", [{"rotary": True}, 3, None, [], {"num_heads": "four"}, {"num_heads": 10**4000}, "x" * 10**6]
)
def test_settings_that_this_version_does_not_know_are_refused(section: object) -> None:
    with pytest.raises(ConfigError, match=r"train\.resume.*another version|num_heads|num_layers: is missing"):
        check_model(BEFORE, {**to_dict(BEFORE), "model": section}, PATH)


def test_changes_are_listed_once_and_shortly() -> None:
    now = replace(
        BEFORE,
        optimizer=OptimizerConfig(lr=1e-4, clip_grad_norm=None),
        train=TrainConfig(steps=400, resume=True),
        output=OutputConfig(dir=Path("elsewhere")),
        parallel=ParallelConfig(processes=2),  # as the saved config.toml says it of those that ran
    )
    expected = [
        "optimizer.lr 0.003 -> 0.0001",
        "optimizer.clip_grad_norm 1.0 -> none",
        "train.steps 200 -> 400",
    ]
    assert changes(now, to_dict(BEFORE)) == expected
    assert changes(BEFORE, to_dict(BEFORE)) == []
    long = changes(BEFORE, {"data": {"path": "x" * 10**6}})
    assert len(long[0]) < 200


def test_another_text_of_a_mixture_is_a_change() -> None:
    now = load(RunConfig, None, ["data.mixture.a=1", "data.mixture.b=2"])
    before = load(RunConfig, None, ["data.mixture.a=1"])
    assert [line.split()[0] for line in changes(now, to_dict(before))] == ["data.mixture"]
