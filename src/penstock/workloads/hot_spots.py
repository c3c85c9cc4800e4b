"""Preferences with a hot spot: some experts that get a given part of all token copies, for some time.

Shapes: S spots, N experts of a spot, Y MoE layers, E experts. Preferences are logits [1, 1, Y, E].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.apportion import Counts
from penstock.workloads.preferences import Logits

STAYS = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class HotSpot:
    """Preferences that give the experts of one spot together `share` of the choices, the others the rest.

    Both parts are even. spots_SN: the possible spots. first_Y: the spot of every layer at the beginning.
    period: the number of steps for which it stays at a spot; 0 = permanently.
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
            logits[0, 0, layer, experts] = self._heat(len(experts))
        return logits

    def _heat(self, experts: int) -> float:
        """Return the logit at which `experts` experts together get `share`, while all others have 0."""
        others = self.num_experts - experts
        return math.log(self.share / (1 - self.share) * others / experts) if others else 0.0


@dataclass(frozen=True, kw_only=True)
class Burst:
    """Even preferences, and those of `hot` in the last `length` steps of every `period`."""

    hot: HotSpot
    period: int
    length: int

    def at(self, step: int) -> Logits:
        """Return the logits of a step, counted from 0."""
        logits = self.hot.at(step)
        return logits if step % self.period >= self.period - self.length else np.zeros_like(logits)


def each_expert(num_experts: int) -> Counts:
    """Return every expert as a spot, [E, 1]."""
    return np.arange(num_experts)[:, None]


def each_holder(num_experts: int, holders: int) -> Counts:
    """Return the experts of every rank as a spot, [holders, E / holders]; they are spread in order."""
    return np.arange(num_experts).reshape(holders, -1)


def starts(rng: np.random.Generator, spots: int, moe_layers: int) -> Counts:
    """Return the first spot of every layer, [Y]: different ones as long as there are any left."""
    start: Counts = rng.permutation(spots)[np.arange(moe_layers) % spots]
    return start
