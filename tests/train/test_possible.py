"""Settings that cannot be used together, or have no effect, are refused, with what can be used instead."""

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
from penstock.train.possible import check_shares


@pytest.mark.parametrize(
    ("settings", "ranks", "key", "words"),
    [
        (["parallel.tp_size=8"], 8, "tp_size", r"model\.num_heads \(4\).* valid: 4; or model\.num_heads=8\."),
        (["parallel.tp_size=3"], 3, "tp_size", r"model\.num_heads \(4\).* Nearest valid: 1\."),
        (["parallel.tp_size=4", "model.vocab_size=258"], 4, "tp_size", r"valid: 2; or model\.vocab_size=256"),
        (["parallel.tp_size=4", "model.vocab_size=259"], 4, "tp_size", r"valid: 1; or model\.vocab_size=260"),
        (
            ["parallel.tp_size=4", "model.moe_layers=[0]", "model.ffn_hidden_size=6"],
            4,
            "tp_size",
            r"model\.ffn_hidden_size \(6\).* Nearest valid: 2; or model\.ffn_hidden_size=4\.",
        ),
        (["parallel.tp_size=4", "model.seq_len=3"], 4, "tp_size", r"seq_len = 3\. Nearest valid: 2\."),
        (
            ["parallel.etp_size=4", "moe.moe_ffn_hidden_size=6"],
            8,
            "etp_size",
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
    check_shares(ModelConfig(ffn_hidden_size=6), MoEConfig(), ParallelConfig(tp_size=4, etp_size=4), 4)


def test_a_presets_sizes_count_and_not_the_defaults() -> None:
    config = RunConfig(model=ModelConfig(preset="flowmoe/bert-large"), parallel=ParallelConfig(tp_size=8))
    assert config.resolved(8).model.num_heads % 8 == 0
    with pytest.raises(ConfigError, match=r"model\.num_heads"):
        replace(config, model=ModelConfig(preset="flowmoe/bert-large", num_heads=2)).resolved(8)


@given(
    heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    vocab=st.integers(256, 300),
    width=st.integers(1, 24),
    tp=st.integers(1, 12),
    ranks=st.integers(1, 12),
)
def test_the_proposed_size_is_accepted(heads: int, vocab: int, width: int, tp: int, ranks: int) -> None:
    small = ModelConfig(num_layers=2, moe_layers=(0,), seq_len=5, hidden_size=24, head_dim=2)
    model = replace(small, num_heads=heads, vocab_size=vocab, ffn_hidden_size=width)
    fits = gcd(heads, vocab, width) % tp == 0 and tp <= 5
    try:
        check_shares(model, MoEConfig(), ParallelConfig(tp_size=tp), ranks)
    except ConfigError as error:
        assert not fits
        nearest = int(error.hint.removeprefix("Nearest valid: ").partition(";")[0].rstrip("."))
        check_shares(model, MoEConfig(), ParallelConfig(tp_size=nearest), ranks)
        assert ranks % nearest == 0
    else:
        assert fits


@pytest.mark.parametrize(
    ("settings", "ranks", "key", "words"),
    [
        (
            ["placement.solver=kuhn_munkres"],
            2,
            "solver",
            r'samples = auto, which means "none" with plan.mode',
        ),
        (["placement.prediction=none", "placement.samples=none"], 2, "prediction", "where samples stay"),
        (["placement.replica_slots=2"], 2, "replica_slots", "where experts stay"),
        (["placement.split=exact"], 2, "split", "where experts stay"),
        (
            ["placement.every=3", "placement.experts=none", "plan.mode=auto"],
            2,
            "every",
            r"experts = none\)\. Leave it out, or let experts move",
        ),
        (["placement.experts=planned", "parallel.ep_size=1"], 2, "experts", "every rank has all of them"),
        (["placement.samples=netmoe"], 1, "samples", "every rank has all of them"),
    ],
)
def test_what_would_change_nothing_is_refused(settings: list[str], ranks: int, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(RunConfig, None, settings).resolved(ranks)
    assert caught.value.key == f"placement.{key}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["placement.experts=shadowing", "schedule.name=baseline_esp", "parallel.tp_size=2"],
            r'placement\.experts = "shadowing": with schedule\.name = baseline_esp all ranks .*tp_size = 2\) '
            r"have the same rows.*Use schedule\.name=flowmoe, or set placement\.experts=none",
        ),
        (
            ["placement.experts=planned", "schedule.expert_form=s2", "parallel.tp_size=2"],
            r"with schedule\.expert_form = s2 all ranks .*Use schedule\.expert_form=gather",
        ),
        (
            ["placement.samples=netmoe", "schedule.name=parm_s1", "parallel.tp_size=2"],
            r'samples = "netmoe": with schedule\.name = parm_s1 ranks .*\(parallel\.tp_size\) send',
        ),
        (
            ["placement.samples=netmoe", "schedule.expert_form=s1", "parallel.etp_size=2"],
            r"\(parallel\.etp_size\) send rows .*Use schedule\.expert_form=gather, or set",
        ),
        (
            ["placement.samples=netmoe", "moe.capacity_factor=1.5"],
            r"samples = .*: with moe\.capacity_factor = 1\.5 every expert has a fixed number of rows",
        ),
        (
            ["placement.experts=planned", "moe.capacity_factor=1.5", "plan.mode=auto"],
            r"placement\.experts = .*a replica would spare nothing\. Use dropless routing",
        ),
        (["placement.experts=planned", "moe.gate=soft"], r"with moe\.gate = soft every expert"),
        (
            ["placement.samples=netmoe", "moe.one_copy_per_rank=true"],
            "rank = true one row serves",
        ),
        (["placement.samples=netmoe", "moe.bound_factor=2"], r"Use moe\.bound_factor=none"),
        (["placement.experts=planned", "moe.bound_factor=2"], r"Use moe\.bound_factor=none"),
        (["placement.samples=netmoe", "moe.aux_loss_group=microbatch"], r"Use moe\.aux_loss_group=global"),
    ],
)
def test_what_a_step_cannot_move_is_refused_before_it_starts(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(RunConfig, None, settings).resolved(4)


@pytest.mark.parametrize(
    "settings",
    [
        ["placement.samples=netmoe", "schedule.name=parm_s1"],
        ["placement.experts=planned", "schedule.name=parm_s1", "parallel.tp_size=2"],
        ["placement.experts=planned", "schedule.name=baseline_esp", "parallel.etp_size=2"],
        ["placement.samples=netmoe", "placement.experts=planned", "parallel.tp_size=2"],
    ],
)
def test_what_a_step_can_move_is_taken(settings: list[str]) -> None:
    config = load(RunConfig, None, settings)
    assert config.resolved(4) == config


@pytest.mark.parametrize(
    "settings",
    [
        ["placement.samples=netmoe", "placement.solver=kuhn_munkres"],
        ["placement.experts=planned", "placement.replica_slots=2", "placement.every=3"],
        ["placement.replica_slots=2", "placement.prediction=none", "plan.mode=auto"],
        [
            "placement.replica_slots=2",
            "parallel.ep_size=1",
            "placement.samples=netmoe",
            "plan.mode=replay",
            "plan.file=p.json",
        ],
    ],
)
def test_what_may_count_is_taken(settings: list[str]) -> None:
    assert load(RunConfig, None, settings).resolved(2).placement.replica_slots in (1, 2)


def test_rounding_that_nothing_chooses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'plan\.comm_dtype = "auto": .*searched.*moe\.comm_dtype'):
        load(RunConfig, None, ["plan.comm_dtype=auto"])
    assert load(RunConfig, None, ["plan.comm_dtype=auto", "plan.mode=auto"]).plan.comm_dtype == "auto"
