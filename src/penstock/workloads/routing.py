"""Routing without a router: how many tokens of every sample go to which expert, in every step.

Shapes: D groups of ranks with the same samples, B samples of such a group, Y MoE layers, E experts (total),
L tokens per sample, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.apportion import Counts, apportion
from penstock.workloads.preferences import Preferences, inclusion

PREFERENCES, CHANCE = 0, 1
"""Streams of random numbers from one seed, so that neither depends on how much the other is drawn from."""


@dataclass(frozen=True, kw_only=True)
class RoutingSizes:
    """The batch that is routed.

    groups: of ranks with the same samples; a rank alone, unless ranks share attention. samples: of such a
    group. moe_layers: the number of layers that have a router. holders: the number of ranks (where ranks
    share every expert, of groups of these) over which experts are spread evenly.
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
