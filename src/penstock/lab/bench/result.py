"""Results of a comparison, in seconds, and their Markdown table for terminals and documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from penstock.words import folded, markdown_table, stacked


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median of repeated measurements with the interval that holds the median with 95 % confidence."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float], resamples: int = 2000) -> Spread:
        """Return median and bootstrap percentile interval, deterministic."""
        draws = np.random.default_rng(0).choice(np.asarray(values), (resamples, len(values)))
        low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
        return Spread(median=median(values), low=float(low), high=float(high))


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Time below which no schedule of the same work can be.

    Attributes:
        compute_s: Seconds of the same computation on all ranks at once, nothing sent.
        wire_bytes: Bytes of one step over the busiest node's uplink in its busier direction.
        device_bytes: Bytes over the busiest device's own link, which also carries the traffic inside its
            node.
        wire_s, device_s: Seconds of these bytes at the rates of the links; None where not known.
    """

    compute_s: float
    wire_bytes: int
    wire_s: float | None
    device_bytes: int = 0
    device_s: float | None = None

    @property
    def seconds(self) -> float:
        """The largest of the three times."""
        return max(self.compute_s, self.wire_s or 0.0, self.device_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """One schedule or peer.

    Values that a peer cannot give, because it has no tasks, are None; so is a prediction that was not made.

    Attributes:
        schedule: Name of the schedule or peer.
        transport: Whose all-to-all it uses.
        label: Both, unique in a comparison.
        iterations_s: Seconds of every round on its slowest rank.
        iteration_s: Seconds of forward, backward, gradient synchronisation, clipping and update on the
            slowest rank of each round.
        speedup: Ratio to the first schedule of the run, round by round.
        limit: Limit of its work, which differs between forms of the MoE part where ranks share attention or
            experts.
        busy_s: Median seconds of tasks, by lane.
        overlap_efficiency: The limit's seconds over the median of `iteration_s`.
        exposed_communication_s: Seconds of communication that no computation hides, on the slowest rank.
        beyond_share: Share of the iteration by which it exceeds the computation alone of its work.
        overhead_s: Seconds in which the compute lane stood still although its next task was ready.
        peak_memory_bytes: Highest resident memory of any rank above what it held before its step.
        simulated_s: Seconds predicted from costs that were measured separately from this schedule's own run.
        simulated_interval_s: Seconds between which it is expected, from real steps of the profile; None =
            unknown.
    """

    schedule: str
    transport: str
    label: str
    microbatches: int
    chunks: int
    iterations_s: tuple[float, ...]
    iteration_s: Spread
    speedup: Spread
    limit: Limit
    busy_s: dict[str, float]
    exposed_communication_s: float | None
    overhead_s: float | None
    peak_memory_bytes: int
    simulated_s: float | None
    simulated_interval_s: tuple[float, float] | None = None

    @property
    def overlap_efficiency(self) -> float:
        return self.limit.seconds / self.iteration_s.median

    @property
    def simulation_error(self) -> float | None:
        """Relative error of the prediction; positive if the simulator promised too much."""
        return None if self.simulated_s is None else self.iteration_s.median / self.simulated_s - 1

    @property
    def exposed_share(self) -> float | None:
        """Share of the iteration that is exposed communication."""
        exposed_s = self.exposed_communication_s
        return None if exposed_s is None else exposed_s / self.iteration_s.median

    @property
    def beyond_share(self) -> float:
        """Share of the iteration beyond computation alone, which peers share with the first entry."""
        return max(0.0, 1 - self.limit.compute_s / self.iteration_s.median)

    @property
    def overhead_share(self) -> float | None:
        """Share of the iteration that is overhead."""
        return None if self.overhead_s is None else self.overhead_s / self.iteration_s.median

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "limit_s": self.limit.seconds,
            "iteration_s_median": self.iteration_s.median,
            "iteration_s_interval": [self.iteration_s.low, self.iteration_s.high],
            "speedup": self.speedup.median,
            "speedup_interval": [self.speedup.low, self.speedup.high],
            "overlap_efficiency": self.overlap_efficiency,
            "exposed_share": self.exposed_share,
            "beyond_share": self.beyond_share,
            "overhead_share": self.overhead_share,
            "simulation_error": self.simulation_error,
        }


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """A whole comparison.

    Attributes:
        virtual: Label of devices that slept for as long as the cost model says, instead of computing, while
            bytes were real; None for real computation.
        limit: Limit of the first case; others have their own where their work differs.
        layout: Which ranks share what, in words; "" if every rank has its own attention and experts.
        notes: Lines for people, such as why a plan was chosen.
    """

    virtual: str | None
    ranks: int
    nodes: int
    inter_rate_bit_per_s: float | None
    limit: Limit
    cases: tuple[CaseResult, ...]
    intra_rate_bit_per_s: float | None = None
    layout: str = ""
    notes: tuple[str, ...] = ()

    @property
    def works_differ(self) -> bool:
        """Whether cases may compute and send something other than the first."""
        return bool(self.layout) or any(case.limit != self.limit for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        plain = {k: getattr(self, k) for k in ("ranks", "nodes", "inter_rate_bit_per_s")}
        plain |= {"intra_rate_bit_per_s": self.intra_rate_bit_per_s, "layout": self.layout}
        rest = {**asdict(self.limit), "limit_s": self.limit.seconds}
        virtual = {"virtual": self.virtual is not None, "virtual_devices": self.virtual}
        cases = {"notes": list(self.notes), "cases": [case.to_dict() for case in self.cases]}
        return virtual | plain | rest | cases


HEAD = (
    "schedule",
    "pieces",
    "iteration ms",
    "speed-up [95 %]",
    "efficiency",
    "exposed ms",
    "beyond compute",
    "compute ms",
    "inter ms",
    "overhead",
    "peak MiB",
    "simulated ms",
)
SHARED_HEAD = ("intra ms", "uplink MB", "device MB", "limit ms")
"""Columns added where ranks share attention or experts, or something moves: sent bytes may differ."""
LEGEND = (
    "R: microbatches, C: chunks; efficiency: the physical limit over the iteration; exposed: communication "
    "while nothing is computed; beyond compute: share of the iteration beyond computation alone; "
    "compute, inter: how long computation and the network between nodes were busy; overhead: a task was "
    "ready and had not begun; simulated: the prediction, and how much longer the iteration took (%)"
)
"""Text below a table in a terminal; docs/emulation.md explains the columns to readers of documents."""
AS_SHIPPED = "(gloo)"
"""Ends the labels of systems on their own transport."""


def render(result: BenchResult, width: int | None = None) -> str:
    """Render what was compared, the limit, and one row per schedule.

    Args:
        width: Columns of the terminal; a wider table is printed in parts, one below the other. None = no
            limit, as for a document.
    """
    rows = [HEAD, *(_row(case) for case in result.cases)]
    if result.works_differ:
        rows[0] += SHARED_HEAD
        for number, case in enumerate(result.cases, start=1):
            rows[number] += (
                _or_dash(case.busy_s.get("intra"), lambda s: f"{1e3 * s:,.0f}"),
                f"{case.limit.wire_bytes / 1e6:.1f}",
                f"{case.limit.device_bytes / 1e6:.1f}",
                f"{1e3 * case.limit.seconds:,.0f}",
            )
    parts = [rows] if width is None else stacked(rows, width)
    tables = [line for part in parts for line in ("", *markdown_table(part))]
    shipped = any(case.label.endswith(AS_SHIPPED) for case in result.cases)
    legend = [] if width is None else [LEGEND + f"; {AS_SHIPPED}: without Penstock's transport" * shipped]
    text = "\n".join([*_limits(result), *tables, *legend, *([""] if result.notes else []), *result.notes])
    return text if width is None else folded(text, width)


def _limits(result: BenchResult) -> list[str]:
    lines = [f"{result.ranks} ranks on {result.nodes} node{'s' if result.nodes > 1 else ''}"]
    if result.layout:
        lines[0] += f", {result.layout}"
    if result.virtual is not None:
        lines = [f"{lines[0]}: {result.virtual}; computation is slept, transfers are real"]
    if result.limit.wire_s is not None and result.inter_rate_bit_per_s is not None:
        rate = f"{result.inter_rate_bit_per_s / 1e6:.0f} Mbit/s between nodes"
        size = f"{result.limit.wire_bytes / 1e6:.1f} MB over the busiest uplink"
        lines.append(
            f"{rate}: {size} take {1e3 * result.limit.wire_s:,.0f} ms; computation alone {_compute(result)}"
        )
    else:
        lines.append(f"link rate not known; computation alone {_compute(result)}")
    if result.layout and result.limit.device_s is not None and result.intra_rate_bit_per_s is not None:
        rate = f"{result.intra_rate_bit_per_s / 1e6:.0f} Mbit/s inside"
        size = f"{result.limit.device_bytes / 1e6:.1f} MB over the busiest device's link"
        lines.append(f"{rate}: {size} take {1e3 * result.limit.device_s:,.0f} ms")
    lines.append("an iteration: forward, backward, sums of gradients, clipping, update")
    whose = f" of {result.cases[0].label}" if result.works_differ else ""
    lines.append(f"physical limit{whose} {1e3 * result.limit.seconds:,.0f} ms")
    return lines


def _compute(result: BenchResult) -> str:
    return f"{1e3 * result.limit.compute_s:,.0f} ms"


def _row(case: CaseResult) -> tuple[str, ...]:
    speedup, spread = case.speedup, case.iteration_s
    several = len(case.iterations_s) > 1  # one round has no interval
    return (
        case.label,
        f"R={case.microbatches} C={case.chunks}",
        f"{1e3 * spread.median:,.0f}"
        + (f" [{1e3 * spread.low:,.0f}, {1e3 * spread.high:,.0f}]" if several else ""),
        f"{speedup.median:.2f}" + (f" [{speedup.low:.2f}, {speedup.high:.2f}]" if several else ""),
        f"{case.overlap_efficiency:.2f}",
        _or_dash(
            case.exposed_communication_s,
            lambda s: f"{1e3 * s:,.0f} ({100 * s / spread.median:.1f} %)",
        ),
        f"{100 * case.beyond_share:.1f} %",
        _or_dash(case.busy_s.get("compute"), lambda s: f"{1e3 * s:,.0f}"),
        _or_dash(case.busy_s.get("inter"), lambda s: f"{1e3 * s:,.0f}"),
        _or_dash(case.overhead_share, lambda share: f"{100 * share:.1f} %"),
        f"{case.peak_memory_bytes / 2**20:.0f}",
        _or_dash(
            case.simulated_s, lambda s: f"{_simulated(case, s)} ({100 * (spread.median / s - 1):+.0f} %)"
        ),
    )


def _simulated(case: CaseResult, seconds: float) -> str:
    """Return milliseconds, with the interval if there is one."""
    text, ends = f"{1e3 * seconds:,.0f}", case.simulated_interval_s
    return text if ends is None else f"{text} [{1e3 * ends[0]:,.0f}, {1e3 * ends[1]:,.0f}]"


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)
