"""The tables of `python -m benchmarks.dispatches`, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.dispatches.measure import FEW_LARGE, MANY_SMALL
from benchmarks.dispatches.result import DispatchesResult, TripResult
from benchmarks.uplinks import cluster_text, size_text
from penstock.bench.table import markdown_table

NOTES: Final = (
    "round trip in ms: median ± half of its 95 % interval, then the prediction by the fitted links",
    "* fastest; > least prediction, which auto takes; auto/best: its time over that of the fastest",
    "efficiency: physical limit over the fastest, headers not counted",
)
TITLES: Final = {
    FEW_LARGE: "few large messages: all rows in 1 chunk",
    MANY_SMALL: f"many small messages: the same rows in {MANY_SMALL} chunks, one behind the other",
}


def render_dispatches(result: DispatchesResult) -> str:
    """One table for few and one for many messages in Markdown, below them who wins and the limit."""
    lines = [cluster_text(result.ranks, result.nodes, result.inter_rate_bit_per_s), *NOTES]
    for chunks in dict.fromkeys(row.chunks for row in result.rows):
        rows = [row for row in result.rows if row.chunks == chunks]
        head = ("per rank", *rows[0].times_s, "efficiency", "auto/best")
        lines += ["", TITLES[chunks], "", *markdown_table([head, *map(_cells, rows)])]
    return "\n".join([*lines, "", *_verdict(result.rows), _limit(result.rows[0])])


def _cells(row: TripResult) -> tuple[str, ...]:
    efficiency = row.efficiency(row.fastest)
    times = (_timing(row, name) for name in row.times_s)
    share = "-" if efficiency is None else f"{efficiency:.2f}"
    return size_text(row.size_bytes), *times, share, f"{row.auto_ratio:.2f}"


def _timing(row: TripResult, name: str) -> str:
    """Measured and predicted time of one dispatch, marked."""
    spread, predicted = row.times_s[name], _ms(row.predicted_s[name])
    half = 50 * (spread.high - spread.low) / spread.median
    measured = f"{'*' if name == row.fastest else ''}{_ms(spread.median)}"
    return f"{measured:>5} ±{half:3.0f}% {'>' if name == row.auto else ' '}{predicted:>4}"


def _verdict(rows: Sequence[TripResult]) -> tuple[str, str]:
    """Who was fastest how often, and what the choice by prediction is worth."""
    wins = (f"{name} in {sum(row.fastest == name for row in rows)}" for name in rows[0].times_s)
    right, worst = sum(row.auto == row.fastest for row in rows), max(row.auto_ratio for row in rows)
    auto = f"auto: the fastest in {right} of {len(rows)}, at worst {worst:.2f} times its time"
    return f"fastest: {', '.join(wins)} of {len(rows)}", auto


def _limit(row: TripResult) -> str:
    """The limit is in proportion to the rows, so one sentence is enough for all sizes."""
    if row.wire_bytes == 0:
        return "physical limit: none, nothing crosses a link between nodes"
    sent = f"a MiB of rows sends {row.wire_bytes / row.size_bytes:.3g} MiB over a node's link"
    if row.limit_s is None:
        return f"physical limit: {sent}: unknown rate"
    return f"physical limit: {sent} (dispatch and combine): {_ms(row.limit_s / row.size_bytes * 2**20)} ms"


def _ms(time_s: float) -> str:
    """Three digits; of a second and more, whole milliseconds."""
    return f"{1e3 * time_s:.{max(0, 3 - len(str(int(1e3 * time_s))))}f}"
