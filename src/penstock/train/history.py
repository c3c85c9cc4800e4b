"""What the summary of a run needs to know about its steps: a few numbers per step, however long the run."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from statistics import fmean, median
from typing import Final

from penstock.train.metrics import StepMetrics

WARM_UP_STEPS: Final = 2
"""The first steps allocate buffers and open connections; medians leave them out."""

TYPICAL: Final = (
    "tokens_per_s",
    "iteration_s",
    "exposed_communication_s",
    "communication_s",
    "rank_rows_max_over_mean",
    "rows_crossing_nodes",
    "loads_in_common",
)
"""Numbers whose median a summary has; a number per layer counts as its mean over layers."""


class History:
    """The steps of one start: eight bytes per step for every number whose median is wanted.

    first, last_applied: of the steps that were not skipped; None as long as there is none. last: of all
    steps.
    """

    def __init__(self) -> None:
        self.first: StepMetrics | None = None
        self.last_applied: StepMetrics | None = None
        self.last: StepMetrics | None = None
        self.skipped = 0
        self._columns = {name: array("d") for name in TYPICAL}

    def add(self, metrics: StepMetrics) -> None:
        """Add one more step."""
        self.last = metrics
        if metrics.skipped:
            self.skipped += 1
        else:
            self.first = self.first or metrics
            self.last_applied = metrics
        for name, column in self._columns.items():
            column.append(_of_step(getattr(metrics, name)))

    def typical(self, name: str) -> float | None:
        """Return the median of a number over the steps that have it; None if none has."""
        column = self._columns[name]
        known = [value for value in column[WARM_UP_STEPS:] or column if not math.isnan(value)]
        return median(known) if known else None


def _of_step(value: float | Sequence[float] | None) -> float:
    """Return the value, the mean of values by layer, or NaN if the step does not have the number."""
    if isinstance(value, Sequence):
        return fmean(value) if value else math.nan
    return math.nan if value is None else value
