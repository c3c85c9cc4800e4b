"""Section [placement]: what would do nothing is refused."""

from __future__ import annotations

import pytest

from penstock.config import ConfigError, load
from penstock.train.config import RunConfig


@pytest.mark.parametrize(
    ("settings", "ranks", "key", "words"),
    [
        (
            ["placement.solver=kuhn_munkres"],
            2,
            "solver",
            r'samples = auto, which means "none" with plan.source',
        ),
        (["placement.prediction=none", "placement.samples=none"], 2, "prediction", "where samples stay"),
        (["placement.guest_slots=2"], 2, "guest_slots", "where experts stay"),
        (["placement.split=exact"], 2, "split", "where experts stay"),
        (
            ["placement.every=3", "placement.experts=none", "plan.source=auto"],
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
            ["placement.experts=shadowing", "schedule.name=baseline_esp", "parallel.mp_size=2"],
            r'placement\.experts = "shadowing": with schedule\.name = baseline_esp all ranks .*mp_size = 2\) '
            r"have the same rows.*Use schedule\.name=flowmoe, or set placement\.experts=none",
        ),
        (
            ["placement.experts=planned", "schedule.expert_form=s2", "parallel.mp_size=2"],
            r"with schedule\.expert_form = s2 all ranks .*Use schedule\.expert_form=gather",
        ),
        (
            ["placement.samples=netmoe", "schedule.name=parm_s1", "parallel.mp_size=2"],
            r'samples = "netmoe": with schedule\.name = parm_s1 ranks .*\(parallel\.mp_size\) send',
        ),
        (
            ["placement.samples=netmoe", "schedule.expert_form=s1", "parallel.esp_size=2"],
            r"\(parallel\.esp_size\) send rows .*Use schedule\.expert_form=gather, or set",
        ),
        (
            ["placement.samples=netmoe", "moe.capacity_factor=1.5"],
            r"samples = .*: with moe\.capacity_factor = 1\.5 every expert has a fixed number of rows",
        ),
        (
            ["placement.experts=planned", "moe.capacity_factor=1.5", "plan.source=auto"],
            r"placement\.experts = .*a guest would spare nothing\. Use dropless routing",
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
        ["placement.experts=planned", "schedule.name=parm_s1", "parallel.mp_size=2"],
        ["placement.experts=planned", "schedule.name=baseline_esp", "parallel.esp_size=2"],
        ["placement.samples=netmoe", "placement.experts=planned", "parallel.mp_size=2"],
    ],
)
def test_what_a_step_can_move_is_taken(settings: list[str]) -> None:
    config = load(RunConfig, None, settings)
    assert config.resolved(4) == config


@pytest.mark.parametrize(
    "settings",
    [
        ["placement.samples=netmoe", "placement.solver=kuhn_munkres"],
        ["placement.experts=planned", "placement.guest_slots=2", "placement.every=3"],
        ["placement.guest_slots=2", "placement.prediction=none", "plan.source=auto"],
        ["placement.guest_slots=2", "parallel.ep_size=1", "placement.samples=netmoe", "plan.source=p.json"],
    ],
)
def test_what_may_count_is_taken(settings: list[str]) -> None:
    assert load(RunConfig, None, settings).resolved(2).placement.guest_slots in (1, 2)


def test_rounding_that_nothing_chooses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.lossy = true: .*nothing is searched.*moe\.compression"):
        load(RunConfig, None, ["plan.lossy=true"])
    assert load(RunConfig, None, ["plan.lossy=true", "plan.source=auto"]).plan.lossy
