"""Figures of a run: losses, speed, network, loads over all steps; the last step as bars."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.graph import Lane, Name
from penstock.ops.base import Family, family_of
from penstock.report.loads import BRIGHTEST, COLD, HOT, LoadCourse, over_mean, spread
from penstock.report.page.findings import Binding, ByLayer, Course, Values, title_of
from penstock.report.page.render import (
    BOX,
    COLOURS,
    EVEN,
    HIDDEN,
    LINE,
    PAUSES,
    QUIET,
    SECOND,
    SERIES,
    TEXT,
    Figure,
    axis,
    ink,
    upright,
)
from penstock.trace.step_file import Spans, StepFile
from penstock.words import lane_words, milliseconds, percent

MOST_POINTS = 2000
"""The most points of a curve: a screen has no more columns."""
MOST_CELLS = 120_000
"""The most cells of all heat maps by step."""
"""The most layers with a curve of their own, from the first to the last."""
FIGURE_HEIGHT = 300
BARE: Figure = {"showgrid": False, "zeroline": False}
"""Of axes without a grid."""
SHORT = 10
"""Runs of fewer steps have a label at each step."""
TURNS = {"dashed": "the run was resumed", "dotted": "another plan, or another order of its tasks, began"}
"""What lines across figures over steps mean, by their class in page.css."""


def loss_figure(course: Course) -> Figure:
    """Return the figure of the training loss, and of held-out text with its uncertainty."""
    at = _chosen(course)
    held = [place for place, loss in enumerate(course.eval_loss) if loss is not None]
    data: list[Figure] = [_line(course, course.loss, at, "training", LINE)]
    if held:
        noise = [course.eval_noise[place] or 0 for place in held]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "held-out text",
                "x": [course.step[place] for place in held],
                "y": [course.eval_loss[place] for place in held],
                "error_y": {"type": "data", "array": noise, "color": SECOND, "thickness": 1.2, "width": 4},
                "marker": {"color": SECOND, "size": 8},
                "hovertemplate": "step %{x}: %{y:.4f}<extra>held-out text</extra>",
            }
        )
    return {"data": data, "layout": _over_steps(course, "nats per token", rangemode="normal")}


def speed_figure(course: Course) -> Figure:
    """Return the figure of tokens per second."""
    data = [_line(course, course.tokens_per_s, _chosen(course), "tokens/s", LINE, digits=",.0f")]
    return {"data": data, "layout": _over_steps(course, "tokens/s", showlegend=False)}


def network_figure(course: Course) -> Figure | None:
    """Return the figure of communication per step, hidden and exposed; None where there was none."""
    if not any(course.communication_s):
        return None
    at = _chosen(course)
    exposed = tuple(course.exposed_communication_s)
    hidden = tuple(
        None if total is None or bare is None else max(0.0, total - bare)
        for total, bare in zip(course.communication_s, exposed, strict=True)
    )
    parts = [("exposed", exposed, SECOND), ("hidden under computation", hidden, HIDDEN)]
    data = [
        _line(course, _milliseconds(values), at, name, colour, digits=".1f")
        | {"stackgroup": "one", "fillcolor": colour, "line": {"width": 0, "color": colour}}
        for name, values, colour in parts
    ]
    return {"data": data, "layout": _over_steps(course, "ms of communication per step")}


def layers_figure(course: Course, by_layer: ByLayer, layers: Sequence[int], title: str) -> Figure | None:
    """Return a figure of one quantity by MoE layer; None where no step has it.

    Args:
        by_layer: The quantity of every step, by MoE layer.
        layers: The numbers of the MoE layers.
        title: The title of the figure.
    """
    first = next((values for values in by_layer if values), None)
    if first is None:
        return None
    at, names = _chosen(course), layers if len(layers) == len(first) else range(len(first))
    data = []
    for place, colour in zip(spread(len(first)), SERIES, strict=False):
        curve = tuple(values[place] if values else None for values in by_layer)
        data.append(_line(course, curve, at, f"L{names[place]}", colour))
    return {"data": data, "layout": _over_steps(course, title)}


def layer_loads_figure(course: LoadCourse) -> Figure:
    """Return the heat map of layers x experts, over the whole run."""
    heat = over_mean(course.loads_SYE.sum(axis=0))
    names = [f"L{layer}" for layer in course.layers]
    data = _heat(heat, list(range(heat.shape[1])), list(range(len(names))), "expert %{x} of %{customdata[1]}")
    data["customdata"] = [
        [[round(float(value), 3), name] for value in row] for row, name in zip(heat, names, strict=True)
    ]
    return {
        "data": [data],
        "layout": {
            "height": 108 + max(110, min(420, 26 * len(names))),
            "xaxis": axis("expert", **BARE, dtick=_tick(heat.shape[1])),
            "yaxis": BARE
            | {
                "autorange": "reversed",
                "tickvals": list(range(len(names)))[:: max(1, len(names) // 16)],
                "ticktext": names[:: max(1, len(names) // 16)],
            },
        },
    }


def loads_over_time_figure(course: LoadCourse, place: int) -> Figure:
    """Return the heat map of experts x steps of one MoE layer.

    Args:
        place: The layer's index in the course.
    """
    # So many steps are drawn that all heat maps together have few enough cells.
    _, layers, experts = course.loads_SYE.shape
    most = max(2, MOST_CELLS // max(1, experts * len(spread(layers, max(1, MOST_CELLS // (64 * experts))))))
    kept = spread(len(course.steps), most)
    heat = over_mean(course.loads_SYE[kept, place]).T
    steps = [course.steps[index] for index in kept]
    data = _heat(heat, steps, list(range(len(heat))), "expert %{y} in step %{x}")
    data["customdata"] = [[[round(float(value), 3)] for value in row] for row in heat]
    return {
        "data": [data],
        "layout": {
            "height": 108 + max(140, min(420, 14 * len(heat))),
            "xaxis": axis("step", **BARE, **_step_ticks(steps)),
            "yaxis": axis("expert", **BARE, dtick=_tick(len(heat))),
        },
    }


def shown_layers(course: LoadCourse) -> list[int]:
    """Return the layers with a heat map over time, by index: all, or as many as a file can hold."""
    experts = course.loads_SYE.shape[2]
    most = max(1, MOST_CELLS // max(1, experts * min(len(course.steps), 64)))
    return spread(len(course.layers), most)


def _heat(heat: npt.NDArray[np.float64], across: list[int], down: list[int], where: str) -> Figure:
    """Return a heat map: blue below the mean, nearly white at it, orange above, to four times the mean."""
    clipped = np.log2(np.clip(heat, 1 / BRIGHTEST, BRIGHTEST))
    end = math.log2(BRIGHTEST)
    return {
        "type": "heatmap",
        "x": across,
        "y": down,
        "z": np.round(clipped, 3).tolist(),
        "zmin": -end,
        "zmax": end,
        "colorscale": [[0, f"rgb{COLD}"], [0.5, EVEN], [1, f"rgb{HOT}"]],
        "colorbar": {"tickvals": [-2, -1, 0, 1, 2], "ticktext": ["1/4", "1/2", "mean", "2x", "4x"]},
        "xgap": 1 if len(across) <= 64 else 0,
        "ygap": 1 if len(down) <= 32 else 0,
        "hovertemplate": f"{where}: %{{customdata[0]:.2f}} times the mean<extra></extra>",
    }


def _line(
    course: Course, values: Values, at: Sequence[int], name: str, colour: str, digits: str = ".4f"
) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines" if len(at) > 1 else "markers",
        "name": name,
        "x": [course.step[place] for place in at],
        "y": [_finite(values[place]) for place in at],
        "line": {"color": colour, "width": 1.8},
        "marker": {"color": colour},
        "hovertemplate": f"step %{{x}}: %{{y:{digits}}}<extra>{name}</extra>",
    }


def _over_steps(course: Course, title: str, *, rangemode: str = "tozero", **more: object) -> Figure:
    """Return the layout of a figure over steps, with lines where another plan or another start began."""
    return {
        "height": FIGURE_HEIGHT,
        "xaxis": axis("step", **BARE, **_step_ticks(course.step)),
        "yaxis": axis(title, rangemode=rangemode, tickfont={"color": TEXT}),
        "hovermode": "x",
        "shapes": [
            upright(at, "dash" if kind == "dashed" else "dot")
            for kind, steps in turns_of(course).items()
            for at in steps
        ],
        **more,
    }


def turns_of(course: Course) -> dict[str, list[int]]:
    """Return the steps with which another plan or another start began, by what `TURNS` calls their lines."""
    changed = tuple(before != now for before, now in pairwise(course.plan))
    begins = {"dashed": course.resumed, "dotted": (False, *changed)}
    found = {
        kind: [number for number, turns in zip(course.step, each, strict=False) if turns]
        for kind, each in begins.items()
    }
    return {kind: steps for kind, steps in found.items() if steps}


def _chosen(course: Course) -> list[int]:
    return spread(len(course.step), MOST_POINTS)


def _step_ticks(steps: Sequence[int]) -> Figure:
    """Return ticks of an axis without halves of a step."""
    return {"dtick": 1} if steps[-1] - steps[0] < SHORT else {"tickformat": "d"}


def _tick(number: int) -> int:
    """Return the distance between two labels of an axis."""
    return 1 << max(0, math.ceil(math.log2(max(1, number / 16))))


def _milliseconds(values: Values) -> Values:
    return tuple(None if value is None else 1e3 * value for value in values)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


ROW, GAP = 1.0, 1.15
"""Heights of a lane, and of the gap between the two runs, in units of the axis."""
PIXELS = 34
"""Pixels of a unit."""
THICK, STRIP, BELOW = 0.78, 0.1, 0.47
"""Heights of a bar and of the strip of the critical path, and how far that lies below a bar's middle."""
NARROW = 1 / 300
"""Bars of a smaller share of the axis have no edge, which would leave nothing of their colour."""


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
    """Return what one rank did, below what was predicted of it, if anything was.

    Args:
        place: The index of the rank among those shown.
    """
    lanes = [lane for lane in Lane if str(lane) in step.lanes]
    rank = step.shown[place]
    runs = {"predicted": step.predicted, "measured": step.measured}
    rows: dict[tuple[str, Lane], float] = {}
    headings, ends, bars, bottom = [], [], list[_Bar](), -GAP
    for run, spans in runs.items():
        if spans is None:
            continue
        top = bottom + GAP
        rows |= {(run, lane): top + number * ROW for number, lane in enumerate(lanes)}
        path = {link.task for link in step.path if link.rank == rank and run == "measured"}
        own = _bars(step, spans, place, run, rows, path)
        lasts = milliseconds(_end_s(own)) + (f" (step {step.step})" if run == "measured" else "")
        headings.append(_heading(f"<b>{run}</b>  {lasts}", top - ROW / 2 - 0.36))
        ends += [upright(1e3 * _end_s(own))] if run == "predicted" else []
        bars, bottom = bars + own, top + len(lanes) * ROW
    end_s = max(step.predicted_s or 0.0, step.measured_s, _end_s(bars))
    families = [_trace(family, bars, NARROW * end_s) for family in Family]
    return {
        "data": [*filter(None, families), *_strip(bars)],
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
                "ticktext": [lane_words(lane, nodes=step.nodes > 1) for _, lane in rows],
                "ticklen": 6,
                "tickcolor": BOX,
                "ticks": "outside",
                "tickfont": {"color": TEXT, "size": 12},
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
            "annotations": headings,
            "shapes": ends,
        },
    }


