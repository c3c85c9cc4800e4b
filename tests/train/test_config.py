"""The configuration of a run: presets, checks between sections, and saving."""

from __future__ import annotations

import json
from dataclasses import replace
from math import gcd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError, load, to_toml
from penstock.config.bounds import types_of
from penstock.config.described import docs_of
from penstock.cost import ClusterConfig
from penstock.data import DataConfig
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.models import PRESETS, ModelConfig
from penstock.models.qwen3_moe import config_json
from penstock.moe import MoEConfig
from penstock.plan.models import MODELS
from penstock.plan.plan_config import PlanConfig, given_schedule
from penstock.schedule import SCHEDULES
from penstock.topology import ParallelConfig
from penstock.train.config import MetricsConfig, OutputConfig, RunConfig, TrainConfig
from penstock.train.optimizer import OptimizerConfig
from penstock.train.possible import check_shares

CUTTING = {"flowmoe", "penstock"}


def with_preset(name: str, **sections: object) -> RunConfig:
    return replace(RunConfig(model=ModelConfig(preset=name)), **sections)  # type: ignore[arg-type]


# ---- presets -----------------------------------------------------------------------------------------------


def test_presets_are_those_that_the_setting_promises() -> None:
    promised = docs_of(ModelConfig)["preset"].partition("one of `")[2].partition("`")[0]
    assert [name for name in MODELS if name.startswith(promised)] == list(PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_sets_the_published_sizes(name: str) -> None:
    preset, found = PRESETS[name], with_preset(name).resolved(8)
    assert found.model.num_layers == preset.num_layers
    assert found.model.hidden_size == preset.hidden_size
    assert found.model.seq_len == preset.seq_len
    assert found.moe.num_experts == 8 * preset.experts_per_device
    assert found.moe.top_k == preset.top_k
    assert found.moe.expert == "gelu"
    assert found.moe.capacity_factor == preset.capacity_factor
    assert found.data.batch_per_device == preset.batch
    assert found.resolved(8) == found


def test_what_the_user_set_wins() -> None:
    config = RunConfig(
        model=ModelConfig(preset="flowmoe/bert-large", num_layers=3, dropout=0.25),
        moe=MoEConfig(num_experts=4, capacity_factor=2.0),
        data=DataConfig(batch_per_device=6),
    )
    found = config.resolved(2)
    assert (found.model.num_layers, found.model.hidden_size, found.model.dropout) == (3, 512, 0.25)
    assert (found.moe.num_experts, found.moe.top_k, found.moe.capacity_factor) == (4, 1, 2.0)
    assert found.data.batch_per_device == 6


GIVEN = ("num_layers=4", "seq_len=128", "hidden_size=768")
"""Keys of [model] that are set to their defaults, but for the last."""


@pytest.mark.parametrize(
    ("file", "overrides", "sizes"),
    [
        ((), ("preset='flowmoe/gpt2-tiny'", *GIVEN), (4, 128, 768)),
        (("preset='flowmoe/gpt2-tiny'", *GIVEN), (), (4, 128, 768)),
        (("preset='flowmoe/gpt2-tiny'",), GIVEN, (4, 128, 768)),
        (GIVEN, ("preset='flowmoe/gpt2-tiny'",), (12, 256, 768)),  # such as tiny, with another model
        (GIVEN, ("preset='flowmoe/gpt2-tiny'", "num_layers=4"), (4, 256, 768)),
        ((), ("config='FILE'", *GIVEN), (4, 128, 768)),
        (("config='FILE'", *GIVEN), (), (4, 128, 768)),
        (GIVEN, ("config='FILE'",), (6, 128, 768)),
    ],
)
def test_what_is_set_to_its_default_wins_where_it_is_set_for_the_model(
    file: tuple[str, ...], overrides: tuple[str, ...], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    written = config_json(ModelConfig(num_layers=6, moe_layers=(1, 5), head_dim=8), MoEConfig())
    (tmp_path / "config.json").write_text(json.dumps(written))
    path, text = tmp_path / "run.toml", "\n".join(("[model]", *file))
    path.write_text(text.replace("FILE", str(tmp_path)))
    settings = [f"model.{each}".replace("FILE", str(tmp_path)) for each in overrides]
    config = load(RunConfig, path, settings)
    for each in (config, replace(config, train=TrainConfig(steps=1))):
        found = each.resolved(2)
        assert (found.model.num_layers, found.model.seq_len, found.model.hidden_size) == sizes
        assert replace(found, train=config.train).resolved(2) == replace(found, train=config.train)
    other = replace(config, model=ModelConfig(preset="flowmoe/bert-large"))
    assert other.resolved(2).model.hidden_size == 512, "of another section"


def test_other_sections_are_left_alone() -> None:
    config = with_preset(
        "flowmoe/llama2-layers", train=TrainConfig(steps=7), schedule=ScheduleConfig(name="sequential")
    )
    found = config.resolved(2)
    assert (found.train, found.schedule, found.cluster) == (config.train, config.schedule, config.cluster)


def test_without_a_preset_nothing_changes() -> None:
    config = RunConfig(moe=MoEConfig(num_experts=3))
    assert config.resolved(16) is config


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_too_few_ranks_for_a_preset(name: str) -> None:
    """It names the least number of processes, and that number works."""
    preset = PRESETS[name]
    least = -(-preset.top_k // preset.experts_per_device)
    assert with_preset(name).resolved(least).moe.num_experts >= preset.top_k
    for world_size in range(1, least):
        with pytest.raises(ConfigError, match=rf"model\.preset.*Start {least} processes or more"):
            with_preset(name).resolved(world_size)


def test_a_mistake_beside_a_preset_is_not_blamed_on_the_ranks() -> None:
    """More processes would not help: the preset's batch of 4 cannot be cut into 8 microbatches."""
    config = with_preset("flowmoe/llama2-layers", schedule=ScheduleConfig(microbatches=8))
    with pytest.raises(ConfigError, match=r"microbatches") as caught:
        config.resolved(8)
    assert "processes or more" not in str(caught.value)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.preset.*Nearest: flowmoe/gpt2-tiny"):
        RunConfig(model=ModelConfig(preset="GPT2-Tiny"))


# ---- checks between sections -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_more_microbatches_than_samples(name: str) -> None:
    schedule, data = ScheduleConfig(name=name, microbatches=5), DataConfig(batch_per_device=4)
    if name in CUTTING:
        with pytest.raises(ConfigError, match=r"schedule\.microbatches = 5.*Nearest valid: 4"):
            RunConfig(schedule=schedule, data=data)
    else:
        assert RunConfig(schedule=schedule, data=data).schedule.microbatches == 5
    assert RunConfig(schedule=schedule, data=data, plan=PlanConfig(mode="auto")).schedule is schedule
    RunConfig(schedule=replace(schedule, microbatches=4), data=data)


def test_one_sample_is_one_microbatch() -> None:
    for name in CUTTING:
        config = RunConfig(schedule=ScheduleConfig(name=name), data=DataConfig(batch_per_device=1))
        assert config.schedule == ScheduleConfig(name=name, microbatches=1)


# ---- saving ------------------------------------------------------------------------------------------------

OTHER = RunConfig(
    model=ModelConfig(preset="flowmoe/gpt2-tiny", num_layers=3, moe_layers=(0, 2), dropout=0.1),
    moe=MoEConfig(num_experts=6, expert="gelu", capacity_factor=1.5, norm_topk_prob=False),
    schedule=ScheduleConfig(name="penstock", microbatches=3, refine_after=0),
    placement=PlacementConfig(samples="netmoe", experts="planned", replica_slots=2, prediction="none"),
    plan=PlanConfig(mode="replay", file="some plan.json", tuner="grid", watch=False, drift_threshold=0.3),
    parallel=ParallelConfig(processes=2, ep_size=1, timeout_s=2.5),
    data=DataConfig(path='a "quoted" folder', batch_per_device=3, suffixes=(".txt",)),
    optimizer=OptimizerConfig(lr=1e-5, clip_grad_norm=None),
    train=TrainConfig(steps=3, seed=9, resume=True, precision="bfloat16"),
    output=OutputConfig(dir=Path("some where"), tensorboard=False, trace_steps=0, loads=False),
    metrics=MetricsConfig(wandb="offline", wandb_project="mine", wandb_name="a run", wandb_tags=("a", "b")),
    cluster=ClusterConfig(flops_per_s=2.5e12),
)


@pytest.mark.parametrize("config", [RunConfig(), OTHER, with_preset("flowmoe/bert-large").resolved(4)])
def test_what_is_saved_is_read_back(tmp_path: Path, config: RunConfig) -> None:
    assert not [each for each in types_of(RunConfig) if getattr(OTHER, each) == getattr(RunConfig(), each)]
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(RunConfig, path) == config


def test_a_run_that_is_saved_has_the_same_sizes(tmp_path: Path) -> None:
    """Those among them that were set to none."""
    settings = ["model.preset=flowmoe/gpt2-tiny", "model.num_layers=4", "moe.capacity_factor=none"]
    config, path = load(RunConfig, None, settings).resolved(4), tmp_path / "config.toml"
    assert config.moe.capacity_factor is None
    path.write_text(to_toml(config))
    assert load(RunConfig, path).resolved(2) == config


# ---- who decides -------------------------------------------------------------------------------------------

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ([], "auto"),
        (["train.steps=5", "schedule.refine_after=0"], "auto"),
        (["schedule.name=sequential"], "fixed"),
        (["schedule.name = flowmoe", "train.steps=5"], "fixed"),
        (["schedule.microbatches=4"], "fixed"),
        (["schedule.name=sequential", "plan.mode=auto"], "auto"),
        (["plan.mode=replay", "plan.file=mine.json", "schedule.chunks=2"], "replay"),
    ],
)
def test_who_names_a_schedule_gets_it(settings: list[str], mode: str) -> None:
    """The ready configuration plans by itself, but not against what is asked for beside it."""
    assert load(RunConfig, TINY, given_schedule(settings)).plan.mode == mode


# ---- settings that exclude each other ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "ranks", "key", "hint"),
    [
        (["parallel.tp_size=8"], 8, "tp_size", "4; or model.num_heads=8."),
        (["parallel.tp_size=3"], 3, "tp_size", "1."),
        (["parallel.tp_size=4", "model.vocab_size=258"], 4, "tp_size", "2; or model.vocab_size=256"),
        (["parallel.tp_size=4", "model.vocab_size=259"], 4, "tp_size", "1; or model.vocab_size=260"),
        (
            ["parallel.tp_size=4", "model.moe_layers=[0]", "model.ffn_hidden_size=6"],
            4,
            "tp_size",
            "2; or model.ffn",
        ),
        (["parallel.tp_size=4", "model.seq_len=3"], 4, "tp_size", "2."),
        (
            ["parallel.etp_size=4", "moe.moe_ffn_hidden_size=6"],
            8,
            "etp_size",
            "2; or moe.moe_ffn_hidden_size=4.",
        ),
    ],
)
def test_what_does_not_divide_is_refused(settings: list[str], ranks: int, key: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, settings).resolved(ranks)
    assert caught.value.key == f"parallel.{key}" and caught.value.hint.startswith(f"Nearest valid: {hint}")


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
    ("settings", "ranks", "key"),
    [
        (["placement.solver=kuhn_munkres"], 2, "solver"),
        (["placement.prediction=none", "placement.samples=none"], 2, "prediction"),
        (["placement.replica_slots=2"], 2, "replica_slots"),
        (["placement.split=exact"], 2, "split"),
        (["placement.every=3", "placement.experts=none", "plan.mode=auto"], 2, "every"),
        (["placement.experts=planned", "parallel.ep_size=1"], 2, "experts"),
        (["placement.samples=netmoe"], 1, "samples"),
    ],
)
def test_what_would_change_nothing_is_refused(settings: list[str], ranks: int, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, settings).resolved(ranks)
    assert caught.value.key == f"placement.{key}"


