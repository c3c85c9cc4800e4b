"""`penstock report`: writes a page about a run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.out import add, check_out, save_out, user_path
from penstock.cli.run import FAILED
from penstock.words import folded, mib, terminal_width
from penstock.writing import write_whole

if TYPE_CHECKING:  # loaded where a page is written: other commands need none of it
    from penstock.report.page.findings import FinishedRun

PAGE = "report.html"


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `penstock`."""
    report = commands.add_parser(
        "report",
        help="write a page about a run",
        description="Writes one HTML file about the run in a folder: predicted and measured timelines, what "
        "bound the step, losses, speed and loads. It needs no network. A run that has not ended, or was "
        "killed, gets a page about what is there.",
        epilog="Example: penstock report runs/tiny",
    )
    add(report, "folder RUN", "the output.dir of a run, such as runs/tiny", type=user_path)
    add(
        report, "--out FILE", f"where to write the page (default: {PAGE} in the run's folder)", type=user_path
    )
    add(report, "--json", "print one JSON object with what the page says")
    report.set_defaults(run=lambda options, given: write_report(options.folder, options.out, options.json))


def write_report(folder: Path, out: Path | None, json_wanted: bool) -> int:
    """Write the page; return the exit code.

    Raises:
        ConfigError: If the folder has no run or damaged files.
    """
    from penstock.report.page.findings import binding_of, slow_ranks
    from penstock.report.page.html import write_page
    from penstock.train.run_folder import read_run

    run = read_run(folder)
    path = check_out(folder / PAGE if out is None else out, "report.html")
    page = write_page(run)
    if not save_out(lambda where: write_whole(where, page), path):
        return FAILED
    if json_wanted:
        print(json.dumps({"page": str(path), **findings(run)}))
        return 0
    print(f"wrote {path} ({mib(len(page.encode()))}): open it in a browser; it needs no network")
    binding = None if run.step is None else binding_of(run.step)
    slow = [] if run.step is None else slow_ranks(run.step)
    for sentence in [*run.failures, *([] if binding is None else binding.sentences()), *slow, *run.missing]:
        print(folded(sentence, terminal_width(sys.stdout)))
    return 0


def findings(run: FinishedRun) -> dict[str, Any]:
    """Return what the page says about the step, as plain data; None where it is not known."""
    from penstock.report.page.findings import binding_of, kinds_of

    step, plan = run.step, run.plan
    binding = None if step is None else binding_of(step)
    return {
        "steps": len(run.course.step),
        **{
            f"{name}_s": getattr(step, f"{name}_s", None)
            for name in ("predicted", "measured", "traced", "bound")
        },
        "binding": None if binding is None else binding.to_dict(),
        "stragglers": {} if step is None else {str(each.rank): each.factor for each in step.stragglers},
        "tasks": [] if step is None else [asdict(kind) for kind in kinds_of(step)],
        "plan": None if plan is None else plan.choice.words,
        "next_best": [] if plan is None else [[each.words, each.predicted_s] for each in plan.others],
        "failures": list(run.failures),
        "missing": list(run.missing),
    }
