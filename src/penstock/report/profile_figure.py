"""Every fitted line over the points that it rests on, as small multiples in one PNG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cost import ClusterFile
from penstock.cost.cluster_file import Fit, LinkModel
from penstock.report.profile import UNKNOWN, alike, is_checked, link_name
from penstock.writing import replacing

if TYPE_CHECKING:  # planning does without matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS: Final = 6
MOST_TICKS: Final = 4
PANEL_IN: Final = (2.35, 1.66)
HEAD_IN, ROW_TITLE_IN, FOOT_IN = 0.85, 0.3, 0.1
DPI: Final = 140
TEXT, QUIET, GRID = "#1B1F23", "#6B737C", "#E4E7EB"
COLOURS: Final = {"links": "#0B6E99", "tasks": "#B45F06", "kernels": "#4C7A34"}
UNITS: Final = {"flop": "operations", "byte": "bytes"}
FAR = 0.25
"""A point that is farther from its line than this share is drawn hollow."""


@dataclass(frozen=True)
class Panel:
    """One line, alpha_s + beta_s * x. unit: of x."""

    title: str
    unit: str
    alpha_s: float
    beta_s: float
    fit: Fit


@dataclass(frozen=True)
class Part:
    """Panels with one kind of horizontal axis."""

    name: str
    title: str
    panels: Sequence[Panel]


def draw_profile(file: ClusterFile, folder: Path) -> Path:
    """Write `profile.png` into `folder`, which is created if necessary, and return its path."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    parts = [part for part in _parts(file) if part.panels]
    rows = sum(_rows(part) for part in parts)
    size = COLUMNS * PANEL_IN[0], HEAD_IN + FOOT_IN + ROW_TITLE_IN * len(parts) + PANEL_IN[1] * rows
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9.0}):
        figure = Figure(figsize=size, facecolor="white")
        FigureCanvasAgg(figure)
        width_in, height_in = figure.get_size_inches()
        left = 0.2 / width_in
        title = f"{file.name}: {file.ranks} ranks on {file.nodes} nodes"
        figure.text(left, 1 - 0.18 / height_in, title, fontsize=14, weight="bold", color=TEXT, va="top")
        text = "points: medians; line: fit; hollow: more than 25 % from the line; both axes logarithmic"
        figure.text(left, 1 - 0.5 / height_in, text, fontsize=9.5, color=QUIET, va="top")
        top_in = HEAD_IN
        for part in parts:
            _draw_part(figure, part, top_in)
            top_in += ROW_TITLE_IN + PANEL_IN[1] * _rows(part)
        with replacing(folder / "profile.png") as picture:
            figure.savefig(picture, format="png", dpi=DPI)
    return folder / "profile.png"


def _parts(file: ClusterFile) -> list[Part]:
    links = [_link_panel(links, links[0].fit) for links in alike(file.links) if links[0].fit is not None]
    tasks = [
        Panel(f"{task.op}.{task.phase}", "s", task.alpha_s, task.scale, task.fit)
        for task in file.tasks
        if task.fit is not None
    ]
    kernels = [
        Panel(f"{kernel.name}: {UNITS[kernel.unit]}", "", kernel.alpha_s, kernel.beta_s_per_unit, kernel.fit)
        for kernel in file.kernels
        if kernel.fit is not None
    ]
    return [
        Part("links", "Links: seconds over bytes", links),
        Part("tasks", "Tasks: measured seconds over nominal seconds (rates of matmul and copy)", tasks),
        Part("kernels", "Kernels: seconds over operations or bytes", kernels),
    ]


def _link_panel(links: Sequence[LinkModel], fit: Fit) -> Panel:
    link, groups = links[0], ", ".join(link.group for link in links)
    return Panel(f"{link_name(link)}\n{groups} on {link.lane}", "B", link.alpha_s, link.beta_s_per_byte, fit)


def _rows(part: Part) -> int:
    return -(-len(part.panels) // COLUMNS)


def _draw_part(figure: Figure, part: Part, top_in: float) -> None:
    width_in, height_in = figure.get_size_inches()
    place = 0.2 / width_in, 1 - (top_in + 0.08) / height_in
    figure.text(*place, part.title, fontsize=11, weight="bold", color=COLOURS[part.name], va="top")
    for number, panel in enumerate(part.panels):
        row, column = divmod(number, COLUMNS)
        left = (column * PANEL_IN[0] + 0.55) / width_in
        bottom = 1 - (top_in + ROW_TITLE_IN + (row + 1) * PANEL_IN[1] - 0.36) / height_in
        size = (PANEL_IN[0] - 0.72) / width_in, (PANEL_IN[1] - 0.86) / height_in
        _draw_panel(figure.add_axes((left, bottom, *size)), panel, COLOURS[part.name])


def _draw_panel(axes: Axes, panel: Panel, colour: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    sizes, times = ([point[i] for point in panel.fit.points] for i in (0, 1))
    low, high = min(sizes) / 1.6, max(sizes) * 1.6
    steps = [low * (high / low) ** (i / 60) for i in range(61)]
    line = [panel.alpha_s + panel.beta_s * x for x in steps]
    axes.plot(steps, line, color=colour, linewidth=1.4, alpha=0.75)
    for size, time in zip(sizes, times, strict=True):
        expected = panel.alpha_s + panel.beta_s * size
        far = max(time, expected) > (1 + FAR) * min(time, expected)
        axes.plot(size, time, "o", markersize=5, color="white" if far else colour, markeredgecolor=colour)
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(min(*times, *line) / 1.35, max(*times, *line) * 1.35)
    for axis, unit, limits in ((axes.xaxis, panel.unit, axes.get_xlim()), (axes.yaxis, "s", axes.get_ylim())):
        axis.set_major_locator(FixedLocator(_ticks(*limits)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda x, _, unit=unit: _short(x, unit)))
    axes.set_title(panel.title, fontsize=8.5, color=TEXT, loc="left", pad=4)
    note = f"R2 {panel.fit.r2:.3f}" if is_checked(panel.fit) else f"R2 {UNKNOWN}"
    axes.text(0.97, 0.05, note, transform=axes.transAxes, color=QUIET, fontsize=8, ha="right")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=QUIET, labelsize=8)


def _ticks(low: float, high: float) -> list[float]:
    """Return two to four round numbers between the ends of a logarithmic axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = [n * 10.0**power for power in powers for n in steps if low <= n * 10.0**power <= high]
        if len(ticks) <= MOST_TICKS:
            return ticks
    return ticks[:: math.ceil(len(ticks) / MOST_TICKS)]


def _short(value: float, unit: str) -> str:
    """Return a short text: `10 us`, `1 ms`, `100 kB`."""
    steps = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
    size, prefix = next((step for step in steps if value >= 0.999 * step[0]), steps[-1])
    return f"{value / size:.3g} {prefix}{unit}".strip()
