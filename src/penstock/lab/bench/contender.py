"""Contenders of a comparison: ways to run a step on this rank, and what one step showed."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from penstock.device import best_kind, device_of
from penstock.features.dispatch import DISPATCHES, of_hops
from penstock.graph import Lane
from penstock.ops.core import FLAT
from penstock.schedule import StepPlan
from penstock.topology import Control
from penstock.trace import TaskRecord, occupation, overhead_s
from penstock.writing import write_setting

TransportName = Literal["penstock", "gloo"]
"""Owner of the all-to-all that runs: Penstock's, receives first, or Gloo's own, as other systems ship it."""


class Contender(Protocol):
    """Runs whole iterations: forward, backward, gradients synchronised, clipped and applied."""

    def prepare(self, number: int) -> None:
        """Prepare what step `number` needs and a training loop would have ready: not timed."""
        ...

    def step(self, number: int) -> None:
        """Run step `number` of the run, which is the same on all ranks."""
        ...

    def records(self) -> list[TaskRecord]:
        """Return when every task of the last step ran here; empty without tasks."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the comparison.

    Attributes:
        plan: The plan of its steps; None for a peer.
        simulated_s: Predicted seconds of an iteration; None where nothing is predicted.
        interval_s: Seconds between which it is expected; None = unknown.
    """

    name: str
    transport: TransportName
    contender: Contender
    plan: StepPlan | None = None
    simulated_s: float | None = None
    interval_s: tuple[float, float] | None = None

    @property
    def work(self) -> str:
        """Name of the work: entries of the same work compute the same and send the same bytes, in any order.

        It is the form of the MoE part where ranks share attention or experts, the dispatch where rows have
        legs, and the samples or experts that move; "" for a peer, whose work is that of the first entry.
        """
        if self.plan is None:
            return ""
        form = "" if self.plan.shape.sharing.is_none else self.plan.shape.expert_form
        moves = [part for part in self.name.split("+")[1:] if part not in DISPATCHES]
        legs = self.plan.shape.dispatch
        return "+".join([form, *([] if legs == FLAT else [of_hops(legs).name]), *moves])

    @property
    def label(self) -> str:
        """Unique name in one comparison: `deepspeed`, and `deepspeed (gloo)` as shipped."""
        return self.name if self.transport == "penstock" else f"{self.name} (gloo)"


def first_of_every_work(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Return first entry of every work, in the order of entries; peers have the work of the first entry."""
    by_work: dict[str, Entry] = {}
    for entry in entries:
        if entry.plan is not None:
            by_work.setdefault(entry.work, entry)
    return by_work


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step on one rank.

    Attributes:
        iteration_s: Seconds of the whole step.
        busy_s: Seconds of tasks, by lane; empty for a peer, which has no tasks to measure.
        exposed_s: Seconds of communication that no computation hides; None for a peer.
        overhead_s: Seconds in which the compute lane stood still although its next task was ready; None for a
            peer.
    """

    iteration_s: float
    busy_s: Mapping[str, float]
    exposed_s: float | None
    overhead_s: float | None


def timed(step: Callable[[int], None], number: int) -> float:
    """Return the seconds of step `number`."""
    start_s = time.perf_counter()
    step(number)
    device = best_kind()
    device_of(device).synchronize(device)  # or the clock would tell how long launching took
    return time.perf_counter() - start_s


def run_step(entry: Entry, number: int, control: Control) -> Sample:
    """Run one step, which all ranks start together."""
    entry.contender.prepare(number)
    control.barrier("starting a measured step")
    iteration_s = timed(entry.contender.step, number)
    if entry.plan is None:
        return Sample(iteration_s=iteration_s, busy_s={}, exposed_s=None, overhead_s=None)
    records = entry.contender.records()
    lanes = {record.lane for record in records}
    return Sample(
        iteration_s=iteration_s,
        busy_s={str(n): sum(r.duration_s for r in records if r.lane is n) for n in Lane if n in lanes},
        exposed_s=occupation(records).exposed_s,
        overhead_s=overhead_s(records, entry.plan.graph.needs, Lane.COMPUTE),
    )


def measure_peak(entry: Entry, number: int, control: Control) -> int:
    """Return the most bytes that one step holds above what was resident before it.

    A separate step that is not timed: all freed memory must first be given back to the kernel, and getting
    it again takes about a twelfth of a step.
    """
    entry.contender.prepare(number)
    resident = start_peak()
    control.barrier("starting a step to measure memory")
    entry.contender.step(number)
    return peak_bytes() - resident


# ---- peak memory of a stretch of work, from the kernel's own high-water mark (Linux) -----------------------

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_HIGH_WATER_MARK = "5"


def start_peak() -> int:
    """Give freed memory back to the kernel and reset the high-water mark; returns the resident bytes.

    Otherwise a step would run in memory that an earlier step left and show no peak at all.
    """
    ctypes.CDLL(None).malloc_trim(0)
    write_setting(CLEAR, RESET_HIGH_WATER_MARK)
    return _field("VmRSS")


def peak_bytes() -> int:
    """Return the highest resident memory since `start_peak`, bytes."""
    return _field("VmHWM")


def _field(name: str) -> int:
    line = next(
        line for line in STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024