def families_of(step: StepFile) -> list[Family]:
    """Return the families in the step, in the order of legends."""
    families = {family_of(Name.parse(task).op) for task in step.tasks}
    return [family for family in Family if family in families]


def path_figure(binding: Binding) -> Figure:
    """Return the critical path as one bar, divided into its parts."""
    taken_s = {
        str(family): binding.computed_s.get(family, 0.0) + binding.moved_s.get(family, 0.0)
        for family in Family
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
        for name, seconds in taken_s.items()
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
    critical: Collection[str],
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


def _trace(family: Family, bars: Sequence[_Bar], narrow_s: float) -> Figure | None:
    """Return the bars of a family; None if there are none. Those below `narrow_s` seconds have no edge."""
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
                "color": BOX,
                "width": [0.6 if bar.end_s - bar.start_s >= narrow_s else 0 for bar in own],
            },
        },
        "text": [bar.short for bar in own],
        "textfont": {"size": 11, "color": ink(family)},
        "hovertext": [bar.hover for bar in own],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _strip(bars: Sequence[_Bar]) -> Iterator[Figure]:
    """Yield what marks the critical path: a strip below its bars, so that they keep their colour."""
    if own := [bar for bar in bars if bar.critical]:
        yield {
            "type": "bar",
            "orientation": "h",
            "name": "critical path",
            "base": [round(1e3 * bar.start_s, 4) for bar in own],
            "x": [round(1e3 * (bar.end_s - bar.start_s), 4) for bar in own],
            "y": [bar.row + BELOW for bar in own],
            "width": STRIP,
            "marker": {"color": TEXT, "line": {"width": 0}},
            "hoverinfo": "skip",
        }


def _end_s(bars: Sequence[_Bar]) -> float:
    return max((bar.end_s for bar in bars), default=0.0)


def _heading(text: str, row: float) -> Figure:
    """Return a heading above the lanes of a run."""
    place = {"x": 0, "xref": "paper", "xanchor": "left", "y": row, "yanchor": "middle"}
    return place | {"text": text, "showarrow": False, "font": {"size": 13, "color": QUIET}}
