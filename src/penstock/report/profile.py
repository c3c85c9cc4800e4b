"""What `penstock profile` prints: the fitted lines, and how well they fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.cost import ClusterFile
from penstock.cost.cluster_file import Fit, KernelModel, LinkModel, TaskModel
from penstock.cost.measured import listed
from penstock.cost.span import even_leg
from penstock.mesh import num_nodes
from penstock.words import folded, stacked

MEGA, GIGA, MICRO = 1e6, 1e9, 1e-6
FIT_HEAD = ("R2", "residual", "points")
LINK_HEAD = ("collective", "group", "lane", "ranks", "start us", "MB/s", *FIT_HEAD)
TASK_HEAD = ("task", "fixed us", "factor", "contention", *FIT_HEAD)
KERNEL_HEAD = ("kernel", "start us", "rate", *FIT_HEAD)
LEAST_R2 = 0.5
"""A line that explains less than half of the scatter says nothing about how time grows with size."""

LEAST_POINTS = 3
"""A line goes through two points exactly, however wrong they are."""

UNKNOWN = "unknown"
EXPLANATION = (
    "start-up + bytes / bandwidth; bytes: through the link of the busiest rank, in one direction",
    "fixed + factor x its time at the rates of matmul and copy; contention: slowdown during transfers",
)


def profile_text(file: ClusterFile, width: int | None = None) -> str:
    """Return tables of links, tasks and kernels in Markdown.

    width: of the terminal; a wider table is printed in parts, one below the other. None = a document's.
    """
    lines = [_headline(file)]
    if file.links:
        rows = [_link_row(file, links) for links in alike(file.links)]
        lines += ["", *_tables([LINK_HEAD, *rows], width, left=3), EXPLANATION[0]]
    if file.tasks:
        lines += ["", *_tables([TASK_HEAD, *map(_task_row, file.tasks)], width, left=1), EXPLANATION[1]]
    if file.kernels:
        lines += ["", *_tables([KERNEL_HEAD, *map(_kernel_row, file.kernels)], width, left=1)]
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
    found: dict[LinkModel, list[LinkModel]] = {}
    for link in links:
        found.setdefault(replace(link, group=""), []).append(link)
    return list(found.values())


def _share(file: ClusterFile, link: LinkModel) -> float:
    """Return the bytes through the busiest rank's link per byte of the model's argument."""
    ranks = link.ranks
    others = ranks - 1
    if link.op:
        # A leg's group is an expert group, which covers whole nodes.
        size = min(file.ranks_per_node, ranks)
        return even_leg(link.collective, link.op, num_nodes(ranks, size), size).share
    if link.collective == "uneven_all_to_all":
        return 2 * others / (ranks + 1)  # what the popular rank gets
    if link.collective == "broadcast":
        return others
    if link.collective == "point_to_point":
        return 1
    return (2 if link.collective == "all_reduce" else 1) * others / ranks


def _headline(file: ClusterFile) -> str:
    ranks = f"{file.ranks} rank{'s' if file.ranks > 1 else ''}"
    nodes = f"{file.nodes} node{'s' if file.nodes > 1 else ''}"
    text = f"{file.name}: {ranks} on {nodes}"
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
    shown = "-" if bandwidth is None else f"{bandwidth / MEGA:.1f}" if _is_line(link.fit) else UNKNOWN
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


def _tables(rows: Sequence[Sequence[str]], width: int | None, *, left: int) -> list[str]:
    parts = [rows] if width is None else stacked(rows, width, keep=left)
    return [line for part in parts for line in ("", *_table(part, left=left))][1:]


def _table(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return a table in Markdown; the first row is the head. left: the number of leading columns of words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if i < left else ">" for i in range(len(widths))]
    lines = [
        " | ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
        for row in rows
    ]
    rule = "|".join("-" * (w + 1) + ("-" if s == "<" else ":") for s, w in zip(sides, widths, strict=True))
    head, *body = (f"| {line} |" for line in lines)
    return [head, f"|{rule}|", *body]
