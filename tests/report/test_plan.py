"""The table of plans."""

from __future__ import annotations

import pytest

from penstock.decision import Decision
from penstock.plan import evaluate
from penstock.report.plan import _table
from tests.plan.problems import problem


@pytest.mark.parametrize(("width", "shown"), [(110, True), (60, False)])
def test_only_columns_that_are_shown_are_explained(width: int, shown: bool) -> None:
    """In a narrow terminal some are left out."""
    each = problem()
    found = [evaluate(each, Decision(schedule=name)) for name in ("flowmoe", "moe_pipeline")]
    head, *_, legend = _table(found, width, dispatches=False).splitlines()
    assert ("bound" in head.split()) is shown
    assert ("bound: lower bound" in legend) is shown
    assert "chunks: forward/backward" in legend


def test_one_plan_is_marked_also_where_another_takes_as_long() -> None:
    each = problem()
    found = [evaluate(each, Decision(schedule="moe_pipeline")) for _ in range(2)]
    _, first, second, _ = _table(found, 110, dispatches=False).splitlines()
    assert first.startswith("→") and not second.startswith("→") and "+0.0 %" in second
