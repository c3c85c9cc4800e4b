"""The comparison itself, as every rank runs it: A B C A B C ..., so that noise affects all entries alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.autotune.profile.sample import ignore
from penstock.lab.bench.config import CompareConfig
from penstock.lab.bench.contender import Entry, Sample, first_of_every_work, measure_peak, run_step
from penstock.lab.bench.field import Field
from penstock.train.stopping import StopRequests


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything that was measured, equal on every rank: samples[label][rank][round].

    peaks_bytes: memory of one step, [label][rank]. compute_s: the computation alone, by the entries' work
    (`Entry.work`), [work][rank][round]. traffic: bytes that an entry of this work sends in a step,
    [work][rank][round][receiving rank]. layout: which ranks share what, in words; "" if every rank has its
    own. virtual: what virtual devices these were; None if computation was done. notes: last lines of the
    table.
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

    say: called with what runs now. A request to stop ends it after the step that is running; the
    result is what complete rounds have measured. Raises KeyboardInterrupt on all ranks without a complete
    round. So does `compare.limit_s` by the clock of the rank that is last, after one complete round at least.
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
            found = _round(field, turn, votes, partial(_tell, say, where))
            late = votes.late
            if found is None:
                break
            rounds += [found] if turn >= config.warmup else []
    if not rounds:
        raise KeyboardInterrupt
    why = f"since {config.limit_s:g} s were over (compare.limit_s)" if late else "as requested"
    return _collected(field, rounds, peaks, wanted=config.rounds, why=why)


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


def _tell(say: Callable[[str], None], where: str, what: str) -> None:
    say(f"{where}: {what}")


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


def _collected(
    field: Field, rounds: Sequence[_Round], peaks: Mapping[str, int], *, wanted: int, why: str
) -> Measurements:
    """Collect what all ranks have measured. why: the reason for fewer rounds than wanted."""
    everyone = field.control.gather((rounds, peaks), "collecting measurements")
    works, notes = first_of_every_work(field.entries), field.notes
    if len(rounds) < wanted:
        notes = (*notes, f"stopped, {why}, after {len(rounds)} of {wanted} rounds")
    return Measurements(
        entries=field.entries,
        samples={
            e.label: [[r.samples[e.label] for r in mine] for mine, _ in everyone] for e in field.entries
        },
        peaks_bytes={e.label: [held[e.label] for _, held in everyone] for e in field.entries},
        compute_s={work: [[r.compute_s[work] for r in mine] for mine, _ in everyone] for work in works},
        traffic={work: [[r.traffic[work] for r in mine] for mine, _ in everyone] for work in works},
        virtual=field.label,
        layout=field.layout,
        notes=notes,
    )
