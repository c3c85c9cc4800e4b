"""Pictures of the loads of experts: over a run as a PNG file, of one step as an array of colours.

Shapes: S steps, Y MoE layers, E experts. Colours show a load over the mean of its layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from penstock.config import UNSET, ConfigError, open_regular, shorten
from penstock.routing.sizes import Floats
from penstock.writing import replacing

if TYPE_CHECKING:  # planning does without matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

PICTURE: Final = "loads.png"
NUMBERS: Final = "loads.npz"
REMOVE: Final = "Move the file away."
MOST_LAYERS, COLUMNS = 8, 4
PANEL_IN, HEAD_IN, GAP_IN = (2.6, 1.7), 1.0, 0.75
DPI: Final = 140
TEXT, QUIET = "#1B1F23", "#6B737C"
BRIGHTEST: Final = 4.0
"""Loads above this many times the mean get the last colour."""
CELL: Final = 8
"""Pixels per side of a cell in an array of colours."""

COLD, EVEN, HOT = (0x0B, 0x6E, 0x99), (0xF7, 0xF7, 0xF5), (0xB4, 0x5F, 0x06)
"""Colours of less than the mean, the mean, and more: blue, nearly white, orange."""

UNREADABLE: Final = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    TypeError,
    RuntimeError,
    MemoryError,
    BadZipFile,
    zlib.error,
)
"""What numpy and zipfile raise for files that hold no arrays, or such as they do not read."""


@dataclass(frozen=True)
class LoadCourse:
    """Loads over a run.

    Attributes:
        layers: Floats of the MoE layers, [Y].
        steps: Floats of the steps, [S].
        loads_SYE: How often every expert was chosen.
    """

    layers: tuple[int, ...]
    steps: tuple[int, ...]
    loads_SYE: npt.NDArray[np.int64]

    def save(self, folder: Path) -> None:
        """Write `loads.npz`; a half-written file never replaces a whole one."""
        with replacing(folder / NUMBERS) as file:
            np.savez_compressed(file, layers=self.layers, steps=self.steps, loads=self.loads_SYE)

    @staticmethod
    def read(path: Path) -> LoadCourse:
        """Read `loads.npz`.

        Raises:
            ConfigError: If the file does not hold what `save` writes; names the file.
        """
        try:
            with open_regular(path, str(path), REMOVE) as file, np.load(file, allow_pickle=False) as held:
                arrays = [np.asarray(held[name]) for name in ("layers", "steps", "loads")]
        except UNREADABLE as error:
            if isinstance(error, ConfigError):
                raise
            why = f"does not hold the loads of a run ({shorten(str(error) or type(error).__name__)})"
            raise ConfigError(str(path), UNSET, why, REMOVE) from error
        if all(np.issubdtype(each.dtype, np.integer) for each in arrays):
            layers, steps, loads_SYE = (each.astype(np.int64) for each in arrays)
            fits = layers.ndim == steps.ndim == 1 and loads_SYE.shape[:-1] == (*steps.shape, *layers.shape)
            if (
                fits
                and all((np.diff(each, prepend=-1) > 0).all() for each in (layers, steps))
                and loads_SYE.size
                and loads_SYE.min() >= 0
            ):
                return LoadCourse(tuple(layers.tolist()), tuple(steps.tolist()), loads_SYE)
        raise ConfigError(str(path), UNSET, "does not hold the loads of a run", REMOVE)


def spread(number: int, most: int = MOST_LAYERS) -> list[int]:
    """Return all places, or `most` of them from the first to the last."""
    if number <= most:
        return list(range(number))
    return sorted({round(place * (number - 1) / max(1, most - 1)) for place in range(most)})


def draw_loads(course: LoadCourse, folder: Path) -> Path:
    """Write `loads.png` into `folder`: layers x experts over the whole run, then steps x experts by layer."""
    layers = len(course.layers)
    shown = spread(layers)
    rows = 1 + -(-len(shown) // COLUMNS)
    size = COLUMNS * (PANEL_IN[0] + 0.5) + 0.3, HEAD_IN + rows * (PANEL_IN[1] + GAP_IN)
    some = "" if len(shown) == layers else f"; {len(shown)} of {layers} MoE layers by step"
    text = (
        f"steps {course.steps[0]} to {course.steps[-1]}: how often an expert was chosen, over the mean of "
        f"its layer{some}"
    )
    with sheet(folder / PICTURE, size, "Loads of experts", text) as figure:
        whole_YE = over_mean(course.loads_SYE.sum(axis=0))
        first = _panel(figure, 0, 0, "all steps", "expert", "MoE layer")
        image = _cells(first, whole_YE, (-0.5, whole_YE.shape[1] - 0.5, len(whole_YE) - 0.5, -0.5))
        first.set_yticks(range(len(course.layers)), [f"L{layer}" for layer in course.layers])
        bar = figure.colorbar(image, ax=first, fraction=0.05, pad=0.03)
        bar.set_ticks([0.25, 0.5, 1, 2, 4], labels=["1/4 of the mean", "1/2", "1", "2", "4 times the mean"])
        bar.minorticks_off()
        bar.ax.tick_params(length=0, labelcolor=QUIET, labelsize=8)
        bar.outline.set_visible(False)
        for place, layer in enumerate(shown):
            row, column = divmod(place, COLUMNS)
            axes = _panel(figure, 1 + row, column, f"L{course.layers[layer]}", "step", "expert")
            loads_ES = over_mean(course.loads_SYE[:, layer]).T
            first_step, last_step = course.steps[0] - 0.5, course.steps[-1] + 0.5
            _cells(axes, loads_ES, (first_step, last_step, len(loads_ES) - 0.5, -0.5))
    return folder / PICTURE


def colours(loads_YE: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return a heat map of one step, [CELL * Y, CELL * E, 3]: blue below the mean, orange above."""
    heat = np.log2(np.clip(over_mean(loads_YE), 1 / BRIGHTEST, BRIGHTEST)) / np.log2(BRIGHTEST)
    towards = np.where(heat[..., None] > 0, np.array(HOT), np.array(COLD))
    mixed = np.array(EVEN) + np.abs(heat)[..., None] * (towards - np.array(EVEN))
    cells: npt.NDArray[np.uint8] = np.round(mixed).astype(np.uint8).repeat(CELL, 0).repeat(CELL, 1)
    return cells


