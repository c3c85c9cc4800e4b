"""`python -m benchmarks.calibration`: how far predictions are from what others measured."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.calibration.fit import fitted
from benchmarks.calibration.gpu import Step, steps
from benchmarks.calibration.hardware import HARDWARE
from benchmarks.calibration.held_out import SAMPLE, Result, held_out
from benchmarks.calibration.page import page, priced_tasks
from benchmarks.calibration.tasks import DATA
from benchmarks.command import parser_of, run_alone
from penstock.cost.clusters import FOLDER
from penstock.writing import write_whole

PAGE: Final = Path(__file__).parents[2] / "docs" / "calibration.md"
PRICED: Final = DATA / "priced_tasks.csv"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was compared."""

    results: list[Result]
    steps: list[Step]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def to_text(self) -> str:
        return page(self.results, self.steps)


def calibrated(options: argparse.Namespace) -> Calibration:
    """Compare. With `--write`, fit the clusters first, and write the page and the tasks afterwards."""
    if options.write:
        for name in HARDWARE:
            fitted(name).file.save(FOLDER / f"{name}.json")
    calibration = Calibration(results=held_out(options.sample), steps=steps())
    if options.write:
        write_whole(PAGE, calibration.to_text())
        write_whole(PRICED, priced_tasks())
    return calibration


if __name__ == "__main__":  # not in processes that share the work
    parser = parser_of("calibration", "Compares predictions with what others measured: a minute.")
    parser.add_argument(
        "--write",
        action="store_true",
        help="fit the papers' clusters again, and write their files, all tasks and the page",
    )
    parser.add_argument(
        "--sample", type=int, default=SAMPLE, metavar="N", help=f"simulate N layers of a grid ({SAMPLE})"
    )
    run_alone(parser, calibrated, Calibration.to_text)
