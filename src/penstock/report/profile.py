"""What `penstock profile` shows: the fitted lines, how well they fit, and a picture of all points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Final

from penstock.cost import ClusterFile
from penstock.cost.cluster_file import Fit, KernelModel, LinkModel, TaskModel
from penstock.cost.measured import listed
from penstock.cost.span import even_leg
from penstock.mesh import holders, num_nodes
from penstock.ops import OPS
from penstock.report.loads import QUIET, TEXT, sheet
from penstock.words import counted, folded, markdown_table, stacked

MEGA, GIGA, MICRO = 1e6, 1e9, 1e-6
FIT_HEAD = ("R2", "residual", "points")
LINK_HEAD = ("collective", "group", "lane", "ranks", "start us", "Mbit/s", *FIT_HEAD)
TASK_HEAD = ("task", "fixed us", "factor", "contention", *FIT_HEAD)
KERNEL_HEAD = ("kernel", "start us", "rate", *FIT_HEAD)
LEAST_R2 = 0.5
"""A line that explains less than half of the scatter says nothing about how time grows with size."""

LEAST_POINTS = 3
"""A line goes through two points exactly, however wrong they are."""

UNKNOWN = "?"
EXPLANATION = (
    "start-up + bytes / bandwidth; bytes: through the link of the busiest rank, in one direction",
    "fixed + factor x its time at the rates of matmul and copy; contention: slowdown during transfers",
)

GROUPS: Final = {
    "ep": "ranks among which experts are spread",
    "node": "those of them in one node",
    "rail": "those of them at the same place in their nodes",
    "edp": "ranks with the same experts",
    "world": "all ranks",
    "etp": "ranks that share every one of their experts",
    "ep x etp": "ranks with a part of some expert of a layer",
    "tp": "ranks that share attention",
    "dp": "ranks with the same part of attention",
}
"""The meaning of the groups of `Group.NAMES`."""

PHASES: Final = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradients of the input",
    "W": "backward, gradients of the weights",
}


def profile_text(file: ClusterFile, width: int | None = None) -> str:
    """Return tables of links, tasks and kernels in Markdown.

    Args:
        width: Columns of the terminal; a wider table is printed in parts, one below the other. None = as wide
            as a document.
    """
    lines = [_headline(file)]
    if file.links:
        rows = [_link_row(file, links) for links in alike(file.links)]
        lines += ["", *_tables([LINK_HEAD, *rows], width, keep=3), EXPLANATION[0], _groups(file)]
    if file.tasks:
        lines += [
            "",
            *_tables([TASK_HEAD, *map(_task_row, file.tasks)], width, keep=1),
            EXPLANATION[1],
            _ops(file),
        ]
    if file.kernels:
        lines += ["", *_tables([KERNEL_HEAD, *map(_kernel_row, file.kernels)], width, keep=1)]
    text = "\n".join([*lines, "", *_rest(file)])
    return text if width is None else folded(text, width)


def link_bandwidth(file: ClusterFile, link: LinkModel) -> float | None:
    """Return bytes per second through the busiest rank's link in one direction; None if nothing crosses."""
    share = _share(file, link)
    return share / link.beta_s_per_byte if share > 0 else None


def link_name(link: LinkModel) -> str:
    """Return `all_to_all`, or `hierarchical_2d DG` for a leg."""
    return f"{link.collective} {link.op}".strip()


def alike(links: Sequence[LinkModel]) -> list[list[LinkModel]]:
    """Return groups of links that differ only in their group's name: the same members, measured once."""
    groups: dict[LinkModel, list[LinkModel]] = {}
    for link in links:
        groups.setdefault(replace(link, group=""), []).append(link)
    return list(groups.values())


def _share(file: ClusterFile, link: LinkModel) -> float:
    """Return the bytes through the busiest rank's link per byte of the model's argument."""
    ranks = link.ranks
    others = ranks - 1
    if link.op:
        # A leg's group is an expert group, which has as many ranks in every node.
        nodes = min(ranks, link.nodes or num_nodes(ranks, min(file.ranks_per_node, ranks)))
        return even_leg(link.collective, link.op, nodes, holders(ranks, nodes)).share
    if link.collective == "uneven_all_to_all":
        return 2 * others / (ranks + 1)  # what the popular rank gets
    if link.collective == "broadcast":
        return others
    if link.collective == "point_to_point":
        return 1
    return (2 if link.collective == "all_reduce" else 1) * others / ranks


