"""A straight line through measured durations, some of which may be wrong.

An error is weighed by the square root of the duration: a compromise between seconds, where the largest size
alone would count, and shares, where a start-up that other programs disturb would bend the line at the sizes
that take most of a step. Another program makes a duration longer by any amount, so up to a quarter of the
points are left out if they do not fit the others (least trimmed deviations, then least squares over the
points near that line).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from penstock.routing.sizes import Floats

Flags = npt.NDArray[np.bool_]

LEAST_POINTS = 5
"""Least number of points among which a wrong one can be told."""

MOST_PAIRS = 2000
KEPT = 0.75
"""Least share of the points that is used."""

CUT = 3.5
NORMAL = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""

NEAR = 0.05
"""Relative distance from the line within which a point is never left out."""

PASSES = 10
FLAT = 0.01
"""Share of the typical duration that is attributed to the work where durations do not grow with it."""


@dataclass(frozen=True)
class LineFit:
    """Line `t = alpha_s + beta * n`. alpha_s >= 0, beta > 0.

    Attributes:
        r2: The share of the variance that the line explains, of the points used: 1 for a perfect line, 0 for
            one that explains no more than the mean does.
        residual: The median distance of all points from the line, relative to it.
        used: For every point, whether it was used for the line.
    """

    alpha_s: float
    beta: float
    r2: float
    residual: float
    used: tuple[bool, ...]

    def seconds(self, size: float) -> float:
        return self.alpha_s + self.beta * size


def fit_line(points: Sequence[tuple[float, float]], *, trusted: int = 0) -> LineFit:
    """Fit a line through points (size, seconds), at least one, with sizes and seconds above 0.

    Args:
        trusted: The number of the largest sizes that are never left out, where they alone tell the slope.
    """
    assert points, "a line needs a point"
    sizes, times = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    assert min(sizes.min(), times.min()) > 0, points
    used, sure = np.ones(len(sizes), dtype=bool), np.argsort(np.argsort(-sizes, kind="stable")) < trusted
    line = _least_squares(sizes, times)
    if len(set(sizes)) > 2 and len(sizes) >= LEAST_POINTS:
        line = _most_agreed(sizes, times, sure, line)
        for _ in range(PASSES):
            # The points through which a line is fitted next.
            distances = _distances(line, sizes, times)
            least = float(np.sort(distances)[_kept(len(distances)) - 1])
            scattered = distances <= max(CUT * NORMAL * float(np.median(distances)), least)
            near: Flags = scattered | (_shares(line, sizes, times) <= NEAR)
            nearer = near | sure
            line = _least_squares(sizes[nearer], times[nearer])
            if np.array_equal(nearer, used):
                break
            used = nearer
    errors, fitted = times[used] - line[0] - line[1] * sizes[used], times[used]
    left, squares = float(np.sum(errors**2)), float(np.sum(fitted**2))
    spread = float(np.sum((fitted - fitted.mean()) ** 2))
    if spread <= 1e-12 * squares:  # equal durations: nothing to explain
        r2 = 1.0 if left <= 1e-3 * squares else 0.0
    else:
        r2 = max(0.0, 1.0 - left / spread)
    residual = float(np.median(_shares(line, sizes, times)))
    return LineFit(*line, r2, residual, tuple(map(bool, used)))


def _most_agreed(
    sizes: Floats, times: Floats, sure: Flags, usual: tuple[float, float]
) -> tuple[float, float]:
    """Return the line, through two points or the usual one, to which three quarters of points are nearest.

    sure: points that belong to these three quarters in any case.
    """
    pairs = [pair for pair in combinations(range(len(sizes)), 2) if sizes[pair[0]] != sizes[pair[1]]]
    first, second = np.array(pairs[:: -(-len(pairs) // MOST_PAIRS)]).T
    betas = (times[second] - times[first]) / (sizes[second] - sizes[first])
    alphas = times[first] - betas * sizes[first]
    allowed = (betas > 0) & (alphas > -1e-9 * times[first])
    lines = [(max(float(a), 0.0), float(b)) for a, b in zip(alphas[allowed], betas[allowed], strict=True)]
    others = max(0, _kept(len(sizes)) - int(sure.sum()))

    def missed(line: tuple[float, float]) -> float:
        distances = _distances(line, sizes, times)
        return float(distances[sure].sum() + np.sort(distances[~sure])[:others].sum())

    return min([usual, *lines], key=missed)


def _kept(count: int) -> int:
    return math.ceil(KEPT * count)


def _shares(line: tuple[float, float], sizes: Floats, times: Floats) -> Floats:
    """Return the distance of every point from the line, over the line."""
    expected_s = line[0] + line[1] * sizes
    shares: Floats = np.abs(times - expected_s) / expected_s
    return shares


def _distances(line: tuple[float, float], sizes: Floats, times: Floats) -> Floats:
    """Return the error of every point as it is weighed."""
    distances: Floats = np.abs(times - line[0] - line[1] * sizes) / np.sqrt(times)
    return distances


def _least_squares(sizes: Floats, times: Floats) -> tuple[float, float]:
    """Return start-up and slope by least squares, neither of them negative."""
    largest, weights = sizes.max(), 1 / np.sqrt(times)
    if sizes.min() == largest:
        return 0.0, float(np.median(times) / largest)
    matrix = np.stack([weights, sizes / largest * weights], axis=1)
    alpha_s, slope_s = _not_negative(matrix, times * weights)
    flat_s = FLAT * float(np.median(times))
    if slope_s < flat_s:  # noise beats the slope
        return float(np.median(times)) - flat_s, flat_s / float(largest)
    return float(alpha_s), float(slope_s / largest)


def _not_negative(matrix: Floats, values: Floats) -> tuple[float, float]:
    """Solve least squares with two unknowns, neither of them negative; all given numbers are positive.

    Where the free minimum has a negative unknown, that unknown is zero. scipy's `nnls` finds the same, and
    takes longer to load than all measuring: every rank of a run that profiles would wait for it.
    """
    both = np.linalg.lstsq(matrix, values, rcond=None)[0]
    if both.min() >= 0:
        return float(both[0]), float(both[1])
    alone = (matrix.T @ values) / np.square(matrix).sum(axis=0)
    return (float(alone[0]), 0.0) if both[1] < 0 else (0.0, float(alone[1]))
