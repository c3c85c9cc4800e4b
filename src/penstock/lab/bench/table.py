"""The result of a comparison as a Markdown table, for terminals and documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.lab.bench.result import BenchResult, CaseResult
from penstock.words import folded, stacked

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


def render(result: BenchResult, width: int | None = None) -> str:
    """Render what was compared, the limit, and one row per schedule.

    width: of the terminal; a wider table is printed in parts, one below the other. None = for a document.
    """
    rows = [HEAD, *(_row(case) for case in result.cases)]
    if result.works_differ:
        own = [SHARED_HEAD, *(_shared_cells(case) for case in result.cases)]
        rows = [(*row, *cells) for row, cells in zip(rows, own, strict=True)]
    parts = [rows] if width is None else stacked(rows, width)
    tables = [line for part in parts for line in ("", *markdown_table(part))]
    legend = [] if width is None else [LEGEND]
    text = "\n".join([*_limits(result), *tables, *legend, *([""] if result.notes else []), *result.notes])
    return text if width is None else folded(text, width)


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first row is the head, with right-aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" | ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    rule = "-|-".join("-" * width for width in widths)
    return [f"| {line} |" for line in (lines[0], rule, *lines[1:])]


def _limits(result: BenchResult) -> list[str]:
    lines = [f"{result.ranks} ranks on {result.nodes} node{'s' if result.nodes > 1 else ''}"]
    if result.layout:
        lines[0] += f", {result.layout}"
    if result.virtual is not None:
        lines = [f"{lines[0]}: {result.virtual}; computation is slept, transfers are real"]
    if result.wire_s is not None and result.inter_rate_bit_per_s is not None:
        rate = f"{result.inter_rate_bit_per_s / 1e6:.0f} Mbit/s between nodes"
        size = f"{result.wire_bytes / 1e6:.1f} MB over the busiest uplink"
        lines.append(
            f"{rate}: {size} take {1e3 * result.wire_s:.0f} ms; computation alone {_compute(result)}"
        )
    else:
        lines.append(f"link rate not known; computation alone {_compute(result)}")
    if result.layout and result.limit.device_s is not None and result.intra_rate_bit_per_s is not None:
        rate = f"{result.intra_rate_bit_per_s / 1e6:.0f} Mbit/s inside"
        size = f"{result.limit.device_bytes / 1e6:.1f} MB over the busiest device's link"
        lines.append(f"{rate}: {size} take {1e3 * result.limit.device_s:.0f} ms")
    lines.append("an iteration: forward, backward, sums of gradients, clipping, update")
    whose = f" of {result.cases[0].label}" if result.works_differ else ""
    lines.append(f"physical limit{whose} {1e3 * result.limit_s:.0f} ms")
    return lines


def _compute(result: BenchResult) -> str:
    return f"{1e3 * result.compute_s:.0f} ms"


def _row(case: CaseResult) -> tuple[str, ...]:
    speedup, spread = case.speedup, case.iteration_s
    several = len(case.iterations_s) > 1  # one round has no interval
    return (
        case.label,
        f"R={case.microbatches} C={case.chunks}",
        f"{1e3 * spread.median:.0f}"
        + (f" [{1e3 * spread.low:.0f}, {1e3 * spread.high:.0f}]" if several else ""),
        f"{speedup.median:.2f}" + (f" [{speedup.low:.2f}, {speedup.high:.2f}]" if several else ""),
        f"{case.overlap_efficiency:.2f}",
        _or_dash(
            case.exposed_communication_s,
            lambda s: f"{1e3 * s:.0f} ({100 * s / spread.median:.1f} %)",
        ),
        f"{100 * case.beyond_share:.1f} %",
        _or_dash(case.busy_s.get("compute"), lambda s: f"{1e3 * s:.0f}"),
        _or_dash(case.busy_s.get("inter"), lambda s: f"{1e3 * s:.0f}"),
        _or_dash(case.overhead_share, lambda share: f"{100 * share:.1f} %"),
        f"{case.peak_memory_bytes / 2**20:.0f}",
        _or_dash(
            case.simulated_s, lambda s: f"{_simulated(case, s)} ({100 * (spread.median / s - 1):+.0f} %)"
        ),
    )


def _simulated(case: CaseResult, seconds: float) -> str:
    """Return milliseconds, with the interval if there is one."""
    text, ends = f"{1e3 * seconds:.0f}", case.simulated_interval_s
    return text if ends is None else f"{text} [{1e3 * ends[0]:.0f}, {1e3 * ends[1]:.0f}]"


def _shared_cells(case: CaseResult) -> tuple[str, ...]:
    return (
        _or_dash(case.busy_s.get("intra"), lambda s: f"{1e3 * s:.0f}"),
        f"{case.limit.wire_bytes / 1e6:.1f}",
        f"{case.limit.device_bytes / 1e6:.1f}",
        f"{1e3 * case.limit_s:.0f}",
    )


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)
