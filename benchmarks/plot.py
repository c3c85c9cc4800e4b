"""Figures of results as PNG files. Needs no display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

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

DPI: Final = 160
WIDTH_IN: Final = 9.0
TEXT: Final = "#1B1F23"
QUIET: Final = "#6B737C"
GRID: Final = "#E4E7EB"
LIMIT: Final = "#B3202C"
SHIPPED_SHARE: Final = 0.45
"""How much of a schedule's colour is left where it runs over Gloo's own all-to-all."""


def draw(results: Mapping[str, Result], folder: Path) -> dict[str, Path]:
    """Write every figure that these results allow into `folder`, which is made if need be.

    Args:
        results: Results by names that serve as file names.
        folder: Where to write.

    Returns:
        The files by name. Figures over several runs are `rates` (only with two link rates or more) and
        `prediction` (only if something was predicted).
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = {name: view(result) for name, result in results.items()}
    palette = colours(runs.values())
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 10.0, "hatch.linewidth": 0.8}):
        figures = {name: run_figure(run, palette) for name, run in runs.items()}
        if (ordered := by_rate(list(runs.values()))) and lines(ordered):
            figures["rates"] = rates_figure(ordered, palette)
        if any(case.simulated_s for run in runs.values() for case in run.cases):
            figures["prediction"] = prediction_figure(list(runs.values()), palette)
        files = {name: folder / f"{name}.png" for name in figures}
        for name, figure in figures.items():
            figure.savefig(files[name], dpi=DPI)
    return files


# ---- one run: bars against the limit -----------------------------------------------------------------------


def run_figure(run: RunView, palette: Mapping[str, str]) -> Figure:
    """Return a figure of the iteration time of every case, the first on top, with the limit as a line."""
    count = len(run.cases)
    height_in = 1.52 + 0.56 * count
    figure = _figure(height_in)
    axes = figure.add_axes((0.215, 0.56 / height_in, 0.755, 0.56 * count / height_in))
    longest_s = max(case.high_s for case in run.cases)
    for place, case in enumerate(run.cases):
        _bar(axes, place, case, palette[case.schedule], longest_s)
    axes.set_xlim(0, 1.16 * max(longest_s, run.limit_s))
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{1e3 * x:g}"))
    axes.set_xlabel("iteration in ms, median of the slowest rank; whiskers: 95 % interval", color=QUIET)
    _clean(axes, "x")
    _limit_line(axes, run)
    _headline(figure, run.title, _subtitle(run))
    return figure


def _bar(axes: Axes, place: int, case: CaseView, colour: str, longest_s: float) -> None:
    """Draw one bar: the ratio stands on it, the time behind the whisker, name and efficiency in front."""
    fill = tint(colour, SHIPPED_SHARE) if case.shipped else colour
    hatch = "///" if case.shipped else None
    axes.barh(place, case.iteration_s, height=0.66, color=fill, hatch=hatch, edgecolor=colour, linewidth=0)
    for colour_of_line, width in (("white", 3.0), (TEXT, 1.3)):  # a white edge, so that it shows on any bar
        _whisker(axes, place, case, colour_of_line, width)
    box = {"facecolor": fill, "edgecolor": "none", "boxstyle": "round,pad=0.15"} if case.shipped else None
    axes.text(
        0.012 * longest_s,
        place,
        f"{case.speedup:.2f}{TIMES}",
        color=ink(fill),
        weight="bold",
        va="center",
        bbox=box,
    )
    axes.text(case.high_s + 0.014 * longest_s, place, milliseconds(case.iteration_s), color=TEXT, va="center")
    side = axes.get_yaxis_transform()
    name_colour = _readable(colour)
    axes.text(-0.015, place - 0.15, case.label, transform=side, color=name_colour, ha="right", va="center")
    axes.texts[-1].set_fontweight("bold")
    axes.texts[-1].set_fontsize(10.5 if len(case.label) < 20 else 8.0)
    note = f"{case.remark}efficiency {case.efficiency:.2f}"
    axes.text(-0.015, place + 0.19, note, transform=side, color=QUIET, ha="right", va="center", fontsize=8.5)


def _whisker(axes: Axes, place: int, case: CaseView, colour: str, width_points: float) -> None:
    sides = [[case.iteration_s - case.low_s], [case.high_s - case.iteration_s]]
    axes.errorbar(
        case.iteration_s,
        place,
        xerr=sides,
        color=colour,
        linewidth=width_points,
        capsize=3.5 + (width_points - 1.3) / 2,
        capthick=width_points,
        zorder=4,
    )


def _limit_line(axes: Axes, run: RunView) -> None:
    axes.axvline(run.limit_s, color="white", linewidth=3.2, alpha=0.7, zorder=3)
    axes.axvline(run.limit_s, color=LIMIT, linewidth=1.6, linestyle=(0, (4, 2)), zorder=3)
    share = run.limit_s / axes.get_xlim()[1]
    side = "left" if share < 0.2 else "right" if share > 0.8 else "center"
    where = axes.get_xaxis_transform()
    axes.text(run.limit_s, 1.02, run.limit_name, transform=where, color=LIMIT, ha=side, fontsize=9.5)


