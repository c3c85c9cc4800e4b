"""The page `docs/calibration.md`: how far predictions are from what others measured; a file of tasks."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.calibration.fit import WORDS, fitted, misses
from benchmarks.calibration.gpu import Step
from benchmarks.calibration.hardware import HARDWARE
from benchmarks.calibration.held_out import Result
from benchmarks.calibration.tasks import Row, rows
from penstock.cost.clusters import find_cluster
from penstock.words import markdown_table

HEAD: Final = """# Calibration

How far predictions are from what others measured. `python -m benchmarks.calibration` prints this page; with
`--write` it fits the constants of the papers' clusters again and writes their files, this page, and
`benchmarks/data/priced_tasks.csv`. What was measured lies in `benchmarks/data`."""

CONSTANTS: Final = """## Constants of the papers' clusters

Two studies print what single tasks took. Serial runs do not tell bandwidth from start-up, so the likeliest
constants are sought by these rows and by what is believed of the class of network and library: least
squares in logarithms, where a row may be off by 10 % (a task of one layer) or 20 % (all tasks of an
iteration), and a constant by the factor of its belief (`benchmarks/calibration/hardware.py`). Start-ups
that a study prints are taken as they are. Other clusters have the shares of peak rates that a fitted one with
the same devices and links reaches; all else is assumed by class. After a value stands the factor within which
it is known (one standard deviation; none = taken from the study)."""

TASKS: Final = """## Tasks of the papers

The sum of all tasks of a kind, one behind the other, by the file's constants, beside what the study timed:
`benchmarks/data/priced_tasks.csv` has every row. Plain expert parallelism of FlowMoE's study is taken to sum
the gradients of a block in five messages, tensor by tensor. Rows with a reason are not fitted."""

HELD_OUT: Final = """## Results of the papers that are held out

Nothing is fitted to what follows. Of grids 40 layers are simulated, drawn with a fixed seed. The noise of an
iteration's rows and the belief on the overhead of a task were set with FlowMoE's predicted speed-ups in
sight."""

NAMES: Final = (
    "flops_per_s",
    "task_overhead_s",
    *(f"{link}_{what}" for link in ("link", "intra") for what in ("latency_s", "bytes_per_s")),
)
UNITS: Final = {
    "flops_per_s": (1e-12, "TFLOP/s"),
    "latency_s": (1e6, "us"),
    "overhead_s": (1e6, "us"),
    "bytes_per_s": (1e-9, "GB/s"),
}


GPU: Final = """## Steps on GPUs

Whole steps, updates included, that users of other frameworks measured, and what `penstock plan` predicts for
the row's layout from the devices' data sheets: by the schedule `sequential` (without expert parallelism
`flowmoe`), since these frameworks compute no part of a batch under the transfers of another, and with rows
sent flat where they use all-to-all. The share of its rate that EFA reaches is fitted to its row; efficiencies
of kernels are those that others measured of single kernels."""


def page(results: Sequence[Result], steps: Sequence[Step]) -> str:
    """Return the page.

    Args:
        results: Published results to which nothing is fitted.
        steps: Steps that were measured on GPUs.
    """
    parts = [HEAD, CONSTANTS, _table(_constants()), TASKS, _table(_tasks())]
    parts += [HELD_OUT, _table(_results(results)), _not_predicted(results), GPU, _table(_steps(steps))]
    return "\n\n".join(parts) + "\n"


def _table(cells: Iterator[Sequence[str]]) -> str:
    return "\n".join(markdown_table(list(cells)))


def _constants() -> Iterator[Sequence[str]]:
    yield ("cluster", *(f"{WORDS[name]}, {_unit(name)[1]}" for name in NAMES))
    for name in HARDWARE:
        file, factors = find_cluster(name), fitted(name).factors
        values = [getattr(file.rates, each) * _unit(each)[0] for each in NAMES]
        spreads = [f" x{factors[each]:.2f}" if each in factors else "" for each in NAMES]
        yield (name, *(f"{value:.3g}{factor}" for value, factor in zip(values, spreads, strict=True)))


def _unit(name: str) -> tuple[float, str]:
    return next(unit for end, unit in UNITS.items() if name.endswith(end))


def _tasks() -> Iterator[Sequence[str]]:
    yield ("cluster", "fitted, error", "farthest", "not fitted")
    for name in dict.fromkeys(row.cluster for row in rows()):
        of_cluster = [row for row in rows() if row.cluster == name]
        fitted_rows = [row for row in of_cluster if not row.left_out]
        left_out: dict[str, list[str]] = {}
        for row in of_cluster:
            if row.left_out:
                left_out.setdefault(row.left_out, []).append(_missed(row))
        reasons = (f"{', '.join(tasks)}: {reason}" for reason, tasks in left_out.items())
        farthest = max(fitted_rows, key=lambda row: abs(_error(row)))
        yield (name, misses(find_cluster(name)).words, _missed(farthest), "; ".join(reasons))


def _priced_ms(row: Row) -> float:
    return row.predicted_ms(find_cluster(row.cluster))


def _error(row: Row) -> float:
    return _priced_ms(row) / row.measured_ms - 1


def _missed(row: Row) -> str:
    return f"{row.model} {row.what} {100 * _error(row):+.0f} %"


def priced_tasks() -> str:
    """Return every task that a paper timed beside its price, as CSV."""
    out = io.StringIO()
    out.write("# Tasks that papers timed, and their prices: `python -m benchmarks.calibration --write`.\n")
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(("cluster", "model", "task", "measured_ms", "priced_ms", "error", "why_not_fitted"))
    for row in rows():
        measured, priced = f"{row.measured_ms:g}", f"{_priced_ms(row):.1f}"
        lines.writerow(
            (row.cluster, row.model, row.what, measured, priced, f"{_error(row):+.2f}", row.left_out)
        )
    return out.getvalue()


def _results(results: Sequence[Result]) -> Iterator[Sequence[str]]:
    yield ("paper", "setting", "system", "over", "metric", "published", "predicted")
    for result in results:
        if not result.why_not:
            yield (
                result.paper,
                result.setting,
                result.system,
                result.baseline,
                result.metric,
                result.published,
                result.predicted,
            )


def _not_predicted(results: Sequence[Result]) -> str:
    """Return a sentence: how many results have no prediction, and why."""
    papers: dict[str, list[str]] = {}
    for result in results:
        if result.why_not:
            papers.setdefault(result.why_not, []).append(result.paper)
    reasons = (f"{len(of)} of {' and '.join(dict.fromkeys(of))} ({why})" for why, of in papers.items())
    return (
        f"Without a prediction: {', '.join(reasons)}. `benchmarks/data/published_results.csv` has them, too."
    )


def _steps(steps: Sequence[Step]) -> Iterator[Sequence[str]]:
    yield (
        "source",
        "model",
        "layout",
        "step s",
        "predicted s",
        "error",
        "tokens/s/GPU",
        "predicted",
        "plan",
        "",
    )
    for step in steps:
        seconds, rate = step.predicted_s, step.predicted_rate
        yield (
            step.group,
            step.model,
            step.layout,
            f"{step.measured_s:.4g}",
            "-" if seconds is None else f"{seconds:.4g}",
            "-" if seconds is None else f"{100 * (seconds / step.measured_s - 1):+.0f} %",
            "-" if step.measured_rate is None else f"{step.measured_rate:,.0f}",
            "-" if rate is None else f"{rate:,.0f}",
            step.plan,
            step.note,
        )
