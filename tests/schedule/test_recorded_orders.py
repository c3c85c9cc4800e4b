"""Frozen orders and simulated times stay as they were recorded, for all schedules over many shapes."""

from __future__ import annotations

import pytest

from tests.schedule.recording import RECORDED, Case, cases, recording


def recorded(number: int) -> list[str]:
    lines = RECORDED.read_text().splitlines()
    return [line for line in lines if line.partition(" ")[0] == str(number)]


def test_the_recording_holds_every_schedule_of_every_case() -> None:
    lines = RECORDED.read_text().splitlines()
    assert len(cases()) == 72
    assert {int(line.partition(" ")[0]) for line in lines} == set(range(72))
    assert len(lines) == 72 * 8 + 8


@pytest.mark.parametrize(("number", "case"), list(enumerate(cases())))
def test_orders_and_simulated_times_are_as_recorded(number: int, case: Case) -> None:
    assert recording(number, case) == recorded(number)
