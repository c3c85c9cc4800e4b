"""The text of any benchmark's result, from the JSON that it printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.collectives import CollectivesResult, render_collectives
from benchmarks.dispatches import DispatchesResult, render_dispatches
from benchmarks.drift import DriftsResult, render_drifts
from benchmarks.layer import LayerBenchmark, render_layer
from benchmarks.published import PublishedResult, render_published
from benchmarks.restore import restore
from penstock.bench.table import render


def text_of(result: Mapping[str, Any]) -> str:
    """The tables that a benchmark prints beside this JSON object. Raises `KeyError` if keys are missing."""
    if "collectives" in result:
        return render_collectives(CollectivesResult.from_dict(result))
    if "dispatches" in result:
        return render_dispatches(DispatchesResult.from_dict(result))
    if "drifts" in result:
        return render_drifts(DriftsResult.from_dict(result))
    if "grids" in result:
        return render_published(PublishedResult.from_dict(result))
    if "layers" in result:
        return render_layer(LayerBenchmark.from_dict(result))
    return render(restore(result))
