"""Section `[schedule]`: what it becomes, and what it refuses."""

from __future__ import annotations

import re
from math import lcm
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError, load
from penstock.schedule import SCHEDULES, Penstock, Pieces, ScheduleConfig
from tests.steps import CUT_INSIDE


def test_a_section_becomes_pieces() -> None:
    config = ScheduleConfig(
        name="moe_pipeline", microbatches=3, chunks=4, backward_chunks=6, all_reduce_chunk_bytes=2048
    )
    assert config.system is SCHEDULES["moe_pipeline"]
    assert config.pieces((1, 2), (3, 4)) == Pieces(
        microbatches=3,
        chunks=4,
        all_reduce_chunk_bytes=2048,
        all_reduce_bytes=(1, 2),
        expert_all_reduce_bytes=(3, 4),
        backward_chunks=6,
    )


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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "tutel"}, r"Nearest: \w+. All: sequential, moe_pipeline, dense_overlap, lina, flowmoe"),
        ({"microbatches": 0}, "microbatches = 0: must be from 1 to 256"),
        ({"chunks": -1}, "chunks = -1: must be from 1 to 256"),
        ({"backward_chunks": 257}, "backward_chunks = 257: must be from 1 to 256"),
        ({"all_reduce_chunk_bytes": 511}, "all_reduce_chunk_bytes = 511: must be from 512 to"),
        ({"refine_after": -1}, "refine_after = -1: must be from 0 to"),
    ],
)
def test_settings_that_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScheduleConfig(**setting)


@pytest.mark.parametrize("priority", ["search", "critical_path", "all_to_all_first"])
def test_the_priority_is_penstock_s_alone(priority: Any) -> None:
    assert ScheduleConfig(name="penstock", priority=priority).system == Penstock(priority)
    assert ScheduleConfig(name="lina", priority=priority).system is SCHEDULES["lina"]


def test_settings_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "schedule.toml"
    file.write_text('name = "fsmoe"\nchunks = 2\nbackward_chunks = 3\n')
    assert load(ScheduleConfig, file) == ScheduleConfig(name="fsmoe", chunks=2, backward_chunks=3)
    assert load(ScheduleConfig, file, ["chunks=none"]).chunks is None
    with pytest.raises(ConfigError, match="priority") as caught:
        load(ScheduleConfig, file, ["priority=fastest"])
    assert "critical_path" in str(caught.value)
