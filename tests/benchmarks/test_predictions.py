"""The table of predicted and measured iterations, from what comparisons print."""

from __future__ import annotations

import json

import pytest

from benchmarks.predictions import Prediction, PredictionsResult, predictions_of, render_predictions
from benchmarks.text import text_of


def test_a_comparison_becomes_rows_that_survive_json() -> None:
    case = {"label": "flowmoe", "simulated_s": 0.8, "simulated_interval_s": [0.75, 0.85]}
    plain = {
        "inter_rate_bit_per_s": 4e8,
        "cases": [
            {**case, "iteration_s_median": 0.84},
            {**case, "label": "penstock", "simulated_interval_s": None, "iteration_s_median": 0.76},
        ],
    }
    result = PredictionsResult(virtual=False, rows=tuple(predictions_of(plain)))
    assert PredictionsResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    text = text_of(result.to_dict())
    assert text == render_predictions(result)
    rows = [line.replace(" ", "") for line in text.splitlines()]
    assert "|400|flowmoe|800|750to850|840|+5.0%|" in rows
    assert "|400|penstock|800|-|760|-5.0%|" in rows
    assert text.endswith("mean error 5.0 %, largest 5.0 %; 1 of 2 medians lie in their interval")


def test_an_error_is_positive_where_steps_take_longer() -> None:
    row = Prediction(
        inter_rate_bit_per_s=1e9, schedule="x", predicted_s=1.0, interval_s=(0.9, 1.05), measured_s=1.1
    )
    assert row.error == pytest.approx(0.1) and not row.hits