def _subtitle(run: RunView) -> str:
    alone = f"computation alone {milliseconds(run.compute_s)}"
    wire = "link rate not known" if run.wire_s is None else f"the bytes alone {milliseconds(run.wire_s)}"
    hatched = "; hatched: Gloo's own all-to-all" if any(case.shipped for case in run.cases) else ""
    return f"{alone}; {wire}; ratios against {run.cases[0].label}{hatched}"


# ---- several rates: efficiency against rate ----------------------------------------------------------------


def rates_figure(runs: Sequence[RunView], palette: Mapping[str, str]) -> Figure:
    """Return a figure of overlap efficiency against the rate between nodes, a line for each case.

    Args:
        runs: Runs by rising rate.
        palette: Colours by schedule.
    """
    figure = _figure(5.0)
    axes = figure.add_axes((0.085, 0.125, 0.635, 0.705))
    by_case = lines(runs)
    ends: list[tuple[float, str, str]] = []
    for number, line in enumerate(by_case.values()):
        points = [line[rate] for rate in sorted(line)]
        last, aside = points[-1][1], 1 + 0.012 * (number - (len(by_case) - 1) / 2)
        _line(axes, [rate * aside for rate in sorted(line)], points, palette[last.schedule])
        ends.append((last.efficiency, last.title, palette[last.schedule]))
    ticks = sorted({rate for line in by_case.values() for rate in line})
    _rate_axes(axes, ticks)
    ends_of_whiskers = [
        limit.limit_s / time_s
        for line in by_case.values()
        for limit, case in line.values()
        for time_s in (case.low_s, case.high_s)
    ]
    axes.set_ylim(*_efficiency_range(ends_of_whiskers))
    _end_labels(axes, ends)
    title = "Overlap efficiency by link rate" + (" (virtual devices)" if runs[0].virtual else "")
    text = f"physical limit / iteration on {runs[0].shape}: at 1 no schedule can be faster; 95 % intervals"
    _headline(figure, title, text)
    return figure


def _line(
    axes: Axes, rates: Sequence[float], points: Sequence[tuple[RunView, CaseView]], colour: str
) -> None:
    """Draw points with the interval of the iteration time, carried over to the efficiency.

    rates: in bit/s, each line a little aside of the others, so that intervals do not hide each other.
    """
    shipped = points[0][1].shipped
    middle = [case.efficiency for _, case in points]
    below = [case.efficiency - case.limit_s / case.high_s for run, case in points]
    above = [case.limit_s / case.low_s - case.efficiency for run, case in points]
    axes.errorbar(
        rates,
        middle,
        yerr=[[max(0.0, x) for x in below], [max(0.0, x) for x in above]],
        color=colour,
        linewidth=2.2,
        linestyle=(0, (3, 2)) if shipped else "-",
        marker="o",
        markersize=6.5,
        markerfacecolor="white" if shipped else colour,
        markeredgecolor=colour if shipped else "white",
        ecolor=tint(colour, 0.7),
        elinewidth=1.2,
        capsize=2.5,
    )


def _efficiency_range(values: Sequence[float]) -> tuple[float, float]:
    """Return a range with all values and the limit; values far beyond it, which are noise, are cut off."""
    return max(0.0, math.floor(10 * (min(values) - 0.02)) / 10), min(1.3, max(1.03, max(values) + 0.02))


def _rate_axes(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(ticks[0] / 1.12, ticks[-1] * 1.08)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: rate_text(x)))
    axes.set_xlabel("rate between nodes (logarithmic)", color=QUIET)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.1f}"))
    axes.axhline(1.0, color=LIMIT, linewidth=1.5, linestyle=(0, (4, 2)))
    left = axes.get_yaxis_transform()
    axes.text(0.006, 0.992, "physical limit", transform=left, color=LIMIT, fontsize=9, va="top")
    _clean(axes, "y")


