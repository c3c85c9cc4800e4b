"""Summary of all ranks' measurements: slowest rank of each round, medians, ratios, limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from penstock.lab.bench.compare import Measurements
from penstock.lab.bench.contender import Entry, Sample
from penstock.lab.bench.result import BenchResult, CaseResult, Limit, Spread
from penstock.mesh import node_of


def summarise(
    found: Measurements,
    *,
    nodes: int,
    devices: int,
    inter_rate_bit_per_s: float | None,
    intra_rate_bit_per_s: float | None = None,
) -> BenchResult:
    """Summarise measurements without measuring anything: the same input gives the same result.

    Rates: None = not known.
    """
    rates = inter_rate_bit_per_s, intra_rate_bit_per_s
    limits = {work: _limit(found, work, nodes, devices, *rates) for work in found.compute_s}
    first = next(iter(limits.values()))
    base = _slowest(next(iter(found.samples.values())))
    return BenchResult(
        ranks=nodes * devices,
        nodes=nodes,
        inter_rate_bit_per_s=inter_rate_bit_per_s,
        intra_rate_bit_per_s=intra_rate_bit_per_s,
        layout=found.layout,
        limit=first,
        virtual=found.virtual,
        notes=found.notes,
        cases=tuple(_case(e, found, base, limits.get(e.work, first)) for e in found.entries),
    )


def _limit(
    found: Measurements, work: str, nodes: int, devices: int, inter: float | None, intra: float | None
) -> Limit:
    """Return the limit of the entries with this work."""
    rounds = list(zip(*found.traffic[work], strict=True))
    wire_bytes = round(median(busiest_uplink_bytes(turn, nodes, devices) for turn in rounds))
    device_bytes = round(median(map(busiest_device_bytes, rounds)))
    return Limit(
        compute_s=median(max(turn) for turn in zip(*found.compute_s[work], strict=True)),
        wire_bytes=wire_bytes,
        wire_s=None if inter is None else wire_bytes * 8 / inter,
        device_bytes=device_bytes,
        device_s=None if intra is None else device_bytes * 8 / intra,
    )


def busiest_device_bytes(traffic: Sequence[Mapping[int, int]]) -> int:
    """Return bytes that cross the busiest device's own link in its busier direction, wherever they go."""
    received: Counter[int] = Counter()
    for peers in traffic:
        received.update(peers)
    return max(*received.values(), *(sum(peers.values()) for peers in traffic), 0)


def busiest_uplink_bytes(traffic: Sequence[Mapping[int, int]], nodes: int, devices: int) -> int:
    """Return bytes over the busiest node's uplink in its busier direction.

    traffic[rank][peer]: bytes sent.
    """
    sent, received = [0] * nodes, [0] * nodes
    for rank, peers in enumerate(traffic):
        for peer, size in peers.items():
            source, target = node_of(rank, devices), node_of(peer, devices)
            if source != target:
                sent[source] += size
                received[target] += size
    return max(*sent, *received)


def _slowest(samples: Sequence[Sequence[Sample]]) -> list[float]:
    """Return the iteration of each round on its slowest rank."""
    return [max(s.iteration_s for s in turn) for turn in zip(*samples, strict=True)]


def _case(entry: Entry, found: Measurements, base: Sequence[float], limit: Limit) -> CaseResult:
    samples = found.samples[entry.label]
    shape = None if entry.plan is None else entry.plan.shape
    iterations = _slowest(samples)
    flat = [sample for rank in samples for sample in rank]
    return CaseResult(
        schedule=entry.name,
        transport=entry.transport,
        label=entry.label,
        microbatches=shape.microbatches if shape else 1,
        chunks=shape.chunks if shape else 1,
        iterations_s=tuple(iterations),
        iteration_s=Spread.of(iterations),
        speedup=Spread.of([b / mine for b, mine in zip(base, iterations, strict=True)]),
        limit=limit,
        busy_s={lane: median(s.busy_s[lane] for s in flat) for lane in flat[0].busy_s},
        exposed_communication_s=_worst_rank([[s.exposed_s for s in rank] for rank in samples]),
        overhead_s=_worst_rank([[s.overhead_s for s in rank] for rank in samples]),
        peak_memory_bytes=max(found.peaks_bytes[entry.label]),
        simulated_s=entry.simulated_s,
        simulated_interval_s=entry.interval_s,
    )


def _worst_rank(values: Sequence[Sequence[float | None]]) -> float | None:
    """Return the largest of the ranks' medians; None if a rank has no values."""
    known = [[value for value in rank if value is not None] for rank in values]
    return max(median(rank) for rank in known) if all(known) else None
