"""Routing without a router: which experts tokens prefer, and how many tokens of every sample go to which.

Shapes: D groups of ranks with the same samples, B samples of such a group, Y MoE layers, E experts (total),
L tokens per sample, k experts per token, S spots, N experts of a spot. Preferences are logits [D or 1, B or
1, Y, E]: with Zipf and hot spots all ranks and samples share them, with Dirichlet every sample has its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.apportion import Counts, apportion

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


@dataclass(frozen=True)
class ZipfDraw:
    """Popularity rank ** -exponent, with the ranks in a different order in every layer. [1, 1, Y, E]."""

    exponent: float
    sizes: RoutingSizes

    def __call__(self, rng: np.random.Generator) -> Logits:
        ranks = np.tile(np.arange(1.0, self.sizes.num_experts + 1), (self.sizes.moe_layers, 1))
        logits: Logits = -self.exponent * np.log(rng.permuted(ranks, axis=1))
        return logits[None, None]


@dataclass(frozen=True)
class LogNormalDraw:
    """Log-normal popularity with a Gini coefficient, in a different order in every layer. [1, 1, Y, E].

    The quantiles of the distribution are dealt out, so that no draw is more uneven than another. No expert
    can be chosen more than once by a token, so where that limits it, experts are as uneven as they can be.
    """

    gini: float
    sizes: RoutingSizes

    def __call__(self, rng: np.random.Generator) -> Logits:
        ranks = np.tile(self._width * self._quantiles, (self.sizes.moe_layers, 1))
        return rng.permuted(ranks, axis=1)[None, None]

    @property
    def _quantiles(self) -> Logits:
        quantile, experts = NormalDist().inv_cdf, self.sizes.num_experts
        return np.array([quantile((i + 0.5) / experts) for i in range(experts)])

    @cached_property
    def _width(self) -> float:
        """The standard deviation of logarithms."""
        normal_E, least, most = self._quantiles, 0.0, WIDEST
        for _ in range(HALVINGS):
            middle = (least + most) / 2
            below = gini_of(inclusion(middle * normal_E, self.sizes.top_k)) < self.gini
            least, most = (middle, most) if below else (least, middle)
        return least


def gini_of(rows_E: npt.NDArray[Any]) -> float:
    """Return the Gini coefficient: half the mean difference of two experts, over the mean."""
    ordered, count = np.sort(rows_E), len(rows_E)
    ranks = 2 * np.arange(1, count + 1) - count - 1
    return float((ranks * ordered).sum() / (count * ordered.sum()))


@dataclass(frozen=True)
class DirichletDraw:
    """A symmetric Dirichlet distribution for every sample and layer, [D, B, Y, E].

    Drawn as logarithms of gamma numbers by G(a) = G(a + 1) * U ** (1 / a), which never becomes zero, even for
    a small concentration.
    """

    concentration: float
    sizes: RoutingSizes

    def __call__(self, rng: np.random.Generator) -> Logits:
        larger = rng.standard_gamma(self.concentration + 1, self.sizes.shape)
        uniform = rng.random(self.sizes.shape)  # in [0, 1), so 1 - uniform has a logarithm
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
    """Return the probability that an expert is among a token's `top_k`.

    In proportion to exp(logit), except that no probability can exceed 1: the excess goes to the other experts
    in proportion.

    The result has the shape of `logits`, and sums to top_k over experts.
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


PREFERENCES, CHANCE = 0, 1
"""Streams of random numbers from one seed, so that neither depends on how much the other is drawn from."""


@dataclass(frozen=True, kw_only=True)
class RoutingSizes:
    """The batch that is routed.

    Attributes:
        groups: The number of groups of ranks with the same samples; a group is one rank, unless ranks share
            attention.
        samples: The samples of such a group.
        moe_layers: The number of layers that have a router.
        holders: The number of ranks (where ranks share every expert, of groups of these) over which experts
            are spread evenly.
    """

    groups: int
    samples: int
    seq_len: int
    moe_layers: int
    num_experts: int
    top_k: int
    holders: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.top_k <= self.num_experts, "MoEConfig has checked it"
        assert self.num_experts % self.holders == 0, "the layout has checked it"

    @property
    def copies(self) -> int:
        """Token copies of one sample in one layer."""
        return self.seq_len * self.top_k

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of what `Routing.counts` returns: [D, B, Y, E]."""
        return self.groups, self.samples, self.moe_layers, self.num_experts


class Routing(Protocol):
    """Destinations of tokens. Every rank computes them and gets the same ones: nothing is exchanged."""

    def counts(self, step: int) -> Counts:
        """Return the token copies of every sample for every expert, int64 [D, B, Y, E]; `step` counts from 0.

        The counts of a sample in a layer sum to L * k, and none is over L: a token's experts are distinct.
        """
        ...


@dataclass(frozen=True)
class GeneratedRouting:
    """Routing by preferences and chance; a function of the seed and the step alone."""

    sizes: RoutingSizes
    preferences: Preferences
    seed: int

    def counts(self, step: int) -> Counts:
        """Draw every expert's number of each sample's tokens by chance, then correct the sums."""
        sizes = self.sizes
        probability = inclusion(self.preferences.at(step), sizes.top_k)
        rng = np.random.default_rng([self.seed, CHANCE, step])
        drawn = rng.binomial(sizes.seq_len, probability, size=sizes.shape).astype(np.int64)
        # Changed as little as needed to have the sum, and to stay from 0 to the tokens of a sample.
        missing = sizes.copies - drawn.sum(axis=-1)
        added = apportion(sizes.seq_len - drawn, np.maximum(missing, 0))
        return drawn + added - apportion(drawn, np.maximum(-missing, 0))


STAYS = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class HotSpot:
    """Preferences that give the experts of one spot together `share` of the choices, the others the rest.

    Both parts are even.

    Attributes:
        spots_SN: The possible spots.
        first_Y: The spot of every layer at the beginning.
        period: The number of steps for which it stays at a spot; 0 = permanently.
    """

    spots_SN: Counts
    num_experts: int
    first_Y: Counts  # the suffix is its shape
    share: float
    period: int = STAYS

    def at(self, step: int) -> Logits:
        """Return the logits of a step, counted from 0."""
        moved = step // self.period if self.period else 0
        logits: Logits = np.zeros((1, 1, len(self.first_Y), self.num_experts))
        for layer, first in enumerate(self.first_Y):
            experts = self.spots_SN[(first + moved) % len(self.spots_SN)]
            others = self.num_experts - len(experts)
            if others:  # the logit at which these get `share`, while all others have 0
                odds = self.share / (1 - self.share)
                logits[0, 0, layer, experts] = math.log(odds * others / len(experts))
        return logits


@dataclass(frozen=True)
class Burst:
    """Even preferences, and those of `hot` in the last `length` steps of every `period`."""

    hot: HotSpot
    period: int
    length: int

    def at(self, step: int) -> Logits:
        """Return the logits of a step, counted from 0."""
        logits = self.hot.at(step)
        return logits if step % self.period >= self.period - self.length else np.zeros_like(logits)
