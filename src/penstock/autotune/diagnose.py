"""Finds which durations have changed, from task records before and now. Pure: no torch, no communication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from penstock.cost.measured import Kind
from penstock.graph import Lane, Task
from penstock.mesh import Axes
from penstock.trace import TaskRecord
from penstock.words import lane_words

MOST_NAMED = 8
"""More ranks than this are counted in messages, with only the first ones named."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Ratios of task durations, now over before.

    transfers: by lane, for lanes on which anything is sent; a collective counts with its shortest duration
    over ranks, since the rest is waiting. compute: by rank. threshold: smaller differences are noise.
    """

    transfers: Mapping[Lane, float]
    compute: tuple[float, ...]
    threshold: float

    @property
    def links_changed(self) -> bool:
        return any(map(self.differs, self.transfers.values()))

    @property
    def compute_changed(self) -> bool:
        return any(map(self.differs, self.compute))

    @property
    def text(self) -> str:
        """The changes in words; empty if there are none."""
        nodes = any(lane.is_inside for lane in self.transfers)
        parts = [
            f"transfers over the {lane_words(lane, nodes=nodes)} take {ratio:.2f}x as long as before"
            for lane, ratio in self.transfers.items()
            if self.differs(ratio)
        ]
        slower = {rank: ratio for rank, ratio in enumerate(self.compute) if self.differs(ratio)}
        if slower:
            who = "all ranks" if len(slower) == len(self.compute) else _ranks(slower)
            parts.append(f"computation on {who} takes {median(slower.values()):.2f}x as long as before")
        return ", ".join(parts)

    def differs(self, ratio: float) -> bool:
        return ratio > 1 + self.threshold or ratio < 1 / (1 + self.threshold)


def diagnose(
    before: Sequence[Iterable[TaskRecord]],
    now: Sequence[Iterable[TaskRecord]],
    threshold: float,
    silent: Collection[Axes] = (),
) -> Diagnosis:
    """Compare records of the same plan and return the changes. before, now: by rank, of some steps each.

    silent: groups of one rank, in which nothing is sent.
    """
    return Diagnosis(
        transfers=_transfers(_flat(before), _flat(now), silent),
        compute=tuple(_ratio(_computed(b), _computed(n)) for b, n in zip(before, now, strict=True)),
        threshold=threshold,
    )


def _transfers(
    before: list[TaskRecord], now: list[TaskRecord], silent: Collection[Axes]
) -> dict[Lane, float]:
    found = {}
    for lane in (Lane.INTRA, Lane.INTER):
        earlier, later = (
            _shortest(r for r in records if r.lane is lane and r.task.axes not in silent)
            for records in (before, now)
        )
        if earlier:
            found[lane] = _ratio(earlier, later)
    return found


def _shortest(records: Iterable[TaskRecord]) -> dict[Kind, float]:
    """Return, by kind of transfer, the shortest duration over ranks, as the median over tasks and steps."""
    each: dict[tuple[int, Task], float] = {}
    for record in records:
        key = record.step, record.task
        each[key] = min(record.duration_s, each.get(key, record.duration_s))
    return _medians((task, seconds) for (_, task), seconds in each.items())


def _computed(records: Iterable[TaskRecord]) -> dict[Kind, float]:
    return _medians((r.task, r.duration_s) for r in records if r.lane.computes)


def _medians(durations: Iterable[tuple[Task, float]]) -> dict[Kind, float]:
    kinds: dict[Kind, list[float]] = defaultdict(list)
    for task, seconds in durations:
        kinds[task.layer, task.op, task.phase].append(seconds)
    return {kind: median(seconds) for kind, seconds in kinds.items()}


def _ratio(before: Mapping[Kind, float], now: Mapping[Kind, float]) -> float:
    """Return the ratio of the sums of both, so that long tasks count by their length."""
    assert before.keys() == now.keys(), "the same tasks ran"
    earlier_s = sum(before.values())
    return sum(now.values()) / earlier_s if earlier_s > 0 else 1.0


def _flat(ranks: Sequence[Iterable[TaskRecord]]) -> list[TaskRecord]:
    return [record for records in ranks for record in records]


def _ranks(numbers: Iterable[int]) -> str:
    names = list(map(str, numbers))
    if len(names) > MOST_NAMED:
        return f"{len(names)} ranks ({', '.join(names[:MOST_NAMED])}, ...)"
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"
