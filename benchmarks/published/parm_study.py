"""Parm's layers under every system, by simulation: how much each gains, and which one is the fastest."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from benchmarks.published.parm import (
    BASELINE,
    FSMOE,
    PARM,
    S1,
    S2,
    WHOLE,
    ParmSpec,
    parm_layers,
    parm_problem,
    parm_seconds,
)
from benchmarks.published.study import SEED, LayerSeconds, in_processes

TESTBEDS: Final = ("parm-testbed-a", "parm-testbed-b")
SYSTEMS: Final = (S1, S2, PARM, WHOLE, FSMOE)
PUBLISHED_RANGE: Final = (1.13, 5.77)
"""Of Parm over DeepSpeed-MoE, over all layers."""

SAME: Final = 1e-9
"""Relative; durations that differ less are equal."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How many times as fast as the baseline a system is, over layers."""

    system: str
    mean: float
    least: float
    median: float
    most: float

    @staticmethod
    def of(system: str, ratios: Sequence[float]) -> Spread:
        mean = sum(ratios) / len(ratios)
        return Spread(system=system, mean=mean, least=min(ratios), median=median(ratios), most=max(ratios))


@dataclass(frozen=True, kw_only=True)
class ParmResult:
    """The layers of one testbed.

    Attributes:
        spreads: Speed-ups over the baseline.
        whole_wins: Shares of layers on which each of S1, S2 and FSMoE without pieces is the fastest; of equal
            ones the first counts.
        wins: The same with FSMoE in its pieces.
        right: The share on which Algorithm 1 takes the faster of S1 and S2, or one as fast.
        lost: How many times as long its choice takes elsewhere, at most.
        by_sharing: The spread of Parm by `tp x etp`.
    """

    cluster: str
    layers: int
    spreads: tuple[Spread, ...]
    whole_wins: Mapping[str, float]
    wins: Mapping[str, float]
    right: float
    lost: float
    by_sharing: tuple[Spread, ...]


def run_parm(cluster: str, *, sample: int | None = None, workers: int = 1) -> ParmResult:
    """Simulate the layers of one testbed.

    Args:
        cluster: The testbed.
        sample: How many layers to simulate, drawn with a fixed seed; None = all.
        workers: How many processes simulate.
    """
    specs = list(parm_layers(cluster))
    if sample is not None:
        specs = random.Random(SEED).sample(specs, min(sample, len(specs)))
    rows = in_processes(partial(_measured, cluster), specs, workers)
    chosen = [row[PARM] / min(row[S1], row[S2]) for row in rows]
    return ParmResult(
        cluster=cluster,
        layers=len(specs),
        spreads=tuple(Spread.of(name, [row[BASELINE] / row[name] for row in rows]) for name in SYSTEMS),
        whole_wins=_wins(rows, (S1, S2, WHOLE)),
        wins=_wins(rows, (S1, S2, FSMOE)),
        right=sum(ratio <= 1 + SAME for ratio in chosen) / len(rows),
        lost=max(1.0, *chosen),
        by_sharing=_by_sharing(specs, rows),
    )


def _measured(cluster: str, spec: ParmSpec) -> LayerSeconds:
    return parm_seconds(parm_problem(spec, cluster))


def _wins(rows: Sequence[LayerSeconds], systems: Sequence[str]) -> dict[str, float]:
    first = [
        next(name for name in systems if row[name] <= min(row[each] for each in systems) * (1 + SAME))
        for row in rows
    ]
    return {name: first.count(name) / len(rows) for name in systems}


def _by_sharing(specs: Sequence[ParmSpec], rows: Sequence[LayerSeconds]) -> tuple[Spread, ...]:
    gains: dict[tuple[int, int], list[float]] = {}
    for spec, row in zip(specs, rows, strict=True):
        gains.setdefault((spec.tp_size, spec.etp_size), []).append(row[BASELINE] / row[PARM])
    return tuple(Spread.of(f"{tp} x {etp}", ratios) for (tp, etp), ratios in sorted(gains.items()))
