"""Predicted against measured iterations at several link rates: how far a profile is to be trusted here.

Every rate is one `penstock bench` on an emulated cluster, which profiles, predicts, and measures in turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, Final

from benchmarks.command import parser_of, run_alone
from benchmarks.launching import ProgramFailedError
from penstock.lab.emulate.links import parse_rate
from penstock.words import markdown_table

RATES: Final = ("300mbit", "400mbit", "700mbit", "2gbit")
SCHEDULES: Final = "sequential,moe_pipeline,flowmoe,penstock"
SETTINGS: Final = ("schedule.microbatches=2", "compare.rounds=5")
MILLI: Final = 1e3


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One schedule at one rate, in seconds.

    Attributes:
        interval_s: The predicted interval; empty where none was given.
    """

    inter_rate_bit_per_s: float
    schedule: str
    predicted_s: float
    interval_s: tuple[float, ...]
    measured_s: float

    @property
    def error(self) -> float:
        """Relative; positive where the step took longer than predicted."""
        return self.measured_s / self.predicted_s - 1

    @property
    def hits(self) -> bool:
        """Whether the measured median lies in the interval."""
        return len(self.interval_s) == 2 and self.interval_s[0] <= self.measured_s <= self.interval_s[1]


@dataclass(frozen=True, kw_only=True)
class PredictionsResult:
    """All rates.

    Attributes:
        virtual: Whether devices slept instead of computing.
    """

    virtual: bool
    rows: tuple[Prediction, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"predictions": asdict(self)}


def measure_predictions(
    rates: Sequence[str], *, virtual: bool, overrides: Sequence[str]
) -> PredictionsResult:
    """Measure one comparison per rate, one after the other; minutes. Linux, root."""
    rows = [row for rate in rates for row in predictions_of(_bench(rate, virtual, overrides))]
    return PredictionsResult(virtual=virtual, rows=tuple(rows))


def predictions_of(result: Mapping[str, Any]) -> list[Prediction]:
    """Return the rows of one comparison, from the JSON object that it printed."""
    return [
        Prediction(
            inter_rate_bit_per_s=result["inter_rate_bit_per_s"],
            schedule=case["label"],
            predicted_s=case["simulated_s"],
            interval_s=tuple(case["simulated_interval_s"] or ()),
            measured_s=case["iteration_s_median"],
        )
        for case in result["cases"]
    ]


def _bench(rate: str, virtual: bool, overrides: Sequence[str]) -> Mapping[str, Any]:
    """Run a comparison; raise ProgramFailedError with what it said if it fails."""
    shape = ("--virtual", "--emulate", "4x4") if virtual else ("--emulate", "2x1")
    sizes = ("moe.num_experts=16", "compare.rounds=3") if virtual else ()
    given = (*shape, "--inter-rate", rate, "--schedules", SCHEDULES, *SETTINGS, *sizes, *overrides)
    command = [sys.executable, "-m", "penstock", "bench", "--json", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramFailedError(
            f"penstock bench at {rate} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    result: Mapping[str, Any] = json.loads(done.stdout)
    return result


def render_predictions(result: PredictionsResult) -> str:
    """Return a table in Markdown, and the mean error below."""
    titles = ("Mbit/s", "schedule", "predicted ms", "interval ms", "measured ms", "error")
    table = markdown_table([titles, *map(_cells, result.rows)])
    errors = [abs(row.error) for row in result.rows]
    inside = sum(row.hits for row in result.rows)
    devices = "virtual devices" if result.virtual else "real computation"
    mean_text = f"{devices}: mean error {100 * mean(errors):.1f} %, largest {100 * max(errors):.1f} %"
    return "\n".join([*table, "", f"{mean_text}; {inside} of {len(errors)} medians lie in their interval"])


def _cells(row: Prediction) -> tuple[str, ...]:
    ends = " to ".join(f"{MILLI * end:.0f}" for end in row.interval_s)
    return (
        f"{row.inter_rate_bit_per_s / 1e6:.0f}",
        row.schedule,
        f"{MILLI * row.predicted_s:.0f}",
        ends or "-",
        f"{MILLI * row.measured_s:.0f}",
        f"{100 * row.error:+.1f} %",
    )


def _parser() -> argparse.ArgumentParser:
    about = "Compares predicted with measured iterations at several link rates. Linux, root."
    parser = parser_of("predictions", about, "--rates 300mbit,2gbit")
    parser.add_argument("--rates", default=",".join(RATES), metavar="RATE,...", help="links between nodes")
    parser.add_argument("--virtual", action="store_true", help="devices that sleep: 4 nodes of 4")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="settings")
    return parser


def _measure(options: argparse.Namespace) -> PredictionsResult:
    rates = options.rates.split(",")
    for rate in rates:
        parse_rate(rate)
    return measure_predictions(rates, virtual=options.virtual, overrides=options.overrides)


if __name__ == "__main__":
    run_alone(_parser(), _measure, render_predictions)