def _end_labels(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write names behind the last points, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    places = apart([height for height, _, _ in ends], 0.052 * (high - low))
    for (height, label, colour), place in zip(ends, places, strict=True):
        text = f"{label}  {height:.2f}"
        axes.text(1.012, place, text, transform=axes.get_yaxis_transform(), color=_readable(colour))
        axes.texts[-1].set(weight="bold", va="center", fontsize=9.5 if len(label) < 18 else 7.5)


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return the same heights, moved as little as needed so that neighbours stand at least `gap` apart."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    clusters: list[list[int]] = []
    for index in order:
        clusters.append([index])
        while len(clusters) > 1 and _bottom(clusters[-1], heights, gap) < _top(clusters[-2], heights, gap):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    places = [0.0] * len(heights)
    for cluster in clusters:
        start = _bottom(cluster, heights, gap) + gap / 2
        for number, index in enumerate(cluster):
            places[index] = start + number * gap
    return places


def _bottom(cluster: Sequence[int], heights: Sequence[float], gap: float) -> float:
    return sum(heights[i] for i in cluster) / len(cluster) - len(cluster) * gap / 2


def _top(cluster: Sequence[int], heights: Sequence[float], gap: float) -> float:
    return _bottom(cluster, heights, gap) + len(cluster) * gap


# ---- predicted against measured ----------------------------------------------------------------------------


def prediction_figure(runs: Sequence[RunView], palette: Mapping[str, str]) -> Figure:
    """Return a figure of simulated against measured iterations, a point for each predicted case."""
    figure = _figure(6.4, width_in=8.2)  # room for names such as sequential+zero1
    axes = figure.add_axes((0.1, 0.105, 0.5914, 0.7578))  # square
    points = [
        (run, case, case.simulated_s) for run in runs for case in run.cases if case.simulated_s is not None
    ]
    for run, case, simulated_s in points:
        colour = palette[case.schedule]
        face = "white" if run.virtual else colour
        edge = colour if run.virtual else "white"
        axes.plot(case.iteration_s, simulated_s, "o", markersize=10, color=face, markeredgecolor=edge)
        axes.lines[-1].set(markeredgewidth=1.6 if run.virtual else 0.8, zorder=3)
    _square_axes(axes, [t for _, case, simulated_s in points for t in (case.iteration_s, simulated_s)])
    _names(axes, list(dict.fromkeys(case.schedule for _, case, _ in points)), palette)
    notes = ["band: within 10 %", "line: as predicted"]
    if any(run.virtual for run in runs):
        notes += ["hollow: virtual devices", "filled: real computation"]
    for number, note in enumerate(notes):
        axes.text(1.035, 0.042 * number, note, transform=axes.transAxes, color=QUIET, fontsize=9)
    errors = [abs(case.iteration_s / simulated_s - 1) for _, case, simulated_s in points]
    text = (
        f"median error {100 * median(errors):.0f} %, largest {100 * max(errors):.0f} %, {len(points)} cases"
    )
    _headline(figure, "Predicted against measured iteration", text)
    return figure


def _square_axes(axes: Axes, times_s: Sequence[float]) -> None:
    low, high = min(times_s) / 1.15, max(times_s) * 1.15
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.fill_between(
        [low, high], [low / 1.1, high / 1.1], [low * 1.1, high * 1.1], color="#EEF1F4", zorder=0
    )
    axes.plot([low, high], [low, high], color=QUIET, linewidth=1.2, zorder=1)
    ticks = log_ticks(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{1e3 * x:g}"))
    axes.set_xlabel("measured in ms (logarithmic)", color=QUIET)
    axes.set_ylabel("predicted in ms", color=QUIET)
    _clean(axes, "both")


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers within [low, high], about equally far apart on a logarithmic axis."""
    for steps in (
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
        (1, 1.5, 2, 2.5, 3, 4, 5, 7),
        (1, 2, 3, 5, 7),
        (1, 2, 5),
        (1, 3),
        (1,),
    ):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [
            step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high
        ]
        if len(ticks) <= most:
            return ticks
    return ticks


def _names(axes: Axes, names: Sequence[str], palette: Mapping[str, str]) -> None:
    """Write which schedule has which colour beside the points."""
    for number, name in enumerate(names):
        place = 0.985 - 0.062 * number
        axes.plot(1.05, place, "o", markersize=8, color=palette[name], transform=axes.transAxes)
        axes.lines[-1].set_clip_on(False)
        axes.text(1.08, place, name, transform=axes.transAxes, color=_readable(palette[name]), va="center")
        axes.texts[-1].set_fontweight("bold")


# ---- what all figures share --------------------------------------------------------------------------------


def _figure(height_in: float, width_in: float = WIDTH_IN) -> Figure:
    figure = Figure(figsize=(width_in, height_in), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _headline(figure: Figure, title: str, subtitle: str) -> None:
    """Write two lines at the upper left, at the same distance from the edge whatever the figure's size."""
    width_in, height_in = figure.get_size_inches()
    left = 0.18 / width_in
    figure.text(left, 1 - 0.16 / height_in, title, fontsize=13.5, weight="bold", color=TEXT, va="top")
    figure.text(left, 1 - 0.46 / height_in, subtitle, fontsize=9.5, color=QUIET, va="top")


def _clean(axes: Axes, grid: str) -> None:
    """Leave only the grid lines that help to read values, behind everything else."""
    axes.set_axisbelow(True)
    for name in ("x", "y") if grid == "both" else (grid,):
        axes.grid(axis="x" if name == "x" else "y", color=GRID, linewidth=0.9)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=QUIET, labelsize=9)


def _readable(colour: str) -> str:
    """Return a darker shade of a colour, for text on white."""
    return "#" + "".join(f"{int(int(colour[i : i + 2], 16) * 0.72):02X}" for i in (1, 3, 5))
