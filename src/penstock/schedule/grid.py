"""The picture of a schedule: lanes as rows, time to the right, one column per slot.

A cell names op, microbatch and chunk (`D0.1`); the row `layer` says which block the compute lane works on.
All-reduces carry their own layer (`AR3.0`). Columns are slots, not seconds: the picture shows order.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.graph import Graph, Lane, Task
from penstock.timing import Ordered, simulate

LABEL_WIDTH = 8
IDLE = "·"


def draw(name: str, schedule: Ordered, graph: Graph, *, width: int, mark: Task | None) -> str:
    """Return the picture as text, wrapped at `width` characters, forward before backward."""
    lanes = [lane for lane, order in schedule.lanes.items() if order]
    times = simulate(schedule, graph, lambda _: 1.0).times
    starts = {task: int(span.start[0]) for task, span in times.items()}
    slots = {(task.lane, start): task for task, start in starts.items()}
    parts = [f"{name}: one column = one slot, {IDLE} = idle"]
    for forward, title in ((True, "forward"), (False, "backward")):
        used = [start for task, start in starts.items() if task.forward is forward]
        if used:
            columns = range(min(used), max(used) + 1)
            parts += [f"{title}", *_rows(columns, lanes, slots, forward, width, mark)]
    return "\n".join(parts) + "\n"


def _rows(
    columns: range,
    lanes: list[Lane],
    slots: Mapping[tuple[Lane, int], Task],
    forward: bool,
    width: int,
    mark: Task | None,
) -> list[str]:
    cells: dict[Lane, list[str]] = {lane: [] for lane in lanes}
    layers, current = list[str](), -1
    for column in columns:
        here = {lane: slots.get((lane, column)) for lane in (*lanes, Lane.COMPUTE)}
        here = {lane: task for lane, task in here.items() if task is not None and task.forward is forward}
        for lane in lanes:
            task = here.get(lane)
            words = IDLE if task is None else f">{task.cell}<" if task == mark else task.cell
            cells[lane].append(words)
        computed = here.get(Lane.COMPUTE)
        changed = computed is not None and computed.layer != current
        current = computed.layer if computed is not None else current
        layers.append(f"L{current}" if changed else "")
    widths = [max(len(row[i]) for row in [layers, *cells.values()]) for i in range(len(columns))]
    lines: list[str] = []
    room = width - LABEL_WIDTH - 1
    pages, begin, used = [], 0, 0
    for i, cell in enumerate(widths):
        if used + cell > room and i > begin:
            pages.append((begin, i))
            begin, used = i, 0
        used += cell + 1
    for first, last in [*pages, (begin, len(widths))]:
        for label, row in [("layer", layers), *((str(lane), row) for lane, row in cells.items())]:
            text = " ".join(f"{row[i]:<{widths[i]}}" for i in range(first, last))
            lines.append(f"{label:<{LABEL_WIDTH}} {text}".rstrip())
        lines.append("")
    return lines[:-1]
