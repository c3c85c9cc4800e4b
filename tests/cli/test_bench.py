"""`penstock bench` on real processes."""

from __future__ import annotations

import json

import pytest

from tests.support.runs import run

SMALL = (
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_layers=2",
    "model.seq_len=16",
    "moe.moe_ffn_hidden_size=32",
    "compare.rounds=3",
)


@pytest.mark.slow
def test_three_schedules_in_turns() -> None:
    result = run("bench", "--json", *SMALL)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [case["schedule"] for case in found["cases"]] == ["sequential", "moe_pipeline", "flowmoe"]
    for case in found["cases"]:
        assert len(case["iterations_s"]) == 3
        assert case["iteration_s_median"] > 0 and case["simulated_s"] > 0
        assert 0 <= case["overhead_s"] < case["iteration_s_median"]
    assert found["cases"][0]["speedup"] == 1.0


def test_an_unknown_schedule_is_named() -> None:
    result = run("bench", 'compare.schedules=["sequential","flow"]')
    assert result.returncode == 2
    assert "compare.schedules" in result.stderr and "flowmoe" in result.stderr
