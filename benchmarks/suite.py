"""`python -m benchmarks.suite`: a list of runs, one after the other, and the documents that they become."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TextIO

from benchmarks.document import Section, put_section, write_document
from benchmarks.machine import Machine
from benchmarks.page import write_page
from benchmarks.plot import draw
from benchmarks.restore import restore
from benchmarks.run import OVERVIEW, Run
from benchmarks.runs import SUITE
from penstock.cli.run import exit_code
from penstock.config import check_name
from penstock.lab.bench.result import render
from penstock.lab.emulate import check_available
from penstock.stops import heeded

DOCUMENT: Final = Path("BENCHMARKS.md")
FOLDER: Final = Path("docs", "bench")
PAGE, RESULTS = FOLDER / "index.html", FOLDER / "results.json"
PATIENCE: Final = 5
"""A run is given up after this many times the seconds that it should take, and `SPARE_S` more."""

SPARE_S: Final = 60.0

LATER: Final = "Measured by itself: {}."

GRACE_S: Final = 30.0
"""How long a run that was told to end may take to end its ranks and remove its cluster."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run. Of result (its JSON) and failure (one line) exactly one is there.

    Attributes:
        measured: The machine and the date, in words; "" = as the document says.
    """

    run: Run
    took_s: float
    result: Mapping[str, Any] | None = None
    failure: str | None = None
    measured: str = ""

    @property
    def table(self) -> str | None:
        """What the command prints without `--json`."""
        if self.result is None:
            return None
        return str(self.result["text"]) if "text" in self.result else render(restore(self.result))

    @property
    def compared(self) -> Mapping[str, Any] | None:
        """The result if it compares cases, with the run's title as label: what figures show."""
        if self.result is None or "cases" not in self.result or not self.run.drawn:
            return None
        return {**self.result, "label": self.run.title}


# ---- running -----------------------------------------------------------------------------------------------


def run_suite(runs: Sequence[Run], folder: Path, out: TextIO) -> int:
    """Run all, write all documents into `folder`, and return 0, or 1 if a run failed.

    A run that fails stops none of the others. If the suite is interrupted, what has ended goes into the
    documents that are there, or becomes them.

    Args:
        runs: What to run.
        folder: Where the documents are.
        out: Where progress and errors go, a line at a time.

    Raises:
        OSError: If the folder cannot be written, before the first run.
    """
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)

    def write(outcomes: Sequence[Outcome]) -> None:
        write_all(Machine.here(), outcomes, folder)

    there = (folder / RESULTS).is_file()
    outcomes = _run_each(runs, out, (lambda ended: _put(ended, folder)) if there else write)
    write(outcomes)
    return _told(outcomes, folder, out)


def run_some(names: Sequence[str], folder: Path, out: TextIO) -> int:
    """Run some of `SUITE`, put results into the documents that are there; return 0, or 1 if one failed.

    If it is interrupted, what has ended is put there.

    Raises:
        ConfigError: If a name is unknown.
        OSError: If no suite has been written there.
    """
    for name in names:
        check_name("--only", name, [run.name for run in SUITE])
    if not (folder / RESULTS).is_file():
        raise FileNotFoundError(f"no {RESULTS} in {folder}: run the whole suite first")
    runs = [run for run in SUITE if run.name in names]
    outcomes = _run_each(runs, out, lambda ended: _put(ended, folder))
    _put(outcomes, folder)
    return _told(outcomes, folder, out)


def _run_each(runs: Sequence[Run], out: TextIO, keep: Callable[[Sequence[Outcome]], None]) -> list[Outcome]:
    """Return what became of all; an interruption goes on when what had ended before is kept."""
    outcomes: list[Outcome] = []
    try:
        for number, run in enumerate(runs, 1):
            outcomes.append(run_one(run, f"[{number}/{len(runs)}]", out))
    except KeyboardInterrupt:
        keep(outcomes)
        print(f"interrupted: {len(outcomes)} of {len(runs)} runs have ended and are kept", file=out)
        raise
    return outcomes


