"""The figures of `plot` as one interactive page: a single file that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from benchmarks.views import (
    TIMES,
    CaseView,
    Result,
    RunView,
    by_rate,
    colours,
    ink,
    lines,
    milliseconds,
    rate_text,
    tint,
    view,
)
from penstock.report.page.render import BOX, LIMIT, QUIET, TEXT, Figure, Row, render
from penstock.words import change

SHIPPED_SHARE: Final = 0.45

HEAD: Final = (
    "case",
    "pieces",
    "iteration ms [95 %]",
    "speed-up [95 %]",
    "efficiency",
    "exposed ms",
    "overhead",
    "peak MiB",
    "predicted ms",
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A run in the page.

    Attributes:
        name: The name of its figure.
    """

    name: str
    title: str
    facts: str
    rows: tuple[Row, ...]


def write_page(results: Mapping[str, Result], title: str = "Penstock benchmarks", subtitle: str = "") -> str:
    """Return HTML with everything in it, plotly.js included.

    Args:
        results: Results by names that are unique and made of letters, digits, `-` and `_`.
    """
    runs = {name: view(result) for name, result in results.items()}
    palette = colours(runs.values())
    figures = {name: run_figure(run, palette) for name, run in runs.items()}
    sections = [_section(name, run, palette) for name, run in runs.items()]
    overview = _overview(list(runs.values()), palette)
    return render(
        "page.html.j2",
        overview | figures,
        folder=Path(__file__).parent,
        title=title,
        subtitle=subtitle,
        overview=tuple(overview),
        sections=sections,
        head=HEAD,
    )


def _overview(runs: Sequence[RunView], palette: Mapping[str, str]) -> dict[str, Figure]:
    figures = {}
    if (ordered := by_rate(runs)) and lines(ordered):
        figures["overview-rates"] = rates_figure(ordered, palette)
    if any(case.simulated_s for run in runs for case in run.cases):
        figures["overview-prediction"] = prediction_figure(runs, palette)
    return figures


# ---- figures -----------------------------------------------------------------------------------------------


def run_figure(run: RunView, palette: Mapping[str, str]) -> Figure:
    """Return bars of all cases against the limit, the first case on top."""
    data = [_bar(run, case, palette[case.schedule]) for case in run.cases]
    longest_s = max(run.limit_s, *(case.high_s for case in run.cases))
    layout = _layout(
        height=114 + 46 * len(run.cases),
        xaxis={
            "title": {"text": "iteration in ms", "standoff": 8},
            "range": [0, 1040 * longest_s],
        },
        yaxis={
            "autorange": "reversed",
            "tickfont": {"size": 13, "color": TEXT},
            "automargin": True,
            "ticks": "outside",
            "ticklen": 6,
            "tickcolor": BOX,
        },
        shapes=[_limit_line(x=1e3 * run.limit_s)],
        annotations=[
            {
                "x": 1e3 * run.limit_s,
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
                "text": run.limit_name,
                "showarrow": False,
                "font": {"color": LIMIT, "size": 12},
            }
        ],
        showlegend=False,
        bargap=0.32,
    )
    return {"data": data, "layout": layout}


def _bar(run: RunView, case: CaseView, colour: str) -> Figure:
    fill = tint(colour, SHIPPED_SHARE) if case.shipped else colour
    marker: dict[str, Any] = {"color": fill}
    if case.shipped:
        marker["pattern"] = {"shape": "/", "fgcolor": colour, "bgcolor": fill, "size": 7, "solidity": 0.25}
    return {
        "type": "bar",
        "orientation": "h",
        "x": [1e3 * case.iteration_s],
        "y": [f"<b>{escape(case.title)}</b><br>efficiency {case.efficiency:.2f}"],
        "marker": marker,
        "text": [f"&nbsp;<b>{case.speedup:.2f}{TIMES}</b>&nbsp; {milliseconds(case.iteration_s)}"],
        "insidetextanchor": "start",
        "textfont": {"color": ink(fill), "size": 13},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [1e3 * (case.high_s - case.iteration_s)],
            "arrayminus": [1e3 * (case.iteration_s - case.low_s)],
            "color": TEXT,
            "thickness": 1.4,
            "width": 5,
        },
        "hovertemplate": f"{_hover(run, case)}<extra></extra>",
    }


def rates_figure(runs: Sequence[RunView], palette: Mapping[str, str]) -> Figure:
    """Return a figure of overlap efficiency against the rate between nodes.

    Args:
        runs: Runs by rising rate.
        palette: Colours by schedule.
    """
    by_case = lines(runs)
    ticks = sorted({rate for line in by_case.values() for rate in line})
    layout = _layout(
        height=440,
        title=_title("Overlap efficiency by link rate", f"physical limit / iteration on {runs[0].shape}"),
        xaxis={
            "type": "log",
            "tickvals": ticks,
            "ticktext": [rate_text(rate) for rate in ticks],
            "title": {"text": "rate between nodes (logarithmic)"},
            "showgrid": False,
        },
        yaxis={"title": {"text": "efficiency"}, "tickformat": ".1f"},
        shapes=[_limit_line(y=1.0)],
    )
    return {"data": [_line(line, palette) for line in by_case.values()], "layout": layout}


