"""Which settings are tried before a comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.decision import ScheduleConfig
from penstock.lab.bench.config import BenchConfig, CompareConfig, variants
from penstock.schedule import SCHEDULES

MEBIBYTE = 1 << 20
names = st.sampled_from(sorted(SCHEDULES))


def config(batch: int, *, tune: bool, microbatches: int = 3) -> BenchConfig:
    return BenchConfig(
        schedule=ScheduleConfig(microbatches=microbatches, chunks=5, all_reduce_chunk_bytes=4096),
        compare=CompareConfig(batch_per_device=batch, tune=tune),
    )


@given(names, st.integers(1, 16))
def test_without_tuning_the_section_counts(name: str, batch: int) -> None:
    given_config = config(batch, tune=False)
    assert variants(given_config, name) == (replace(given_config.schedule, name=name),)


@pytest.mark.parametrize(
    ("batch", "pieces"), [(4, [2, 4]), (8, [2, 4]), (2, [2]), (6, [2]), (3, [3]), (1, [3])]
)
def test_pieces_divide_the_batch_and_otherwise_the_section_counts(batch: int, pieces: list[int]) -> None:
    found = variants(config(batch, tune=True), "flowmoe")
    wanted = [(m, m, size) for m in pieces for size in (MEBIBYTE, 4 * MEBIBYTE)]
    assert [(v.microbatches, v.chunks, v.all_reduce_chunk_bytes) for v in found] == wanted


@given(names, st.integers(1, 16))
def test_all_variants_are_of_the_schedule_asked_for_and_differ(name: str, batch: int) -> None:
    found = variants(config(batch, tune=True), name)
    assert {v.name for v in found} == {name}
    assert len(set(found)) == len(found) >= 2
    assert {v.refine_after for v in found} == {ScheduleConfig().refine_after}