@pytest.mark.parametrize(
    ("moves", "beside", "instead"),
    [
        ("experts=shadowing", ["schedule.name=baseline_esp", "parallel.tp_size=2"], "schedule.name=flowmoe"),
        ("experts=planned", ["schedule.expert_form=s2", "parallel.tp_size=2"], "schedule.expert_form=gather"),
        ("samples=netmoe", ["schedule.name=parm_s1", "parallel.tp_size=2"], "schedule.name="),
        ("samples=netmoe", ["schedule.expert_form=s1", "parallel.etp_size=2"], "schedule.expert_form=gather"),
        ("samples=netmoe", ["moe.capacity_factor=1.5"], ""),
        ("experts=planned", ["moe.capacity_factor=1.5", "plan.mode=auto"], "dropless routing"),
        ("experts=planned", ["moe.gate=soft"], ""),
        ("samples=netmoe", ["moe.one_copy_per_rank=true"], ""),
        ("samples=netmoe", ["moe.bound_factor=2"], "moe.bound_factor=none"),
        ("experts=planned", ["moe.bound_factor=2"], "moe.bound_factor=none"),
        ("samples=netmoe", ["moe.aux_loss_group=microbatch"], "moe.aux_loss_group=global"),
    ],
)
def test_what_a_step_cannot_move_is_refused_before_it_starts(
    moves: str, beside: list[str], instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, [f"placement.{moves}", *beside]).resolved(4)
    assert caught.value.key == f"placement.{moves.partition('=')[0]}"
    key, _, value = beside[0].partition("=")
    assert key in caught.value.why and instead in caught.value.hint
    page = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
    assert not key.startswith("moe.") or any(f"`{name}`" in page for name in (key, value, beside[0]))


@pytest.mark.parametrize(
    "settings",
    [
        ["placement.samples=netmoe", "schedule.name=parm_s1"],
        ["placement.experts=planned", "schedule.name=parm_s1", "parallel.tp_size=2"],
        ["placement.experts=planned", "schedule.name=baseline_esp", "parallel.etp_size=2"],
        ["placement.samples=netmoe", "placement.experts=planned", "parallel.tp_size=2"],
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
def test_what_a_step_can_move_is_taken(settings: list[str]) -> None:
    config = load(RunConfig, None, settings)
    assert config.resolved(4) == config


def test_rounding_that_nothing_chooses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'plan\.comm_dtype = "auto": .*searched.*moe\.comm_dtype'):
        load(RunConfig, None, ["plan.comm_dtype=auto"])
    assert load(RunConfig, None, ["plan.comm_dtype=auto", "plan.mode=auto"]).plan.comm_dtype == "auto"
