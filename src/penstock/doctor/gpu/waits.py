"""What the host waits for in a step, by line, and whether it is ahead of the device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from penstock.device import device_of
from penstock.doctor.gpu.here import (
    MODEL,
    Case,
    Here,
    given_machinery,
    given_run,
    settled,
    small_machinery,
    small_run,
    timed,
)
from penstock.doctor.gpu.outcome import Outcome
from penstock.schedule import SCHEDULES
from penstock.words import counted, percent

TRIED: Final = ("sequential", "flowmoe", "penstock")
BESIDE: Final = 2
"""Waits of a step beside those for the counts of dropless routing: see docs/gpu.md."""

WARM_UP: Final = 2
LEAST_LEAD: Final = 0.1
"""The part of a step by which the host should be ahead of the device at its end, or half a layer, as it never
is by many layers (`penstock.runtime.streams`): less, and the device waits for the host."""


def run(here: Here) -> Outcome:
    """Count waits of the small model, then time the host in steps of the given run."""
    waits = _count(here)
    machinery = given_machinery(here)
    ran = given_run(here, machinery)
    ran.stack.timed = False
    steps = range(WARM_UP + here.scale.steps)
    times = [timed(here, partial(ran.step, number)) for number in steps][WARM_UP:]
    tasks = len(ran.stack.plan.graph.tasks)
    machinery.close()
    issue_s, whole_s = (median(seconds) for seconds in zip(*times, strict=True))
    lead, layers = 1 - issue_s / whole_s, len(ran.stack.plan.shape.moe_layers)
    figures = {
        "waits": waits,
        "issue_s": issue_s,
        "step_s": whole_s,
        "tasks": tasks,
        "host_s_per_task": issue_s / tasks,
    }
    counts = (f"{one['schedule']} {one['waits']} of {one['allowed']}" for one in waits)
    line = f"waits of a step, and how many may be: {', '.join(counts)}"
    if any(one["waits"] is None for one in waits):
        line = "waits: not counted, since processors wait for no device"
    lines = [
        line,
        f"{settled(here).schedule.name}: {counted(tasks, 'task')} of {1e6 * issue_s / tasks:.0f} us on the "
        f"host, which is done {percent(max(0.0, lead))} of a step before the device",
    ]
    more = [counts for counts in waits if counts["waits"] is not None and counts["waits"] > counts["allowed"]]
    slow = [f"{counts['schedule']} waits {counts['waits']} times, not {counts['allowed']}" for counts in more]
    if here.scale.judged and lead < min(LEAST_LEAD, 0.5 / layers):
        slow.append("the device waits for the host: its steps are too short, or the processor too slow")
    return Outcome.of(lines, figures, slow="; ".join(slow))


def allowed(schedule: str, microbatches: int) -> int:
    """Return how often the host may wait in a step of the small model, which drops no tokens."""
    cut = microbatches if "microbatches" in SCHEDULES[schedule].reads else 1
    return MODEL.num_layers * cut + BESIDE


def _count(here: Here) -> list[dict[str, Any]]:
    """Return the waits of a later step of every schedule; None where the device cannot count them."""
    rows = []
    machinery = small_machinery(here, Case(name="waits"))
    for name in TRIED:
        case = Case(name=name, schedule=name)
        ran = small_run(here, case, machinery)
        for number in range(WARM_UP):
            ran.step(number)
        with device_of(here.device).counting_waits() as waits:
            ran.step(WARM_UP)
        lines = waits and [
            {"file": "/".join(Path(file).parts[-3:]), "line": line, "what": what, "times": times}
            for (file, line, what), times in waits.most_common()
        ]
        rows.append(
            {
                "schedule": name,
                "waits": None if waits is None else sum(waits.values()),
                "allowed": allowed(name, case.config(here).schedule.microbatches),
                "lines": lines,
            }
        )
    machinery.close()
    return rows
