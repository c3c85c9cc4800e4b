"""The step as bars: predicted above measured, on one axis of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from penstock.graph import Lane, Name
from penstock.ops.base import Family, family_of
from penstock.report.page.findings import Binding, title_of
from penstock.report.page.render import BOX, COLOURS, PAUSES, QUIET, TEXT, Figure, axis, ink, upright
from penstock.trace.step_file import Spans, StepFile
from penstock.words import milliseconds, percent

ROW, GAP = 1.0, 1.15
"""Heights of a lane, and of the gap between the two runs, in units of the axis."""
PIXELS = 34
"""Pixels of a unit."""
THICK = 0.78


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """A task on its row. critical: whether it is on the measured critical path."""

    name: Name
    run: str
    row: float
    start_s: float
    end_s: float
    critical: bool

    @property
    def family(self) -> Family:
        return family_of(self.name.op)

    @property
    def short(self) -> str:
        """The op with its indices, for a bar that has room."""
        indices = (self.name.microbatch, self.name.chunk, self.name.piece)
        return self.name.op + ".".join(str(index) for index in indices if index is not None)

    @property
    def hover(self) -> str:
        """All that is known of the task."""
        duration_s = self.end_s - self.start_s
        lines = [
            f"<b>{self.name}</b>",
            escape(title_of(self.name.op)),
            f"{self.run}: {milliseconds(duration_s)}",
            f"from {milliseconds(self.start_s)} to {milliseconds(self.end_s)}",
        ]
        return "<br>".join([*lines, *(["on the critical path"] if self.critical else [])])


def timeline_figure(step: StepFile, place: int) -> Figure:
    """Return both runs of one rank; place: the index of the rank among those shown."""
    lanes = [lane for lane in Lane if str(lane) in step.lanes]
    rank = step.shown[place]
    measured_top = len(lanes) * ROW + GAP
    rows = {("predicted", lane): number * ROW for number, lane in enumerate(lanes)}
    rows |= {("measured", lane): measured_top + number * ROW for number, lane in enumerate(lanes)}
    critical = {link.task for link in step.path if link.rank == rank}
    bars = [
        *_bars(step, step.predicted, place, "predicted", rows, frozenset()),
        *_bars(step, step.measured, place, "measured", rows, frozenset(critical)),
    ]
    end_s = max([step.predicted_s, step.measured_s, *(bar.end_s for bar in bars)])
    bottom = measured_top + len(lanes) * ROW
    return {
        "data": [trace for family in Family if (trace := _trace(family, bars)) is not None],
        "layout": {
            "height": int(64 + PIXELS * (bottom + GAP)),
            "barmode": "overlay",
            "bargap": 0,
            "showlegend": False,
            "margin": {"t": 8},
            "uniformtext": {"minsize": 9, "mode": "hide"},
            "xaxis": axis("ms from the start of the step", range=[0, 1e3 * end_s * 1.005], zeroline=False),
            "yaxis": {
                "range": [bottom - 0.4, -ROW - 0.25],
                "tickvals": list(rows.values()),
                "ticktext": [str(lane) for _, lane in rows],
                "tickfont": {"color": TEXT, "size": 12},
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
            "annotations": [
                _heading(f"<b>predicted</b>  {milliseconds(_end_s(bars, 'predicted'))}", -ROW / 2 - 0.36),
                _heading(
                    f"<b>measured</b>  {milliseconds(_end_s(bars, 'measured'))} (step {step.step})",
                    measured_top - ROW / 2 - 0.36,
                ),
            ],
            "shapes": [upright(1e3 * _end_s(bars, "predicted"))],
        },
    }


def families_of(step: StepFile) -> list[Family]:
    """Return the families in the step, in the order of legends."""
    found = {family_of(Name.parse(task).op) for task in step.tasks}
    return [family for family in Family if family in found]


def path_figure(binding: Binding) -> Figure:
    """Return the critical path as one bar, divided into its parts."""
    taken_s: dict[str, float] = {
        family: binding.computed_s.get(family, 0.0) + binding.moved_s.get(family, 0.0) for family in Family
    }
    taken_s[PAUSES] = binding.gaps_s
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [""],
            "x": [1e3 * seconds],
            "name": name,
            "marker": {"color": COLOURS[name], "line": {"color": BOX, "width": 1}},
            "text": [percent(seconds / binding.length_s)],
            "textfont": {"color": ink(name), "size": 13},
            "hovertemplate": f"{name}: {milliseconds(seconds)}<extra></extra>",
        }
        for name, seconds in (
            {str(family): s for family, s in taken_s.items()} | {PAUSES: binding.gaps_s}
        ).items()
        if seconds > 0
    ]
    return {
        "data": data,
        "layout": {
            "height": 140,
            "barmode": "stack",
            "bargap": 0.1,
            "uniformtext": {"minsize": 10, "mode": "hide"},
            "margin": {"l": 16, "t": 30},
            "showlegend": False,
            "xaxis": axis("ms on the critical path", range=[0, 1e3 * binding.length_s], zeroline=False),
            "yaxis": {"showticklabels": False, "fixedrange": True},
        },
    }


def _bars(
    step: StepFile,
    spans: Spans,
    place: int,
    run: str,
    rows: dict[tuple[str, Lane], float],
    critical: frozenset[str],
) -> list[_Bar]:
    """Return the tasks that took any time."""
    columns = zip(step.tasks, step.lanes, spans.start_s[place], spans.end_s[place], strict=True)
    return [
        _Bar(
            name=Name.parse(task),
            run=run,
            row=rows[run, Lane(lane)],
            start_s=start_s,
            end_s=end_s,
            critical=task in critical,
        )
        for task, lane, start_s, end_s in columns
        if end_s > start_s
    ]


def _trace(family: Family, bars: Sequence[_Bar]) -> Figure | None:
    own = [bar for bar in bars if bar.family is family]
    if not own:
        return None
    return {
        "type": "bar",
        "orientation": "h",
        "name": str(family),
        "base": [round(1e3 * bar.start_s, 4) for bar in own],
        "x": [round(1e3 * (bar.end_s - bar.start_s), 4) for bar in own],
        "y": [bar.row for bar in own],
        "width": THICK,
        "marker": {
            "color": COLOURS[family],
            "line": {
                "color": [TEXT if bar.critical else BOX for bar in own],
                "width": [1.6 if bar.critical else 0.6 for bar in own],
            },
        },
        "text": [bar.short for bar in own],
        "textfont": {"size": 11, "color": ink(family)},
        "hovertext": [bar.hover for bar in own],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _end_s(bars: Sequence[_Bar], run: str) -> float:
    return max((bar.end_s for bar in bars if bar.run == run), default=0.0)


def _heading(text: str, row: float) -> Figure:
    """Return a heading above the lanes of a run."""
    place = {"x": 0, "xref": "paper", "xanchor": "left", "y": row, "yanchor": "middle"}
    return place | {"text": text, "showarrow": False, "font": {"size": 13, "color": QUIET}}
