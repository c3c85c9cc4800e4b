"""The comparison itself, as every rank runs it: A B C A B C ..., so that noise falls on all alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.bench.config import CompareConfig
from penstock.bench.contender import Entry, Sample, measure_peak, run_step
from penstock.bench.field import Field


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything that was measured, the same on every rank: samples[label][rank][round].

    peaks_bytes: memory of one step, [label][rank]. compute_s: the computation alone, [rank][round].
    traffic: bytes that the first entry sends in a step, [rank][round][receiving rank].
    virtual: what virtual devices these were; None if computation was done. notes: what the table ends with.
    """

    entries: tuple[Entry, ...]
    samples: Mapping[str, list[list[Sample]]]
    peaks_bytes: Mapping[str, list[int]]
    compute_s: list[list[float]]
    traffic: list[list[Mapping[int, int]]]
    virtual: str | None
    notes: tuple[str, ...] = ()


def compare(field: Field, config: CompareConfig) -> Measurements:
    """Run all entries, and the computation alone, in turns."""
    samples: dict[str, list[Sample]] = {entry.label: [] for entry in field.entries}
    for entry in field.entries:  # what is allocated once must not count as the first one's
        run_step(entry, 0, field.control)
    peaks = {entry.label: measure_peak(entry, 0, field.control) for entry in field.entries}
    alone: list[float] = []
    traffic: list[Mapping[int, int]] = []
    for turn in range(config.warmup + config.rounds):
        for number, entry in enumerate(field.entries):
            before = field.traffic.copy()
            sample = run_step(entry, turn, field.control)
            if turn >= config.warmup:
                if number == 0:
                    traffic.append(dict(field.traffic - before))
                samples[entry.label].append(sample)
        compute_s = field.compute_alone_s(turn)
        if turn >= config.warmup:
            alone.append(compute_s)
    everyone = field.control.gather((samples, alone, traffic, peaks), "collecting measurements")
    return Measurements(
        entries=field.entries,
        samples={e.label: [rank[0][e.label] for rank in everyone] for e in field.entries},
        peaks_bytes={e.label: [rank[3][e.label] for rank in everyone] for e in field.entries},
        compute_s=[rank[1] for rank in everyone],
        traffic=[rank[2] for rank in everyone],
        virtual=field.label,
        notes=field.notes,
    )
