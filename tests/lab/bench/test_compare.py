"""A comparison that is asked to stop: what whole rounds have measured is the result."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass
from itertools import count

import pytest

from penstock.lab.bench.compare import compare, summarise
from penstock.lab.bench.config import CompareConfig
from penstock.lab.bench.contender import Entry
from penstock.lab.bench.result import render
from penstock.topology import Control
from tests.lab.bench.test_summarise import Idle, plan


@dataclass
class Told(Idle):
    """A contender that is sent a signal in one of its steps, the first being 1."""

    stop_at: int
    steps: int = 0

    def step(self, number: int) -> None:
        del number
        self.steps += 1
        if self.steps == self.stop_at:
            signal.raise_signal(signal.SIGTERM)


class OneEntry:
    """A field of one schedule that computes nothing."""

    label, layout, notes = None, "", ("a note",)

    def __init__(self, stop_at: int) -> None:
        self.told = Told(stop_at)
        self.entries = (
            Entry(name="flowmoe", transport="penstock", contender=self.told, plan=plan("flowmoe")),
        )
        self.control, self.traffic = Control(0, 1), Counter[int]()

    def compute_solo_s(self, entry: Entry, number: int) -> float:
        del entry, number
        return 1.0

    def close(self) -> None:
        """Nothing was opened."""


BEFORE, WARMUP, ROUNDS = 2, 1, 5
"""Steps before the first round, rounds that do not count, rounds that do."""


@pytest.mark.parametrize("whole", [1, 2, 5])
def test_a_stop_leaves_the_rounds_before_it(whole: int) -> None:
    field = OneEntry(stop_at=BEFORE + WARMUP + whole + 1)
    found = compare(field, CompareConfig(warmup=WARMUP, rounds=ROUNDS))
    assert [len(rank) for rank in found.samples["flowmoe"]] == [whole]
    stopped = f"stopped, as requested, after {whole} of {ROUNDS} rounds"
    assert found.notes == (("a note", stopped) if whole < ROUNDS else ("a note",))
    text = render(summarise(found, nodes=1, devices=1, inter_rate_bit_per_s=None))
    assert ("1.00 [1.00, 1.00]" in text) == (whole > 1), "one round has no interval"


@pytest.mark.parametrize("hours", [1, 60])
def test_rounds_end_by_the_clock_with_those_that_are_complete(hours: int) -> None:
    """After one at least: here every look at the clock comes so many hours after the one before."""
    looks = count(0, 3600 * hours)
    config = CompareConfig(warmup=WARMUP, rounds=ROUNDS, limit_s=7 * 3600)
    found = compare(OneEntry(stop_at=0), config, clock=lambda: float(next(looks)))
    whole = 2 if hours == 1 else 1
    assert [len(rank) for rank in found.samples["flowmoe"]] == [whole]
    assert found.notes[0] == "a note"
    assert "compare.limit_s" in found.notes[1] and f"{whole} of {ROUNDS}" in found.notes[1]


@pytest.mark.parametrize("stop_at", [1, BEFORE + WARMUP + 1])
def test_a_stop_before_the_first_round_leaves_nothing(stop_at: int) -> None:
    field = OneEntry(stop_at)
    with pytest.raises(KeyboardInterrupt):
        compare(field, CompareConfig(warmup=WARMUP, rounds=ROUNDS))
    assert field.told.steps <= BEFORE + WARMUP + 1
