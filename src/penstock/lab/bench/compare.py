"""The comparison itself, as every rank runs it: A B C A B C ..., so that noise affects all entries alike.

Then the summary of all ranks: the slowest rank of each round, medians, ratios, limits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from penstock.autotune.profile.sample import ignore
from penstock.lab.bench.config import CompareConfig
from penstock.lab.bench.contender import Entry, Sample, first_of_every_work, measure_peak, run_step
from penstock.lab.bench.field import Field
from penstock.lab.bench.result import BenchResult, CaseResult, Limit, Spread
from penstock.mesh import node_of
from penstock.train.stopping import StopRequests


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything that was measured, equal on every rank.

    Attributes:
        samples: Steps of an entry, [label][rank][round].
        peaks_bytes: Memory of one step, [label][rank].
        compute_s: The computation alone, by the entries' work (`Entry.work`), [work][rank][round].
        traffic: Bytes that an entry of this work sends in a step, [work][rank][round][receiving rank].
        virtual: What virtual devices these were; None if computation was done.
        layout: Which ranks share what, in words; "" if every rank has its own.
        notes: Last lines of the table.
    """

    entries: tuple[Entry, ...]
    samples: Mapping[str, list[list[Sample]]]
    peaks_bytes: Mapping[str, list[int]]
    compute_s: Mapping[str, list[list[float]]]
    traffic: Mapping[str, list[list[Mapping[int, int]]]]
    virtual: str | None
    layout: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Round:
    """One step of every entry, by label, and of the computation alone, by work, on this rank."""

    samples: Mapping[str, Sample]
    compute_s: Mapping[str, float]
    traffic: Mapping[str, Mapping[int, int]]


def compare(
    field: Field,
    config: CompareConfig,
    say: Callable[[str], None] = ignore,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Measurements:
    """Run all entries, and the computation alone, in turns.

    A request to stop ends it after the step that is running; the result is what complete rounds have
    measured. So does `compare.limit_s` by the clock of the rank that is last, after one complete round at
    least.

    Args:
        say: Called with what runs now.
        clock: The clock, in seconds, of that limit.

    Raises:
        KeyboardInterrupt: On all ranks, if no round was complete.
    """
    begin_s = clock()
    late = False
    with StopRequests(field.control) as requests:
        for entry in field.entries:  # allocations that happen once must not count for the first entry
            say(f"{entry.label}: a first step")
            run_step(entry, 0, field.control)
        peaks = {entry.label: measure_peak(entry, 0, field.control) for entry in field.entries}
        rounds: list[_Round] = []
        for turn in range(config.warmup + config.rounds):
            done = turn - config.warmup + 1
            where = f"round {done} of {config.rounds}" if done > 0 else "warm-up"
            votes = _Votes(requests, turn, lambda: clock() - begin_s, config.limit_s if rounds else math.inf)
            measured = _round(field, turn, votes, partial(lambda where, what: say(f"{where}: {what}"), where))
            late = votes.late
            if measured is None:
                break
            rounds += [measured] if turn >= config.warmup else []
    if not rounds:
        raise KeyboardInterrupt
    why = f"since {config.limit_s:g} s were over (compare.limit_s)" if late else "as requested"
    everyone = field.control.gather((rounds, peaks), "collecting measurements")
    works, notes = first_of_every_work(field.entries), field.notes
    if len(rounds) < config.rounds:
        notes = (*notes, f"stopped, {why}, after {len(rounds)} of {config.rounds} rounds")
    return Measurements(
        entries=field.entries,
        samples={
            e.label: [[r.samples[e.label] for r in of_rank] for of_rank, _ in everyone] for e in field.entries
        },
        peaks_bytes={e.label: [held[e.label] for _, held in everyone] for e in field.entries},
        compute_s={work: [[r.compute_s[work] for r in of_rank] for of_rank, _ in everyone] for work in works},
        traffic={work: [[r.traffic[work] for r in of_rank] for of_rank, _ in everyone] for work in works},
        virtual=field.label,
        layout=field.layout,
        notes=notes,
    )


@dataclass
class _Votes:
    """Asks all ranks after a step whether to go on. late: whether the time was the reason not to."""

    requests: StopRequests
    turn: int
    elapsed_s: Callable[[], float]
    limit_s: float
    late: bool = False

    def stop(self) -> bool:
        """Return whether any rank was asked to stop, or is beyond the limit."""
        vote = self.requests.agreed(self.turn, self.elapsed_s())
        self.late = not vote.stop and vote.slowest_s > self.limit_s
        return vote.stop or self.late


def _round(field: Field, turn: int, votes: _Votes, say: Callable[[str], None]) -> _Round | None:
    """Run one round; None if it has to end before."""
    first = first_of_every_work(field.entries)
    samples: dict[str, Sample] = {}
    traffic: dict[str, Mapping[int, int]] = {}
    compute_s: dict[str, float] = {}
    for entry in field.entries:
        say(entry.label)
        before = field.traffic.copy()
        samples[entry.label] = run_step(entry, turn, field.control)
        if first.get(entry.work) is entry:
            traffic[entry.work] = dict(field.traffic - before)
        if votes.stop():
            return None
    for work, entry in first.items():
        say("computation alone")
        compute_s[work] = field.compute_solo_s(entry, turn)
        if votes.stop():
            return None
    return _Round(samples=samples, compute_s=compute_s, traffic=traffic)


def summarise(
    found: Measurements,
    *,
    nodes: int,
    devices: int,
    inter_rate_bit_per_s: float | None,
    intra_rate_bit_per_s: float | None = None,
) -> BenchResult:
    """Summarise measurements without measuring anything: the same input gives the same result.

    Args:
        nodes: Number of nodes.
        devices: Number of devices in each node.
        inter_rate_bit_per_s: Rate of a node's uplink; None = not known.
        intra_rate_bit_per_s: Rate of a device's link to its node; None = not known.
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

    Args:
        traffic: Bytes sent, [rank][receiving rank].
        devices: Number of devices in each node.
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
        speedup=Spread.of([b / iteration for b, iteration in zip(base, iterations, strict=True)]),
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
    by_rank = [[value for value in rank if value is not None] for rank in values]
    return max(median(rank) for rank in by_rank) if all(by_rank) else None