def _groups(file: ClusterFile) -> str:
    """Return what the names of groups mean."""
    names = dict.fromkeys(link.group for link in file.links)
    return "; ".join(f"{name}: {GROUPS[name]}" for name in names if name in GROUPS)


def _ops(file: ClusterFile) -> str:
    """Return what the names of tasks mean."""
    ops = dict.fromkeys(task.op for task in file.tasks)
    phases = dict.fromkeys(task.phase for task in file.tasks)
    meant = [f"{op}: {OPS[op].title}" for op in ops if op in OPS]
    return "; ".join([*meant, *(f".{phase}: {PHASES[phase]}" for phase in phases if phase in PHASES)])


def _headline(file: ClusterFile) -> str:
    text = f"{file.name}: {counted(file.ranks, 'rank')} on {counted(file.nodes, 'node')}"
    if file.measured is None:
        return text
    here = file.measured
    device = here.processor if here.device == "cpu" else here.device
    return f"{text}, {device}, PyTorch {here.torch}, {here.date}"


def _rest(file: ClusterFile) -> list[str]:
    lines = []
    fits = [each.fit for models in (file.links, file.tasks, file.kernels) for each in models]
    if not all(map(_is_line, fits)):
        why = f"R2 is below {LEAST_R2:g}, so time hardly grew with size"
        lines.append(f"{UNKNOWN}: {why}; measure with a larger --budget, while nothing else runs")
    if any(fit is not None and not is_checked(fit) for fit in fits):
        why = f"fewer than {LEAST_POINTS} points do not say how well a line fits"
        lines.append(f"R2 and residual {UNKNOWN}: {why}; measure with a larger --budget")
    if file.links:
        usual = file.contended_transfers
        beside = _span(usual if link.contended is None else link.contended for link in file.links)
        in_steps = _span(link.in_steps for link in file.links)
        text = f"transfers take {beside} times as long during computation as alone"
        lines.append(text if in_steps == "1.00" else f"{text}; in steps {in_steps} times as long as above")
    if file.tasks:
        lines.append(f"task durations vary by {_percent(file.jitter)} (standard deviation)")
    if file.steps is not None:
        low, high = file.steps.around(1.0)
        steps, ratio = file.steps.steps, file.steps.ratio
        lines += [
            f"{steps} real steps took {ratio:.2f} times as long as their parts say; predictions include that",
            f"95 % of steps are expected to take {low:.2f} to {high:.2f} times their prediction",
        ]
    lines += listed(file.doubts)
    if file.slowness:
        ranks = ", ".join(f"rank {rank} {ratio:.2f}" for rank, ratio in enumerate(file.slowness))
        lines.append(f"computation time relative to the median rank: {ranks}")
    if file.source:
        lines.append(file.source)
    return lines


def _span(factors: Iterable[float]) -> str:
    """Return `1.10`, or `1.00 to 1.20` for several factors."""
    least, *_, most = [f"{factor:.2f}" for factor in sorted(factors)] * 2
    return least if least == most else f"{least} to {most}"


def _link_row(file: ClusterFile, links: Sequence[LinkModel]) -> tuple[str, ...]:
    link, groups = links[0], " ".join(link.group for link in links)
    bandwidth = link_bandwidth(file, link)
    shown = "-" if bandwidth is None else f"{8 * bandwidth / MEGA:,.0f}" if _is_line(link.fit) else UNKNOWN
    start = _micro(link.alpha_s)
    return link_name(link), groups, link.lane, str(link.ranks), start, shown, *_fit_cells(link.fit)


def _task_row(task: TaskModel) -> tuple[str, ...]:
    name = f"{task.op}.{task.phase}"
    factor = f"{task.scale:.2f}" if _is_line(task.fit) else UNKNOWN
    return name, _micro(task.alpha_s), factor, f"{task.contended:.2f}", *_fit_cells(task.fit)


