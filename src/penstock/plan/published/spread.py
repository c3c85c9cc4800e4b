"""FSMoE's step 2: gradients that fit into no gap are spread over MoE parts, which get longer.

For a fixed degree, reductions beyond the idle time lengthen an MoE part second for second, exactly as they
would the tail. Therefore step 2 gains only where a smaller degree, with fewer start-ups, becomes the better
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.cost import AlphaBeta
from penstock.plan.published.degree import Backward, idle_s, makespan_s
from penstock.routing.sizes import Floats

SEED = 20250330
GENERATIONS, MEMBERS, MOST_MEMBERS = 60, 8, 160
"""Limits of the differential evolution: generations, members for every layer, and the most members in all."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """Step 2 as numbers. L gaps in backward order, R degrees.

    Attributes:
        busy_s: The network's own time in the MoE part, [L, R].
        floor_s: The time of the part without reductions, [L, R].
        filled_s: The reductions of step 1 in the MoE part, [L].
        left_bytes: What exists when the gap is over and fits into no later gap either, [L].
        made_last_bytes: The gradients that are made after the last gap.
    """

    busy_s: Floats
    floor_s: Floats
    filled_s: Floats
    left_bytes: Floats
    made_last_bytes: float
    all_reduce: AlphaBeta

    @staticmethod
    def of(backward: Backward, reduce_s: Sequence[float], left: Sequence[int]) -> Rest:
        parts = [gap.part for gap in backward.gaps]
        floor_s = np.array([[makespan_s(part, r) for r in backward.degrees] for part in parts])
        spare_s = np.array([[idle_s(part, r) for r in backward.degrees] for part in parts])
        return Rest(
            busy_s=floor_s - spare_s,
            floor_s=floor_s,
            filled_s=np.array(reduce_s),
            left_bytes=np.minimum.accumulate(np.array(left, dtype=float)[::-1])[::-1],
            made_last_bytes=float(sum(made.size_bytes for made in backward.gaps[-1].made)),
            all_reduce=backward.all_reduce,
        )

    def seconds(self, extra: Floats) -> Floats:
        """Return the seconds of MoE parts, at their best degrees, and the tail.

        Args:
            extra: The bytes added to every gap, [..., L].
        """
        reduce_s = self.filled_s + self._reduction_s(extra)
        parts_s = np.maximum(self.busy_s + reduce_s[..., None], self.floor_s).min(axis=-1)
        tail = self.left_bytes[-1] - extra.sum(axis=-1) + self.made_last_bytes
        total_s: Floats = parts_s.sum(axis=-1) + self._reduction_s(tail)
        return total_s

    def causal(self, shares: Floats) -> Floats:
        """Return bytes for each gap from shares of what exists and is left: [..., L] -> [..., L].

        All vectors that put nothing in before it is made can be reached: sums of x up to a gap are at most
        what was left there (in prefix sums, as in the published code).
        """
        extra, taken = np.zeros_like(shares), np.zeros(shares.shape[:-1])
        for gap in range(shares.shape[-1]):
            extra[..., gap] = shares[..., gap] * np.maximum(self.left_bytes[gap] - taken, 0.0)
            taken += extra[..., gap]  # what a gap takes is missing in the later ones, too
        return extra

    def _reduction_s(self, size_bytes: Floats) -> Floats:
        model = self.all_reduce
        return np.where(size_bytes >= 1, model.alpha_s + model.beta_s_per_byte * size_bytes, 0.0)


def evolved(rest: Rest) -> list[float]:
    """Return the result of differential evolution with a fixed seed: the same problem gives the same answer.

    No bytes in MoE parts are tried, too, so the answer is never worse than the tail.
    """
    from scipy.optimize import differential_evolution

    gaps, rng = len(rest.left_bytes), np.random.default_rng(SEED)
    # scipy takes `popsize` members for every gap, so a model of many layers brings fewer of its own
    few = "latinhypercube" if gaps <= MOST_MEMBERS else rng.random((MOST_MEMBERS, gaps))
    result = differential_evolution(
        lambda shares: rest.seconds(rest.causal(shares.T)),
        [(0.0, 1.0)] * gaps,
        maxiter=GENERATIONS,
        popsize=max(1, min(MEMBERS, MOST_MEMBERS // gaps)),
        init=few,
        rng=rng,
        x0=np.zeros(gaps),
        polish=False,
        vectorized=True,
        updating="deferred",
    )
    extra, tail = rest.causal(result.x), np.zeros(gaps)
    return [float(size) for size in (extra if rest.seconds(extra) <= rest.seconds(tail) else tail)]
