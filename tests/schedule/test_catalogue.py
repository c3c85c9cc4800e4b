"""Section `[schedule]`: what it becomes, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from math import lcm
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError, load
from penstock.decision import TAIL, Decision, Partition, Portion, ScheduleConfig
from penstock.schedule import SCHEDULES
from penstock.step import StepShape
from tests.steps import CUT_INSIDE, SHARED, planned


def test_a_section_is_a_decision_and_says_one() -> None:
    config = ScheduleConfig(name="moe_pipeline", microbatches=3, backward_chunks=6, refine_after=7)
    assert isinstance(config, Decision)
    choice = Decision(schedule="moe_pipeline", microbatches=3, chunks=2, backward_chunks=6, dispatch="flat")
    assert config.decision("flat") == choice
    assert config.saying(choice) == replace(config, chunks=2)
    assert ScheduleConfig(refine_after=7).saying(choice) == replace(config, chunks=2)


@given(st.sampled_from(CUT_INSIDE), st.integers(1, 256), st.integers(1, 256))
def test_chunks_that_share_few_factors_are_refused_with_the_nearest_that_fit(
    name: str, chunks: int, backward: int
) -> None:
    slices = lcm(chunks, backward)
    if slices <= max(64, chunks, backward):
        ScheduleConfig(name=name, chunks=chunks, backward_chunks=backward)
        return
    with pytest.raises(ConfigError, match=rf"backward_chunks = {backward}: .* {slices} slices") as caught:
        ScheduleConfig(name=name, chunks=chunks, backward_chunks=backward)
    nearest = re.search(r"Nearest valid: (\d+)", caught.value.hint)
    assert nearest is not None
    ScheduleConfig(name=name, chunks=chunks, backward_chunks=int(nearest[1]))


def test_the_usual_chunks_count_and_a_schedule_without_chunks_does_not_care() -> None:
    with pytest.raises(ConfigError, match="with chunks = 2 what is saved would be cut into 254 slices"):
        ScheduleConfig(name="moe_pipeline", backward_chunks=127)
    ScheduleConfig(name="fsmoe", backward_chunks=127)
    ScheduleConfig(name="flowmoe", chunks=2, backward_chunks=127)


def test_a_schedule_is_told_of_by_what_it_reads() -> None:
    told = {name: Decision(schedule=name).words for name in ("sequential", "lina", "penstock")}
    assert told == {
        "sequential": "sequential: whole batch, flat dispatch",
        "lina": "lina: no chunks, all-reduce in pieces of 1.0 MiB, flat dispatch",
        "penstock": "penstock: 1 microbatch, no chunks, all-reduce in pieces of 1.0 MiB, flat dispatch, "
        "order: local search",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("microbatches", 3),
        ("chunks", 3),
        ("backward_chunks", 3),
        ("all_reduce_chunk_bytes", 512),
        ("priority", "critical_path"),
        ("partition", Partition(((), (Portion(size_bytes=4096, slot=TAIL),)))),
        ("expert_form", "s1"),
    ],
)
def test_what_a_schedule_does_not_read_changes_nothing(name: str, field: str, value: object) -> None:
    """And what it reads changes the step, its tasks or their order."""
    other = planned(name, PLAIN_SHAPE, **cast("dict[str, Any]", {field: value}))
    assert (usual_digest(name) != other.digest) is (field in SCHEDULES[name].reads)


PLAIN_SHAPE = StepShape(moe_layers=(True, True), pieces={"replicated": (0, 4)}, sharing=SHARED)


@cache
def usual_digest(name: str) -> str:
    return planned(name, PLAIN_SHAPE).digest


def test_settings_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "schedule.toml"
    file.write_text('name = "fsmoe"\nchunks = 2\nbackward_chunks = 3\n')
    assert load(ScheduleConfig, file) == ScheduleConfig(name="fsmoe", chunks=2, backward_chunks=3)
    assert load(ScheduleConfig, file, ["chunks=none"]).chunks is None
    with pytest.raises(ConfigError, match="priority") as caught:
        load(ScheduleConfig, file, ["priority=fastest"])
    assert "critical_path" in str(caught.value)