def _put(found: Sequence[Outcome], folder: Path) -> None:
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    outcomes = [replace(outcome, measured=Machine.here().words) for outcome in found]
    by_name = {each["name"]: each for each in [*results["runs"], *map(_plain, outcomes)]}
    results["runs"] = [by_name[run.name] for run in SUITE if run.name in by_name]
    _put_sections(outcomes, draw(_drawn(results["runs"]), folder / FOLDER), folder)
    (folder / RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _drawn(runs: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the comparisons among plain runs, by name, for figures."""
    wanted = {run.name for run in SUITE if run.drawn}
    compared = [run for run in runs if run["name"] in wanted and "cases" in run.get("result", {})]
    return {run["name"]: {**run["result"], "label": run["title"]} for run in compared}


def _put_sections(outcomes: Sequence[Outcome], pictures: Mapping[str, Path], folder: Path) -> None:
    document = (folder / DOCUMENT).read_text(encoding="utf-8")
    for outcome in outcomes:
        later = [run.title for run in SUITE[SUITE.index(outcome.run) + 1 :]]
        document = put_section(document, _section(outcome, pictures, folder), later)
    (folder / DOCUMENT).write_text(document, encoding="utf-8")


def _told(outcomes: Sequence[Outcome], folder: Path, out: TextIO) -> int:
    failed = [outcome.run.title for outcome in outcomes if outcome.failure is not None]
    print(f"wrote {folder / DOCUMENT}, {folder / PAGE} and {folder / RESULTS}", file=out)
    if failed:
        print(f"{len(failed)} of {len(outcomes)} runs failed: {'; '.join(failed)}", file=out)
    return 1 if failed else 0


def run_one(run: Run, place: str, out: TextIO) -> Outcome:
    """Run one in a process of its own, with its progress on `out`."""
    print(f"{place} {run.title} (about {run.seconds:.0f} s) ...", end=" ", file=out, flush=True)
    start_s = time.monotonic()
    code, stdout, stderr = _execute(run)
    took_s = time.monotonic() - start_s
    failure = f"exit code {code}. {_last_line(stderr)}".strip()
    result = _parse(stdout) if code == 0 else None
    if code == 0 and result is None:
        failure = "it printed no JSON object"
    print(f"{took_s:.0f} s" if result else f"FAILED after {took_s:.0f} s", file=out, flush=True)
    if result is not None:
        return Outcome(run=run, took_s=took_s, result=result)
    print(f"{run.command}: {failure}\n{stderr.rstrip()}", file=out, flush=True)
    return Outcome(run=run, took_s=took_s, failure=failure)


def _execute(run: Run) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr; a run that hangs is told to end and can remove its cluster."""
    command = [sys.executable, "-m", *run.module, "--json"]
    limit_s = PATIENCE * run.seconds + SPARE_S
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            stdout, stderr = _last_words(process)
            stderr += f"\ngiven up after {limit_s:.0f} s"
        except KeyboardInterrupt:
            process.terminate()
            _last_words(process)
            raise
    return process.returncode, stdout, stderr


def _last_words(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _parse(stdout: str) -> Mapping[str, Any] | None:
    """Return the one JSON object on stdout; None if something else is there."""
    try:
        plain = json.loads(stdout)
    except json.JSONDecodeError:
        return None
    return plain if isinstance(plain, dict) else None


def _last_line(stderr: str) -> str:
    """Return what a command says last, which is why it failed; this machine's folders are left out."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    return re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)+", "", said[-1]) if said else ""


# ---- writing -----------------------------------------------------------------------------------------------


def write_all(machine: Machine, outcomes: Sequence[Outcome], folder: Path) -> None:
    """Write BENCHMARKS.md, figures, page and results of these outcomes."""
    compared = {o.run.name: result for o in outcomes if (result := o.compared) is not None}
    pictures = draw(compared, folder / FOLDER)
    sections = [_section(outcome, pictures, folder) for outcome in outcomes]
    overview = [(title, _beside(pictures[n], folder)) for n, title in OVERVIEW.items() if n in pictures]
    subtitle = ", ".join(f"{name} {value}" for name, value in machine.lines())
    page = write_page(compared, subtitle=subtitle)
    (folder / PAGE).write_text(page, encoding="utf-8")
    for name in {*OVERVIEW, *(outcome.run.name for outcome in outcomes)} - pictures.keys():
        (folder / FOLDER / f"{name}.png").unlink(missing_ok=True)  # of an earlier suite, and no longer true
    plain = {"machine": machine.to_dict(), "runs": [_plain(outcome) for outcome in outcomes]}
    (folder / RESULTS).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    text = write_document(machine, sections, overview, PAGE.as_posix())
    (folder / DOCUMENT).write_text(text, encoding="utf-8")


def _section(outcome: Outcome, pictures: Mapping[str, Path], folder: Path) -> Section:
    run = outcome.run
    return Section(
        title=run.title,
        command=run.command,
        note=f"{run.note} {LATER.format(outcome.measured)}" if outcome.measured else run.note,
        table=outcome.table,
        failure=outcome.failure,
        picture=_beside(pictures[run.name], folder) if run.name in pictures else None,
    )


def _plain(outcome: Outcome) -> dict[str, Any]:
    run = outcome.run
    about: dict[str, Any] = {"name": run.name, "title": run.title, "command": run.command}
    about["took_s"] = round(outcome.took_s, 1)
    if outcome.measured:
        about["measured"] = outcome.measured
    if outcome.failure is not None:
        return about | {"failure": outcome.failure}
    return about | {"result": outcome.result}


def _beside(path: Path, folder: Path) -> str:
    """Return the path as the document in `folder` links it."""
    return path.relative_to(folder).as_posix()


def main() -> int:
    """Run the suite, unless no cluster can be emulated: most runs would fail; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite",
        description="Runs all that BENCHMARKS.md shows and writes it. Linux, root, an idle machine, one "
        "and a half hours.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where BENCHMARKS.md and docs/bench go")
    parser.add_argument(
        "--only", metavar="A,B,...", help="run these and keep what is there of the others: names in runs.py"
    )
    given = parser.parse_args()
    folder: Path = given.folder

    for number in heeded():
        signal.signal(number, signal.default_int_handler)  # it clears up for longer than other commands

    def command() -> int:
        check_available()
        if given.only is not None:
            return run_some(given.only.split(","), folder, sys.stderr)
        return run_suite(SUITE, folder, sys.stderr)

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
