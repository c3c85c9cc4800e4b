"""`python -m benchmarks.overlap > docs/overlap.svg`: one step without overlap and with it, on one axis.

Both are simulated, as `penstock schedule sequential` and `penstock schedule penstock` print them. The picture
follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.graph import Lane
from penstock.report.schedule import ScheduleDescription, describe_schedule
from penstock.trace import TaskRecord

LEFT, WIDTH, RIGHT = 118, 806, 36
BAR, GAP, HEAD = 34, 8, 34
"""Heights in pixels: of a lane, between two lanes, of the title above them."""

PANEL: Final = HEAD + 2 * BAR + GAP + 26
TOP, BOTTOM = 20, 74

KINDS: Final = {
    "attention": ("#4c78c8", "#6f9ae8"),
    "experts": ("#2b4a8b", "#3d63b5"),
    "other computation": ("#a9bcdf", "#8a9cc4"),
    "dispatch, combine": ("#e08a2e", "#f0a24b"),
    "all-reduce": ("#3f9c7a", "#58b893"),
}
"""Fill on a light and on a dark page."""

OF_OP: Final = {"AT": "attention", "X": "experts", "D": "dispatch, combine", "C": "dispatch, combine"}
INK, FAINT, TRACK, PAGE = (
    ("#1f2430", "#e6e8ee"),
    ("#5c6474", "#a3abbd"),
    ("#eef0f4", "#262b36"),
    ("#ffffff", "#14171e"),
)


def kind_of(record: TaskRecord) -> str:
    """Return the row of the legend to which a task belongs."""
    usual = "all-reduce" if record.lane is not Lane.COMPUTE else "other computation"
    return OF_OP.get(record.task.op, usual)


def style() -> Iterator[str]:
    """Yield rules for both settings of the reader; what is drawn has the light colours as attributes."""
    names = {f".k{number}": fills for number, fills in enumerate(KINDS.values())}
    names |= {".ink": INK, ".faint": FAINT, ".track": TRACK, ".page": PAGE}
    yield "text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; }"
    dark = " ".join(f"{name} {{ fill: {fills[1]}; }}" for name, fills in names.items())
    yield f"@media (prefers-color-scheme: dark) {{ {dark} .rule {{ stroke: {FAINT[1]}; }} }}"


def text(x: float, y: float, words: str, size: float = 13, ink: str = "ink", more: str = "") -> str:
    """Return a line of text that begins at x."""
    fill = INK[0] if ink == "ink" else FAINT[0]
    return (
        f'<text class="{ink}" x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{more}>{words}</text>'
    )


def bar(record: TaskRecord, top: float, scale: float) -> str:
    """Return a task."""
    kind = list(KINDS).index(kind_of(record))
    fill, wide = list(KINDS.values())[kind][0], max(scale * record.duration_s - 1.2, 0.8)
    return box(LEFT + scale * record.start_s, top, wide, f"k{kind}", fill)


def box(x: float, y: float, width: float, name: str, fill: str, height: float = BAR) -> str:
    """Return a rectangle with round corners."""
    size = f'width="{width:.1f}" height="{height}" rx="2"'
    return f'<rect class="{name}" x="{x:.1f}" y="{y}" {size} fill="{fill}"/>'


def panel(description: ScheduleDescription, title: str, top: float, scale: float) -> Iterator[str]:
    """Yield both lanes of a step under its title."""
    hidden_s = description.communication_s - description.exposed_communication_s
    said = (
        f"{description.iteration_s:.2f} s; {100 * hidden_s / description.communication_s:.0f} % of the "
        "communication runs under computation"
    )
    yield text(
        LEFT,
        top + 18,
        f'{title}<tspan font-weight="400" dx="10">{said}</tspan>',
        14,
        "ink",
        ' font-weight="600"',
    )
    for number, (lane, name) in enumerate(((Lane.COMPUTE, "computation"), (Lane.INTER, "network"))):
        y = top + HEAD + number * (BAR + GAP)
        yield text(LEFT - 12, y + BAR / 2 + 4, name, 13, "faint", ' text-anchor="end"')
        yield box(LEFT, y, scale * description.iteration_s, "track", TRACK[0])
        for record in description.records:
            if record.lane is lane and record.rank == 0:
                yield bar(record, y, scale)


def legend(y: float) -> Iterator[str]:
    """Yield what the colours mean."""
    x = float(LEFT)
    for number, (name, fills) in enumerate(KINDS.items()):
        yield box(x, y - 10, 12, f"k{number}", fills[0], height=12)
        yield text(x + 18, y, name, 12, "faint")
        x += 42 + 6.6 * len(name)


def picture() -> str:
    """Return the whole picture."""
    before, after = (describe_schedule(name, layers=2) for name in ("sequential", "penstock"))
    scale = WIDTH / before.iteration_s
    height, width = TOP + 2 * PANEL + BOTTOM, LEFT + WIDTH + RIGHT
    axis = TOP + 2 * PANEL
    end, last = (LEFT + scale * each.iteration_s for each in (after, before))
    middle = TOP + PANEL + HEAD + BAR + GAP / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="One training step without overlap and with it">',
        f"<style>{' '.join(style())}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="10" fill="{PAGE[0]}"/>',
        *panel(before, "sequential", TOP, scale),
        *panel(after, "penstock", TOP + PANEL, scale),
        f'<line class="rule" x1="{end + 6:.1f}" x2="{last:.1f}" y1="{middle}" y2="{middle}" '
        f'stroke="{FAINT[0]}" stroke-dasharray="4 4"/>',
        text(
            (end + last) / 2,
            middle - 10,
            f"{after.speedup:.2f} times as fast",
            13,
            "ink",
            ' text-anchor="middle"',
        ),
    ]
    for tenths in range(0, round(10 * before.iteration_s) + 1, 5):
        x = LEFT + scale * tenths / 10
        lines.append(text(x, axis + 6, f"{tenths / 10:.1f} s", 11, "faint", ' text-anchor="middle"'))
    lines += [*legend(axis + 42), "</svg>"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(picture(), end="")
