"""Schedules predicted from the curves, then run: how long they take, and how much of the network shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final

from penstock.autotune.problem import run_problem
from penstock.doctor.gpu.here import Here, given_machinery, given_run, layout_of, settled, timed
from penstock.doctor.gpu.outcome import Outcome
from penstock.plan import Candidate, Problem, evaluate
from penstock.plan.candidate import whole_s
from penstock.plan.predict import predicted_timeline
from penstock.trace import occupation
from penstock.words import milliseconds, percent

TRIED: Final = ("sequential", "moe_pipeline", "flowmoe", "fsmoe", "penstock")
WARM_UP: Final = 2
FAR: Final = 0.25
"""The relative error beyond which a prediction is of no use for choosing schedules."""


def run(here: Here) -> Outcome:
    """Predict every schedule and measure its steps, in turns."""
    assert here.cluster is not None, "the curves come first"
    config, layout = settled(here), layout_of(here, here.config)
    problem = run_problem(config, layout, here.cluster)
    planned = {}
    for name in TRIED:
        choice = replace(config.schedule, name=name).decision(problem.workload.dispatch)
        planned[name] = evaluate(problem, choice)
    machinery = given_machinery(here)
    ran = given_run(here, machinery)
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in TRIED}
    for turn in range(WARM_UP + here.scale.steps):
        for name, candidate in planned.items():
            ran.stack.adopt(candidate.plan)
            _, step_s = timed(here, partial(ran.step, turn))
            exposed_s = occupation(ran.stack.records(), layout.mesh.silent).exposed_s
            slowest_s, exposed_s = here.control.largest([step_s, exposed_s], "comparing measured steps")
            measured[name] += [(slowest_s, exposed_s)] if turn >= WARM_UP else []
    machinery.close()
    rows = [_row(problem, name, planned[name], measured[name]) for name in TRIED]
    return outcome_of(rows, judged=here.scale.judged)


def outcome_of(rows: Sequence[dict[str, Any]], *, judged: bool) -> Outcome:
    """Return the verdict on all schedules, with a table.

    Args:
        rows: The schedules, one dictionary each.
        judged: Whether an error of predictions counts.
    """
    lines = [
        f"{row['schedule']:<13} predicted {milliseconds(row['predicted_s'])}, measured "
        f"{milliseconds(row['measured_s'])}; network shows {percent(row['predicted_exposed'])} and "
        f"{percent(row['measured_exposed'])}"
        for row in rows
    ]
    far = [row for row in rows if abs(row["measured_s"] / row["predicted_s"] - 1) > FAR]
    slow = [f"{r['schedule']} takes {r['measured_s'] / r['predicted_s']:.2f} of its prediction" for r in far]
    return Outcome.of(lines, {"schedules": list(rows)}, slow="; ".join(slow) if judged else "")


def _row(
    problem: Problem, name: str, candidate: Candidate, measured: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    predicted_s = whole_s(problem, candidate)
    timeline = predicted_timeline(problem, candidate.choice, candidate.plan)
    first = [each for each in timeline.records() if each.rank == 0]
    exposed_s = occupation(first, problem.mesh.silent).exposed_s
    step_s = median(each for each, _ in measured)
    return {
        "schedule": name,
        "predicted_s": predicted_s,
        "measured_s": step_s,
        "predicted_exposed": exposed_s / predicted_s,
        "measured_exposed": median(each for _, each in measured) / step_s,
    }