def _line(line: Mapping[float, tuple[RunView, CaseView]], palette: Mapping[str, str]) -> Figure:
    points = [line[rate] for rate in sorted(line)]
    first = points[0][1]
    colour = palette[first.schedule]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": first.title,
        "x": sorted(line),
        "y": [case.efficiency for _, case in points],
        "line": {"color": colour, "width": 2.5, "dash": "dash" if first.shipped else "solid"},
        "marker": {"size": 9, "color": BOX if first.shipped else colour, "line": _edge(colour)},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [case.limit_s / case.low_s - case.efficiency for run, case in points],
            "arrayminus": [case.efficiency - case.limit_s / case.high_s for run, case in points],
            "color": tint(colour, 0.7),
            "thickness": 1.2,
        },
        "hovertemplate": [f"{_hover(run, case)}<extra></extra>" for run, case in points],
    }


def prediction_figure(runs: Sequence[RunView], palette: Mapping[str, str]) -> Figure:
    """Return a figure of simulated against measured iterations, a set of points per schedule."""
    points = [(run, case) for run in runs for case in run.cases if case.simulated_s is not None]
    times_ms = [1e3 * (t or 0.0) for _, case in points for t in (case.iteration_s, case.simulated_s)]
    ends = [min(times_ms) / 1.15, max(times_ms) * 1.15]
    diagonal: Figure = {"type": "scatter", "mode": "lines", "x": ends, "y": ends, "name": "as predicted"}
    diagonal |= {"line": {"color": QUIET, "width": 1.5, "dash": "dot"}, "hoverinfo": "skip"}
    names = dict.fromkeys(case.schedule for _, case in points)
    clouds = [_cloud(name, [p for p in points if p[1].schedule == name], palette[name]) for name in names]
    hollow = "hollow points: virtual devices" if any(run.virtual for run, _ in points) else ""
    axis = {"type": "log", "nticks": 8}
    layout = _layout(
        height=520,
        title=_title("Predicted against measured iteration", hollow),
        xaxis=axis | {"title": {"text": "measured in ms (logarithmic)"}},
        yaxis=axis | {"title": {"text": "predicted in ms"}},
    )
    return {"data": [diagonal, *clouds], "layout": layout}


def _cloud(name: str, points: Sequence[tuple[RunView, CaseView]], colour: str) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [1e3 * case.iteration_s for _, case in points],
        "y": [1e3 * (case.simulated_s or 0.0) for _, case in points],
        "marker": {
            "size": 11,
            "color": [BOX if run.virtual else colour for run, _ in points],
            "line": _edge(colour),
        },
        "hovertemplate": [f"{_hover(run, case)}<extra></extra>" for run, case in points],
    }


def _hover(run: RunView, case: CaseView) -> str:
    """Return all numbers of a case."""
    rows = zip(HEAD[1:], _cells(case)[1:], strict=True)
    return "<br>".join(
        [
            f"<b>{escape(case.title)}</b>",
            escape(run.title),
            *(f"{name}: {value}" for name, value in rows),
            run.limit_name,
        ]
    )


def _layout(height: int, **more: Any) -> Figure:
    base = {
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 70 if "title" in more else 34, "b": 54},
        "legend": {"orientation": "v", "x": 1.02, "y": 1, "yanchor": "auto", "font": {"size": 14}},
    }
    return base | more


def _title(text: str, subtitle: str) -> Figure:
    return {
        "text": f"<b>{text}</b>",
        "font": {"size": 17, "color": TEXT},
        "subtitle": {"text": subtitle, "font": {"size": 12, "color": QUIET}},
        "x": 0.01,
        "xanchor": "left",
    }


def _limit_line(x: float | None = None, y: float | None = None) -> Figure:
    line = {"type": "line", "line": {"color": LIMIT, "width": 2, "dash": "dash"}}
    if x is not None:
        return line | {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
    return line | {"y0": y, "y1": y, "x0": 0, "x1": 1, "xref": "paper"}


def _edge(colour: str) -> Figure:
    return {"color": colour, "width": 2}


# ---- text --------------------------------------------------------------------------------------------------


def _section(name: str, run: RunView, palette: Mapping[str, str]) -> Section:
    wire = "link rate not known" if run.wire_s is None else f"the bytes alone {milliseconds(run.wire_s)}"
    facts = f"{run.ranks} ranks, {run.shape}; computation alone {milliseconds(run.compute_s)}; {wire}"
    rows = tuple(
        Row(title=case.title, colour=palette[case.schedule], cells=_cells(case)[1:]) for case in run.cases
    )
    return Section(name=name, title=run.title, facts=facts, rows=rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 1}f}"


def _cells(case: CaseView) -> tuple[str, ...]:
    simulated_s = case.simulated_s
    return (
        case.title,
        case.pieces or "-",
        f"{_ms(case.iteration_s)} [{_ms(case.low_s)}, {_ms(case.high_s)}]",
        f"{case.speedup:.3f} [{case.speedup_low:.3f}, {case.speedup_high:.3f}]",
        f"{case.efficiency:.3f}",
        "-" if case.exposed_s is None else _ms(case.exposed_s),
        "-" if case.overhead_share is None else f"{100 * case.overhead_share:.1f} %",
        f"{case.peak_bytes / 2**20:.0f}",
        "-" if not simulated_s else f"{_ms(simulated_s)} ({change(case.iteration_s, simulated_s)})",
    )
