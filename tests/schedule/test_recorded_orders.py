"""Frozen orders and simulated times stay as they were recorded, for all schedules over many shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.schedule import SCHEDULES
from tests.schedule.recording import RECORDED, SHARED, Case, cases, recording, shared_cases


def recorded(file: Path, number: int) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.partition(" ")[0] == str(number)]


def test_the_recording_holds_every_schedule_of_every_case() -> None:
    lines = RECORDED.read_text().splitlines()
    assert len(cases()) == 72
    assert {int(line.partition(" ")[0]) for line in lines} == set(range(72))
    assert len(lines) == 72 * 8 + 8


def marks(number: int) -> list[pytest.MarkDecorator]:
    """Every seventh is in `make quick`, every ninth, for which orders are searched, in `make test`, too."""
    return [] if number % 7 == 1 else [pytest.mark.soak] if number % 9 else [pytest.mark.slow]


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("number", "case"), [pytest.param(n, case, marks=marks(n)) for n, case in enumerate(cases())]
)
def test_orders_and_simulated_times_are_as_recorded(number: int, case: Case) -> None:
    assert recording(number, case) == recorded(RECORDED, number)


@pytest.mark.few(6)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "case"), list(enumerate(shared_cases())))
def test_orders_of_ranks_that_share_are_as_recorded(number: int, case: Case) -> None:
    assert recording(number, case) == recorded(SHARED, number)


def test_every_schedule_is_recorded_with_ranks_that_share() -> None:
    names = {line.split()[1].partition("/")[0] for line in SHARED.read_text().splitlines()}
    assert names == set(SCHEDULES)
