"""Preferences with a hot spot: some experts that get a given part of everything, for some time.

Shapes: S spots, N experts of a spot, Y MoE layers, E experts. Preferences are logits [1, 1, Y, E].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.workloads.apportion import Counts
from penstock.workloads.preferences import Logits

STAYS = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class HotSpot:
    """The experts of one spot together get `share` of what is chosen, the others the rest, evenly.

    spots_SN: the places where it can be. first_Y: where it is in every layer at the beginning. period: the
    number of steps that it stays at a spot; 0 = for good.
    """

    spots_SN: Counts
    num_experts: int
    first_Y: Counts  # the suffix is its shape
    share: float
    period: int = STAYS

    def at(self, step: int) -> Logits:
        """Logits of a step, counted from 0."""
        moved = step // self.period if self.period else 0
        logits: Logits = np.zeros((1, 1, len(self.first_Y), self.num_experts))
        for layer, first in enumerate(self.first_Y):
            experts = self.spots_SN[(first + moved) % len(self.spots_SN)]
            logits[0, 0, layer, experts] = self._heat(len(experts))
        return logits

    def _heat(self, experts: int) -> float:
        """The logit at which `experts` experts together get `share`, while all others have 0."""
        others = self.num_experts - experts
        return math.log(self.share / (1 - self.share) * others / experts) if others else 0.0


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Even, and in the last `length` steps of every `period` as `hot` says."""

    hot: HotSpot
    period: int
    length: int

    def at(self, step: int) -> Logits:
        """Logits of a step, counted from 0."""
        logits = self.hot.at(step)
        return logits if step % self.period >= self.period - self.length else np.zeros_like(logits)


def each_expert(num_experts: int) -> Counts:
    """Every expert is a spot, [E, 1]."""
    return np.arange(num_experts)[:, None]


def each_holder(num_experts: int, holders: int) -> Counts:
    """The experts of every rank are a spot, [holders, E / holders]; they are spread evenly, in order."""
    return np.arange(num_experts).reshape(holders, -1)


def starts(rng: np.random.Generator, spots: int, moe_layers: int) -> Counts:
    """Where a hot spot begins in every layer, at different places as long as there are any, [Y]."""
    start: Counts = rng.permutation(spots)[np.arange(moe_layers) % spots]
    return start
