"""What tests of several commands share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import pytest

from penstock.plan.problem import Problem
from penstock.plan.search import FoundPlan, find_plan


@pytest.fixture
def stopped_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first search that shows progress gets a Ctrl-C."""
    first = chain([True], repeat(False))

    @contextmanager
    def stopping() -> Iterator[Callable[[object], None]]:
        yield lambda step: signal.raise_signal(signal.SIGINT) if next(first) else None

    monkeypatch.setattr("penstock.cli.plan_search._progress", stopping)


@pytest.fixture(scope="module")
def searched_once() -> Iterator[None]:
    """A search depends on nothing but what it is given, so tests that ask for the same one share it."""
    known: dict[object, FoundPlan] = {}

    def found(
        problem: Problem, *, memory_bytes: int | None, budget: float, ends: Callable[[], bool], **more: Any
    ) -> FoundPlan:
        asked = problem, memory_bytes, budget, ends(), more.get("starts"), more.get("effort")
        if asked not in known:
            known[asked] = find_plan(problem, memory_bytes=memory_bytes, budget=budget, ends=ends, **more)
        return known[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.cli.plan_search.find_plan", found)
        yield
