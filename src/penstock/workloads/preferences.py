"""The experts that tokens prefer, and how these preferences move from step to step.

Shapes: D groups of ranks with the same samples, B samples of each, Y MoE layers, E experts. Preferences are
logits [D or 1, B or 1, Y, E]: with Zipf all ranks and samples share them, with Dirichlet every sample has its
own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float64]


WIDEST, HALVINGS = 30.0, 50
"""Standard deviations beyond which logarithms of popularity change no coefficient, and steps of a search."""


class Preferences(Protocol):
    """The experts that tokens prefer in every step."""

    def at(self, step: int) -> Logits:
        """Return the logits of a step, counted from 0: the same on all ranks and in any order of calls."""
        ...


@dataclass(frozen=True)
class OfLayers:
    """The preferences of some layers."""

    whole: Preferences
    layers: tuple[int, ...]

    def at(self, step: int) -> Logits:
        """Return the logits of a step, counted from 0."""
        logits: Logits = self.whole.at(step)[:, :, list(self.layers)]
        return logits


class Draw(Protocol):
    """Draws preferences from a generator alone."""

    def __call__(self, rng: np.random.Generator) -> Logits: ...


@dataclass(frozen=True, kw_only=True)
class ZipfDraw:
    """Popularity rank ** -exponent, with the ranks in a different order in every layer. [1, 1, Y, E]."""

    exponent: float
    moe_layers: int
    num_experts: int

    def __call__(self, rng: np.random.Generator) -> Logits:
        ranks = np.tile(np.arange(1.0, self.num_experts + 1), (self.moe_layers, 1))
        logits: Logits = -self.exponent * np.log(rng.permuted(ranks, axis=1))
        return logits[None, None]


@dataclass(frozen=True, kw_only=True)
class LogNormalDraw:
    """Log-normal popularity with a Gini coefficient, in a different order in every layer. [1, 1, Y, E].

    The quantiles of the distribution are dealt out, so that no draw is more uneven than another. No expert
    can be chosen more than once by a token, so where that limits it, experts are as uneven as they can be.
    """

    gini: float
    moe_layers: int
    num_experts: int
    top_k: int

    def __call__(self, rng: np.random.Generator) -> Logits:
        ranks = np.tile(self._width * self._quantiles, (self.moe_layers, 1))
        return rng.permuted(ranks, axis=1)[None, None]

    @property
    def _quantiles(self) -> Logits:
        quantile = NormalDist().inv_cdf
        return np.array([quantile((i + 0.5) / self.num_experts) for i in range(self.num_experts)])

    @cached_property
    def _width(self) -> float:
        """The standard deviation of logarithms."""
        normal_E, least, most = self._quantiles, 0.0, WIDEST
        for _ in range(HALVINGS):
            middle = (least + most) / 2
            below = gini_of(inclusion(middle * normal_E, self.top_k)) < self.gini
            least, most = (middle, most) if below else (least, middle)
        return least


def gini_of(rows_E: npt.NDArray[Any]) -> float:
    """Return the Gini coefficient: half the mean difference of two experts, over the mean."""
    ordered, count = np.sort(rows_E), len(rows_E)
    ranks = 2 * np.arange(1, count + 1) - count - 1
    return float((ranks * ordered).sum() / (count * ordered.sum()))


@dataclass(frozen=True, kw_only=True)
class DirichletDraw:
    """A symmetric Dirichlet distribution for every sample and layer. shape: [D, B, Y, E].

    Drawn as logarithms of gamma numbers by G(a) = G(a + 1) * U ** (1 / a), which never becomes zero, even for
    a small concentration.
    """

    concentration: float
    shape: tuple[int, int, int, int]

    def __call__(self, rng: np.random.Generator) -> Logits:
        larger = rng.standard_gamma(self.concentration + 1, self.shape)
        uniform = rng.random(self.shape)  # in [0, 1), so 1 - uniform has a logarithm
        smallest = np.finfo(np.float64).tiny
        return np.log(np.maximum(larger, smallest)) + np.log1p(-uniform) / self.concentration


@dataclass(frozen=True, kw_only=True)
class Movement:
    """Preferences of every step: drawn once, drifting, drawn again at a change.

    Drift turns from one draw to the next: cos(angle) * this + sin(angle) * next, a quarter turn in 1 / drift
    steps. Thus preferences move continuously and stay as uneven on the way as the draws are.
    """

    draw: Draw
    seed: tuple[int, ...]
    drift: float = 0.0
    change_at: int | None = None

    def at(self, step: int) -> Logits:
        """Return the logits of a step, counted from 0; a function of the seed and the step alone."""
        changed = self.change_at is not None and step >= self.change_at
        position = self.drift * step
        index = math.floor(position)
        here = self._drawn(changed, index)
        if position == index:
            return here
        angle = (position - index) * math.pi / 2
        return math.cos(angle) * here + math.sin(angle) * self._drawn(changed, index + 1)

    def _drawn(self, changed: bool, index: int) -> Logits:
        """Return draw number `index` before or after the change, with its mean over experts set to zero."""
        logits = self.draw(np.random.default_rng([*self.seed, int(changed), index]))
        centred: Logits = logits - logits.mean(axis=-1, keepdims=True)
        return centred


def inclusion(logits: Logits, top_k: int) -> npt.NDArray[np.float64]:
    """Return the probability that an expert is among a token's `top_k`. Shaped as `logits`, sums to top_k.

    In proportion to exp(logit), except that no probability can exceed 1: the excess goes to the other experts
    in proportion.
    """
    if logits.shape[-1] == top_k:
        return np.ones_like(logits)
    sure = np.zeros(logits.shape, dtype=bool)
    chosen = np.zeros_like(logits)
    for _ in range(top_k):  # every round makes at least one more expert sure, or is the last
        free = np.where(sure, -np.inf, logits)
        weights = np.exp(free - free.max(axis=-1, keepdims=True))
        left = top_k - sure.sum(axis=-1, keepdims=True)
        chosen = np.where(sure, 1.0, weights / weights.sum(axis=-1, keepdims=True) * left)
        over = chosen >= 1
        if (over == sure).all():
            break
        sure = over
    return np.minimum(chosen, 1.0)
