"""Steps under random delays and in poisoned memory have the same bits as undisturbed ones.

A missing wait between two streams, or memory that is given away too early, shows only where the other side is
late. So every task starts later by chance, on every lane of every rank, and new memory is full of NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch

from penstock.device import device_of
from penstock.doctor.gpu.here import Case, Here, small_machinery, small_run
from penstock.doctor.gpu.outcome import Outcome
from penstock.runtime import Machinery
from penstock.runtime.executor import Call, Execute, Lanes, Ran, Span

SCHEDULES: Final = ("flowmoe", "fsmoe", "penstock")
DELAY_S: Final = 5e-4
"""The longest delay of a task: longer than most tasks of the small model take."""

NEAR: Final = 1e-4
"""Relative, where even undisturbed steps differ."""

STEADY: Final = {"lr": 1e-2, "eps": 1e-3}
"""An optimiser for more than one step."""


class Delayed:
    """Lanes on which every task begins later by what `delay` does."""

    def __init__(self, lanes: Lanes, delay: Callable[[], None]) -> None:
        self.lanes, self.delay = lanes, delay
        self.issued_s = lanes.issued_s

    def run(self, span: Span, execute: Execute, *, timed: bool = True) -> Callable[[], list[Ran]]:
        def late(call: Call) -> Any:
            self.delay()
            return execute(call)

        return self.lanes.run(span, late, timed=timed)

    def close(self) -> None:
        self.lanes.close()


def run(here: Here) -> Outcome:
    """Compare undisturbed steps with each other, then with disturbed ones."""
    results, wrong, lines = [], [], []
    with _deterministic():
        for name in SCHEDULES:
            case = Case(name=name, schedule=name, optimizer=STEADY)
            machinery = small_machinery(here, case)
            plain, repeated = (steps(here, case, machinery) for _ in range(2))
            disturbed = steps(here, case, replace(machinery, lanes=delayed(here, machinery.lanes)))
            machinery.close()
            exact, equal = plain == repeated, plain == disturbed
            off = max(map(_off, plain, disturbed))
            results.append(
                {
                    "schedule": name,
                    "repeatable": exact,
                    "equal": equal,
                    "off": off if math.isfinite(off) else None,
                }
            )
            if not (equal if exact else off <= NEAR):
                wrong.append(f"{name}: disturbed steps differ from undisturbed ones by {off:.1e}")
    repeatable = all(each["repeatable"] for each in results)
    near = f"the same numbers within {NEAR:g}, as undisturbed steps do not repeat their bits"
    bits = "the same bits" if repeatable else near
    lines.append(f"{', '.join(SCHEDULES)}: {here.scale.repeats} steps each, wanted: {bits}")
    return Outcome.of(lines, {"schedules": results}, wrong="; ".join(wrong))


def delayed(here: Here, lanes: Lanes) -> Lanes:
    """Return lanes whose tasks are late by chance, on every rank by other delays."""
    draws, kind = random.Random(here.info.rank), device_of(here.device)

    def delay() -> None:
        if draws.random() < 0.5:
            kind.delay(draws.random() * DELAY_S)

    return Delayed(lanes, delay)


def steps(here: Here, case: Case, machinery: Machinery) -> list[float]:
    """Return losses and gradient norms of some steps, and a sum over each of the parameters they leave."""
    ran = small_run(here, case, machinery)
    numbers = [each for number in range(here.scale.repeats) for each in ran.step(number)]
    left = [each.double().abs().sum() for each in ran.parameters().values()]
    return [float(each) for each in (*numbers, *left)]


def _off(plain: float, disturbed: float) -> float:
    """Return the relative difference; infinite if one is no number."""
    off = abs(disturbed - plain) / max(abs(plain), 1e-30)
    return off if math.isfinite(off) else math.inf


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let PyTorch choose kernels that repeat their bits, and fill new memory with NaN, while entered."""
    exact = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    filled = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling.fill_uninitialized_memory = True
    try:
        yield
    finally:
        filling.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(exact, warn_only=warns)