def _kernel_row(kernel: KernelModel) -> tuple[str, ...]:
    unit = "GFLOP/s" if kernel.unit == "flop" else "GB/s"
    rate = f"{1 / kernel.beta_s_per_unit / GIGA:.1f} {unit}" if _is_line(kernel.fit) else UNKNOWN
    return kernel.name, _micro(kernel.alpha_s), rate, *_fit_cells(kernel.fit)


def _is_line(fit: Fit | None) -> bool:
    """Return whether the slope is known: measured and well explained, or given by the file's author."""
    return fit is None or fit.r2 >= LEAST_R2


def _fit_cells(fit: Fit | None) -> tuple[str, str, str]:
    if fit is None:
        return "-", "-", "-"
    points = str(len(fit.points))
    return (
        (f"{fit.r2:.3f}", _percent(fit.residual), points) if is_checked(fit) else (UNKNOWN, UNKNOWN, points)
    )


def is_checked(fit: Fit) -> bool:
    """Return whether there were points enough to tell how well the line fits; a file need not keep them."""
    return not fit.points or len(fit.points) >= LEAST_POINTS


def _micro(seconds: float) -> str:
    return f"{seconds / MICRO:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _tables(rows: Sequence[Sequence[str]], width: int | None, *, keep: int) -> list[str]:
    parts = [rows] if width is None else stacked(rows, width, keep=keep)
    return [line for part in parts for line in ("", *markdown_table(part))][1:]


if TYPE_CHECKING:  # planning does without matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS: Final = 6
MOST_TICKS: Final = 4
LEAST_APART: Final = 0.27
"""The least distance of two labels, as a share of the axis: `400 us` takes nearly as much."""
TITLE: Final = 26
"""The most characters of what a task does, above a panel."""
PANEL_IN: Final = (2.35, 1.66)
HEAD_IN, ROW_TITLE_IN, FOOT_IN = 0.85, 0.3, 0.1
GRID: Final = "#E4E7EB"
COLOURS: Final = {"links": "#0B6E99", "tasks": "#B45F06", "kernels": "#4C7A34"}
UNITS: Final = {"flop": "operations", "byte": "bytes"}
FAR = 0.25
"""A point that is farther from its line than this share is drawn hollow."""


@dataclass(frozen=True)
class Panel:
    """One fitted line, alpha_s + beta_s * x.

    Attributes:
        unit: The unit of x.
    """

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
    folder.mkdir(parents=True, exist_ok=True)
    parts = [part for part in _parts(file) if part.panels]
    rows = sum(_rows(part) for part in parts)
    size = COLUMNS * PANEL_IN[0], HEAD_IN + FOOT_IN + ROW_TITLE_IN * len(parts) + PANEL_IN[1] * rows
    title = f"{file.name}: {counted(file.ranks, 'rank')} on {counted(file.nodes, 'node')}"
    text = "points: medians; line: fit; hollow: more than 25 % from the line; both axes logarithmic"
    with sheet(folder / "profile.png", size, title, text) as figure:
        top_in = HEAD_IN
        for part in parts:
            _draw_part(figure, part, top_in)
            top_in += ROW_TITLE_IN + PANEL_IN[1] * _rows(part)
    return folder / "profile.png"


def _parts(file: ClusterFile) -> list[Part]:
    links = [_link_panel(links, links[0].fit) for links in alike(file.links) if links[0].fit is not None]
    tasks = [
        Panel(_task_title(task), "s", task.alpha_s, task.scale, task.fit)
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


def _task_title(task: TaskModel) -> str:
    """Return a task's name, and below it what its op does: the last words that fit, which tell ops apart."""
    what = OPS[task.op].title.split(",")[0] if task.op in OPS else ""
    backwards = shorten(" ".join(what.split()[::-1]), TITLE, placeholder=" ...")
    return f"{task.op}.{task.phase}\n{' '.join(backwards.split()[::-1])}".rstrip()


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
    from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

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
        axis.set_major_formatter(EngFormatter(unit))
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
            break
    kept = ticks[:1]
    for tick in ticks[1 :: math.ceil(len(ticks) / MOST_TICKS)]:
        kept += [tick] if tick >= kept[-1] * (high / low) ** LEAST_APART else []
    return kept
