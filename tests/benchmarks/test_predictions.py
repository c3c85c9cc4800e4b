"""The table of predicted and measured iterations, from what comparisons print."""

from __future__ import annotations

from benchmarks.predictions import PredictionsResult, predictions_of, render_predictions


def test_a_comparison_becomes_rows() -> None:
    case = {"label": "flowmoe", "simulated_s": 0.8, "simulated_interval_s": [0.75, 0.85]}
    plain = {
        "inter_rate_bit_per_s": 4e8,
        "cases": [
            {**case, "iteration_s_median": 0.84},
            {**case, "label": "penstock", "simulated_interval_s": None, "iteration_s_median": 0.76},
        ],
    }
    result = PredictionsResult(virtual=False, rows=tuple(predictions_of(plain)))
    text = render_predictions(result)
    rows = [line.replace(" ", "") for line in text.splitlines()]
    assert "|400|flowmoe|800|750to850|840|+5.0%|" in rows
    assert "|400|penstock|800|-|760|-5.0%|" in rows
    assert text.endswith("mean error 5.0 %, largest 5.0 %; 1 of 2 medians lie in their interval")
