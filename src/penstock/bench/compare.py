"""The comparison itself, as every rank runs it: A B C A B C ..., so that noise falls on all alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.bench.config import CompareConfig
from penstock.bench.contender import Entry, Sample, measure_peak, run_step
from penstock.bench.field import Field


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything that was measured, the same on every rank: samples[label][rank][round].

    peaks_bytes: memory of one step, [label][rank]. compute_s: the computation alone, by what entries do
    (`Entry.work`), [work][rank][round]. traffic: bytes that such an entry sends in a step,
    [work][rank][round][receiving rank]. layout: who shares what, in words; "" if every rank has its own.
    virtual: what virtual devices these were; None if computation was done. notes: what the table ends with.
    """

    entries: tuple[Entry, ...]
    samples: Mapping[str, list[list[Sample]]]
    peaks_bytes: Mapping[str, list[int]]
    compute_s: Mapping[str, list[list[float]]]
    traffic: Mapping[str, list[list[Mapping[int, int]]]]
    virtual: str | None
    layout: str = ""
    notes: tuple[str, ...] = ()


def first_of_every_work(entries: Sequence[Entry]) -> dict[str, Entry]:
    """By work, in the order of entries; peers have that of the first."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.plan is not None:
            found.setdefault(entry.work, entry)
    return found


def compare(field: Field, config: CompareConfig) -> Measurements:
    """Run all entries, and the computation alone, in turns."""
    samples: dict[str, list[Sample]] = {entry.label: [] for entry in field.entries}
    for entry in field.entries:  # what is allocated once must not count as the first one's
        run_step(entry, 0, field.control)
    peaks = {entry.label: measure_peak(entry, 0, field.control) for entry in field.entries}
    first = first_of_every_work(field.entries)
    alone: dict[str, list[float]] = {work: [] for work in first}
    traffic: dict[str, list[Mapping[int, int]]] = {work: [] for work in first}
    for turn in range(config.warmup + config.rounds):
        for entry in field.entries:
            before = field.traffic.copy()
            sample = run_step(entry, turn, field.control)
            if turn >= config.warmup:
                if first.get(entry.work) is entry:
                    traffic[entry.work].append(dict(field.traffic - before))
                samples[entry.label].append(sample)
        for work, entry in first.items():
            compute_s = field.compute_alone_s(entry, turn)
            if turn >= config.warmup:
                alone[work].append(compute_s)
    everyone = field.control.gather((samples, alone, traffic, peaks), "collecting measurements")
    return Measurements(
        entries=field.entries,
        samples={e.label: [rank[0][e.label] for rank in everyone] for e in field.entries},
        peaks_bytes={e.label: [rank[3][e.label] for rank in everyone] for e in field.entries},
        compute_s={work: [rank[1][work] for rank in everyone] for work in first},
        traffic={work: [rank[2][work] for rank in everyone] for work in first},
        virtual=field.label,
        layout=field.layout,
        notes=field.notes,
    )
