"""How much longer tasks take in real steps than by themselves: alone, and beside others.

A task that has contention for a share of its time (computation for a transfer, traffic for computation) takes
`alone * (1 + share * (beside - 1))` times its seconds by the model. Both factors are fitted to steps that
really ran. Other programs may lengthen any of their tasks, so the fit is of least absolute deviations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from penstock.cost.cluster_file import StepFit
from penstock.routing.sizes import Floats

CONTRAST = 0.3
"""Least difference between shares of contention from which its effect can be told."""

MOST_CONTENDED = 3.0
"""Largest factor of contention: one that seems to more than triple a duration has another cause."""

SOLO = (0.5, 2.0)
MOST_SCATTER = 0.25
"""Limits beyond which tasks' scatter, or their time alone, tells nothing about the next step."""

LEAST_SIGHTINGS = 4
NORMAL = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""

PASSES = 50
NEAR = 1e-4
"""Deviation below which all deviations have equal weight."""

INTERVAL = 1.96
"""Standard deviations on either side within which 95 % of normally distributed steps lie."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A task in a real step.

    Attributes:
        modelled_s: The seconds of the task alone, by the model.
        ratio: Measured over modelled seconds.
        share: The share of its time in which the other side was busy, too.
    """

    modelled_s: float
    ratio: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Contention:
    """The two factors of one kind of task.

    Attributes:
        solo: Seconds alone in a step over seconds by the model.
        contended: Seconds beside others all the time over seconds alone.
        scatter: The typical relative distance of a task from these factors.
    """

    solo: float = 1.0
    contended: float = 1.0
    scatter: float = 0.0

    @property
    def words(self) -> str:
        """Why the factors are not to be used; "" if they are."""
        if self.scatter > MOST_SCATTER:
            return f"it differs by {100 * self.scatter:.0f} % from step to step"
        if not SOLO[0] <= self.solo <= SOLO[1]:
            return f"it takes {self.solo:.2f} times as long in real steps, too far off to be sure"
        return ""

    def ratio(self, share: float) -> float:
        """Return seconds in a step over seconds alone, with contention for this share of the time."""
        return self.solo * (1 + share * (self.contended - 1))


def fit_contention(seen: Sequence[Sighting], usual: float = 1.0) -> Contention | None:
    """Return the factors that explain the tasks; None if there are too few tasks.

    A longer task counts for more, as it does in a step.

    Args:
        usual: The factor of contention where shares are too similar to tell it.
    """
    if len(seen) < LEAST_SIGHTINGS:
        return None
    shares, ratios, weights = (
        np.array([getattr(sighting, name) for sighting in seen]) for name in ("share", "ratio", "modelled_s")
    )
    low, high = (_quantile(shares, weights, part) for part in (0.1, 0.9))
    beside = usual
    if high - low >= CONTRAST:  # the line of least absolute deviations, by reweighted least squares
        matrix, now = np.stack([np.ones_like(shares), shares], axis=1), weights
        line = np.array([1.0, 0.0])
        for _ in range(PASSES):
            root = np.sqrt(now)
            line = np.linalg.lstsq(matrix * root[:, None], ratios * root, rcond=None)[0]
            now = weights / np.maximum(np.abs(ratios - matrix @ line), NEAR)
        beside = 1 + float(line[1] / line[0]) if line[0] > 0 else MOST_CONTENDED
    beside = min(max(beside, 1.0), MOST_CONTENDED)
    expected = 1 + shares * (beside - 1)
    alone = _quantile(ratios / expected, weights, 0.5)
    missed = np.abs(ratios / (alone * expected) - 1)
    return Contention(solo=alone, contended=beside, scatter=NORMAL * _quantile(missed, weights, 0.5))


def _quantile(values: Floats, weights: Floats, part: float) -> float:
    """Return the least value up to which values have this part of the weight."""
    return float(np.quantile(values, part, weights=weights, method="inverted_cdf"))


def fit_steps(ratios: Sequence[Sequence[float]]) -> StepFit:
    """Return what the ratios of measured to simulated whole steps say of the next step.

    Every plan counts once in the typical ratio. The interval is for a step of another plan: it covers the
    differences between plans, and the scatter of steps of one plan.

    Args:
        ratios: The ratio of every step, by plan.
    """
    plans = [median(map(math.log, steps)) for steps in ratios]
    middle = median(plans)
    left = [math.log(ratio) - middle for steps in ratios for ratio in steps]
    typical = NORMAL * median(map(abs, left))
    between = math.sqrt(sum((plan - middle) ** 2 for plan in plans) / max(1, len(plans) - 1))
    width = INTERVAL * max(typical, between) * math.sqrt(1 + 1 / len(left))
    return StepFit(
        ratio=math.exp(middle), low=math.exp(middle - width), high=math.exp(middle + width), steps=len(left)
    )
