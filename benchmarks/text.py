"""The text of any benchmark's result, from the JSON that it printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from benchmarks.collectives import CollectivesResult, render_collectives
from benchmarks.drift import DriftsResult, render_drifts
from benchmarks.interpreter import InterpreterResult, render_interpreter
from benchmarks.layer import LayerResult, render_layers
from benchmarks.lossy import LossyResult, render_lossy
from benchmarks.planners import PlannersResult, render_planners
from benchmarks.predictions import PredictionsResult, render_predictions
from benchmarks.restore import restore
from benchmarks.sft.result import SftResult
from benchmarks.solvers import SolversResult, render_solvers
from benchmarks.trained import TrainedResult, render_trained
from penstock.lab.bench.result import render

RENDERERS: Final[Mapping[str, Callable[[Mapping[str, Any]], str]]] = {
    "collectives": lambda plain: render_collectives(CollectivesResult.from_dict(plain)),
    "drifts": lambda plain: render_drifts(DriftsResult.from_dict(plain)),
    "interpreter": lambda plain: render_interpreter(InterpreterResult.from_dict(plain)),
    "layers": lambda plain: render_layers(LayerResult.from_dict(plain)),
    "lossy": lambda plain: render_lossy(LossyResult.from_dict(plain)),
    "predictions": lambda plain: render_predictions(PredictionsResult.from_dict(plain)),
    "planners": lambda plain: render_planners(PlannersResult.from_dict(plain)),
    "sft": lambda plain: SftResult.from_dict(plain).render(),
    "solved": lambda plain: render_solvers(SolversResult.from_dict(plain)),
    "trained": lambda plain: render_trained(TrainedResult.from_dict(plain)),
}
"""By the key that only this benchmark's JSON object has."""


def text_of(result: Mapping[str, Any]) -> str:
    """Return the tables that a benchmark prints beside this JSON object.

    Raises:
        KeyError: If keys are missing.
    """
    for key, text in RENDERERS.items():
        if key in result:
            return text(result)
    return render(restore(result))
