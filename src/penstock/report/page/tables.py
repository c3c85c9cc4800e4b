"""The tables of a report, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.ops.families import family_of
from penstock.plan import PlanFile
from penstock.report.page.findings import KindOfTask
from penstock.report.page.style import COLOURS, LINE, SECOND
from penstock.words import change, lane_words, milliseconds

MOST_KINDS = 40
MANY_TIMES = 10
MINUS = "\N{MINUS SIGN}"
Cells = Sequence[str]


def kinds_table(kinds: Sequence[KindOfTask]) -> str:
    """Return predicted and measured times by kind, the largest difference first; sums by lane below."""
    widest = max([abs(kind.difference_s) for kind in kinds], default=0.0) or 1.0
    head = ("kind of task", "lane", "tasks", "predicted", "measured", "difference", "", "")
    rows = [_kind_row(kind, widest) for kind in kinds[:MOST_KINDS]]
    lanes = dict.fromkeys(kind.lane for kind in kinds)
    totals = [
        _total_row(lane, "intra" in lanes, [kind for kind in kinds if kind.lane == lane]) for lane in lanes
    ]
    more = len(kinds) - MOST_KINDS
    note = f'<p class="quiet">and {more} more kinds of smaller differences</p>' if more > 0 else ""
    return _table(head, [*rows, *totals]) + note


def plans_table(plan: PlanFile) -> str:
    """Return the plan that ran and the next best ones."""
    tried = any(other.measured_s is not None for other in plan.others) or plan.trial_s is not None
    head = ("plan", "predicted", "against the chosen one", *(("tried: a step took",) if tried else ()))
    chosen = [f"<b>{escape(plan.choice.words)}</b> (chosen)", milliseconds(plan.predicted_s), ""]
    rows = [[*chosen, *([_trial(plan.trial_s)] if tried else [])]]
    for other in plan.others:
        row = [escape(other.words), milliseconds(other.predicted_s)]
        row.append(signed_change(other.predicted_s, plan.predicted_s))
        rows.append([*row, *([_trial(other.measured_s)] if tried else [])])
    return _table(head, [_row(cells) for cells in rows])


def _trial(seconds: float | None) -> str:
    return "not tried" if seconds is None else milliseconds(seconds)


def _kind_row(kind: KindOfTask, widest: float) -> str:
    dot = f'<span class="dot" style="background: {COLOURS[family_of(kind.op)]}"></span>'
    return _row(
        [
            f"{dot}{escape(kind.title)} <span class='quiet'>({escape(kind.op)})</span>",
            kind.lane,
            str(kind.count),
            milliseconds(kind.predicted_s),
            milliseconds(kind.measured_s),
            signed(kind.difference_s),
            "" if kind.ratio is None else relative(kind.ratio),
        ],
        _track(kind.difference_s / widest),
    )


def _total_row(lane: str, nodes: bool, kinds: Sequence[KindOfTask]) -> str:
    predicted_s = sum(kind.predicted_s for kind in kinds)
    measured_s = sum(kind.measured_s for kind in kinds)
    cells = [
        f"all of {lane_words(lane, nodes=nodes)}",
        lane,
        str(sum(kind.count for kind in kinds)),
        milliseconds(predicted_s),
        milliseconds(measured_s),
        signed(measured_s - predicted_s),
        relative(measured_s / predicted_s) if predicted_s > 0 else "",
    ]
    return _row(cells, '<td class="bar"></td>', kind="total")


def relative(ratio: float) -> str:
    """Return measured over predicted as text: `+3.2 %`, and from ten times on `12 times`."""
    return signed_change(ratio, 1.0) if ratio < MANY_TIMES else f"{ratio:,.0f} times"


def signed_change(seconds: float, base_s: float) -> str:
    """Return `change` with a typographic minus."""
    return change(seconds, base_s).replace("-", MINUS)


def signed(seconds: float) -> str:
    """Return a difference with its sign."""
    return f"{'+' if seconds >= 0 else MINUS}{milliseconds(abs(seconds))}"


def _track(share: float) -> str:
    """Return a bar, to the right for what took longer than predicted, to the left for what took less."""
    width = 50 * min(1.0, abs(share))
    left, colour = (50.0, SECOND) if share >= 0 else (50.0 - width, LINE)
    style = f"left: {left:.1f}%; width: {width:.1f}%; background: {colour}"
    return f'<td class="bar"><div class="track"><i style="{style}"></i></div></td>'


def _table(head: Cells, rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="scroll"><table><tr>{cells}</tr>{"".join(rows)}</table></div>'


def _row(cells: Cells, last: str = "", kind: str = "") -> str:
    """Return a row of a table. cells: in HTML."""
    opening = f'<tr class="{kind}">' if kind else "<tr>"
    return f"{opening}{''.join(f'<td>{cell}</td>' for cell in cells)}{last}</tr>"
