"""Finds ranks whose computation takes longer than that of the others, from when their tasks ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Annotated, Final

from penstock.config import Within, check_bounds
from penstock.config.bounds import MOST_RANKS
from penstock.graph import Phase
from penstock.ops import OPS
from penstock.ops.blocks import EXPERTS
from penstock.trace.records import TaskRecord

SLOW: Final = 1.5
"""A rank that takes less than this many times as long as the median rank is no straggler."""

Kind = tuple[str, Phase]
"""Op and phase of computation."""

Rank = Annotated[int, Within(0, MOST_RANKS, "ranks count up from 0")]
Factor = Annotated[float, Within(1, 1e9, "a straggler takes longer than others")]


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that computes slowly. factor: how many times as long as the median rank it takes."""

    rank: Rank
    factor: Factor

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def words(self) -> str:
        """The straggler in words, as part of a sentence."""
        return f"computation on rank {self.rank} takes {self.factor:.2f}x as long as on the median rank"


def typical_seconds(records: Iterable[TaskRecord]) -> dict[Kind, float]:
    """Return the median duration of every kind of computation that is the same on all ranks.

    Routed experts are left out: how many rows they get depends on the routing.
    """
    kinds: dict[Kind, list[float]] = defaultdict(list)
    for record in records:
        if record.lane.computes and not _is_routed(record.task.op):
            kinds[record.task.op, record.task.phase].append(record.duration_s)
    return {kind: median(seconds) for kind, seconds in kinds.items()}


def stragglers(everyone: Sequence[Mapping[Kind, float]]) -> tuple[Straggler, ...]:
    """Return the ranks that compute slowly, in their order. everyone: by rank, `typical_seconds` of a plan.

    Of an even number of ranks the faster of the middle two is the median: of two ranks the slower one can be
    named.
    """
    totals = [sum(seconds.values()) for seconds in everyone]
    usual_s = median_low(totals)
    if usual_s <= 0:
        return ()
    factors = ((rank, total_s / usual_s) for rank, total_s in enumerate(totals))
    return tuple(Straggler(rank=rank, factor=factor) for rank, factor in factors if factor >= SLOW)


def _is_routed(op: str) -> bool:
    return op in OPS and OPS[op].gradients == EXPERTS
