"""Ways to dispatch, flat and hierarchical: which is the fastest, and whether fitted links say so."""

from benchmarks.dispatches.measure import (
    FEW_LARGE,
    MANY_SMALL,
    ROW_BYTES,
    SIZES_BYTES,
    DispatchTimes,
    Trip,
    TripTimes,
    even_sizes,
    leg_models,
    measure_dispatches,
    predict,
    runnable,
    summarise_dispatches,
)
from benchmarks.dispatches.render import render_dispatches
from benchmarks.dispatches.result import DispatchesResult

__all__ = [
    "FEW_LARGE",
    "MANY_SMALL",
    "ROW_BYTES",
    "SIZES_BYTES",
    "DispatchTimes",
    "DispatchesResult",
    "Trip",
    "TripTimes",
    "even_sizes",
    "leg_models",
    "measure_dispatches",
    "predict",
    "render_dispatches",
    "runnable",
    "summarise_dispatches",
]