def over_mean(loads: npt.NDArray[np.int64]) -> Floats:
    """Return loads over the mean of all experts, along the last axis; 1 where there are no loads."""
    mean = loads.mean(axis=-1, keepdims=True)
    ratios: Floats = np.where(mean > 0, loads / np.maximum(mean, 1e-9), 1.0)
    return ratios


@contextmanager
def sheet(path: Path, size_in: tuple[float, float], title: str, text: str) -> Iterator[Figure]:
    """Yield a figure with a headline and a line of text below it; write it as a PNG file at the end."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    left, height_in = 0.2 / size_in[0], size_in[1]
    with mpl.rc_context({"font.family": "DejaVu Sans", "font.size": 9.0}):
        figure = Figure(figsize=size_in, facecolor="white")
        FigureCanvasAgg(figure)
        figure.text(left, 1 - 0.18 / height_in, title, fontsize=14, weight="bold", color=TEXT, va="top")
        figure.text(left, 1 - 0.5 / height_in, text, fontsize=9.5, color=QUIET, va="top")
        yield figure
        with replacing(path) as picture:
            figure.savefig(picture, format="png", dpi=DPI)


def _panel(figure: Figure, row: int, column: int, title: str, across: str, down: str) -> Axes:
    width_in, height_in = figure.get_size_inches()
    left = (0.6 + column * (PANEL_IN[0] + 0.5)) / width_in
    bottom = 1 - (HEAD_IN + row * (PANEL_IN[1] + GAP_IN) + PANEL_IN[1]) / height_in
    axes = figure.add_axes((left, bottom, (PANEL_IN[0] - 0.2) / width_in, PANEL_IN[1] / height_in))
    axes.set_title(title, fontsize=9, color=TEXT, loc="left", pad=4)
    axes.set_xlabel(across, color=QUIET, fontsize=8)
    axes.set_ylabel(down, color=QUIET, fontsize=8)
    axes.tick_params(length=0, labelcolor=QUIET, labelsize=8)
    axes.spines[:].set_visible(False)
    return axes


def _cells(axes: Axes, heat: Floats, extent: tuple[float, float, float, float]) -> AxesImage:
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    stops = [tuple(part / 255 for part in colour) for colour in (COLD, EVEN, HOT)]
    scale = LinearSegmentedColormap.from_list("loads", stops)
    norm = LogNorm(1 / BRIGHTEST, BRIGHTEST, clip=True)
    clipped = np.clip(heat, 1 / BRIGHTEST, BRIGHTEST)
    return axes.imshow(clipped, cmap=scale, norm=norm, extent=extent, aspect="auto", interpolation="nearest")
