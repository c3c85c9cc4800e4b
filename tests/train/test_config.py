"""The configuration of a run: presets, checks between sections, and saving."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from penstock.config import ConfigError, load, to_toml
from penstock.cost import ClusterConfig
from penstock.data import DataConfig
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.models import PRESETS, ModelConfig
from penstock.moe import MoEConfig
from penstock.plan.plan_config import PlanConfig, given_schedule
from penstock.schedule import SCHEDULES
from penstock.topology import ParallelConfig
from penstock.train.config import MetricsConfig, OutputConfig, RunConfig, TrainConfig
from penstock.train.optimizer import OptimizerConfig

CUTTING = {"flowmoe", "penstock"}


def with_preset(name: str, **sections: object) -> RunConfig:
    return replace(RunConfig(model=ModelConfig(preset=name)), **sections)  # type: ignore[arg-type]


# ---- presets -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_which_schedules_cut_the_batch(name: str) -> None:
    assert ScheduleConfig(name=name, microbatches=3).reads("microbatches") is (name in CUTTING)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [(TrainConfig, key, -1) for key in ("steps", "seed", "eval_every", "checkpoint_every", "log_every")]
    + [(TrainConfig, key, 0) for key in ("steps", "eval_batches", "keep_checkpoints")]
    + [(OutputConfig, "trace_steps", -1)],
)
def test_numbers_out_of_range(section: type, key: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        section(**{key: value})
    assert (caught.value.key, caught.value.value) == (key, value)


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
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(RunConfig, path) == config


@pytest.mark.parametrize("section", [field.name for field in fields(RunConfig)])
def test_every_section_is_saved(tmp_path: Path, section: str) -> None:
    """One section at a time, with other values than its defaults."""
    other = getattr(OTHER, section)
    assert other != getattr(RunConfig(), section)
    config = replace(RunConfig(), **{section: other})
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(RunConfig, path) == config


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
