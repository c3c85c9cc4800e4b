"""The suite on real subprocesses: one failing run stops neither the others nor the documents."""

from __future__ import annotations

import io
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pytest

from benchmarks import suite
from benchmarks.restore import restore
from benchmarks.run import Run
from benchmarks.runs import SUITE
from benchmarks.suite import Outcome, run_one, run_some, run_suite, write_all
from penstock.config import ConfigError
from penstock.lab.bench.result import render
from tests.benchmarks.results import MACHINE, NINE, result
from tests.lab.commands.test_bench import QUICK

pytestmark = pytest.mark.slow

TINY = Run(
    name="tiny",
    title="A tiny run",
    arguments=(*QUICK, "--schedules", "sequential,flowmoe"),
    note="To see whether it works.",
    seconds=20,
)

WRONG = Run(name="wrong", title="A wrong run", arguments=("--schedules", "flow"), note="Fails.", seconds=5)


@pytest.mark.soak
def test_one_run_fails_and_all_is_written(tmp_path: Path) -> None:
    out = io.StringIO()
    assert run_suite((WRONG, TINY), tmp_path, out) == 1
    said = out.getvalue()
    assert "[1/2] A wrong run" in said and "FAILED" in said and 'compare.schedules = "flow": ' in said
    assert "[2/2] A tiny run" in said and "1 of 2 runs failed: A wrong run" in said
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert "**1 of 2 runs failed: A wrong run.**" in text and "exit code 2. penstock: " in text
    assert f"```\n{TINY.command}\n```" in text and "![A tiny run](docs/bench/tiny.png)" in text
    assert {path.name for path in (tmp_path / "docs" / "bench").iterdir()} == {
        "tiny.png",
        "prediction.png",
        "index.html",
        "results.json",
    }
    wrong, tiny = json.loads((tmp_path / "docs" / "bench" / "results.json").read_text())["runs"]
    assert wrong["failure"].startswith("exit code 2") and "result" not in wrong
    assert [case["schedule"] for case in tiny["result"]["cases"]] == ["sequential", "flowmoe"]
    assert render(restore(tiny["result"])).splitlines()[-1] in text


def test_one_run_alone_goes_into_the_documents_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its section comes before that of the run after it, in its old place the next time; others stay."""
    failed = Outcome(run=WRONG, took_s=1.0, failure="exit code 2")
    monkeypatch.setattr(suite, "SUITE", (WRONG, TINY))
    monkeypatch.setattr(suite, "run_one", lambda run, place, out: failed)
    write_all(MACHINE, [Outcome(run=TINY, took_s=1.0, result=result())], tmp_folder(tmp_path))
    before = (tmp_path / "BENCHMARKS.md").read_text()
    assert run_some(["wrong"], tmp_path, io.StringIO()) == 1
    once = (tmp_path / "BENCHMARKS.md").read_text()
    head, wrong, rest = re.split(r"(## A wrong run\n.*?)(?=## A tiny run)", once, flags=re.DOTALL)
    assert head + rest == before and "Fails. Measured by itself: " in wrong
    assert run_some(["wrong"], tmp_path, io.StringIO()) == 1
    assert (tmp_path / "BENCHMARKS.md").read_text() == once
    kept = json.loads((tmp_path / "docs" / "bench" / "results.json").read_text())["runs"]
    assert [run["name"] for run in kept] == ["wrong", "tiny"] and "result" in kept[1]


@pytest.mark.parametrize("there", [False, True])
def test_an_interruption_keeps_what_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """Of the whole suite, too; what was there of the others stays."""
    failed = Outcome(run=WRONG, took_s=1.0, failure="exit code 2")

    def run(run: Run, place: str, out: TextIO) -> Outcome:
        del place, out
        if run is TINY:
            raise KeyboardInterrupt
        return failed

    monkeypatch.setattr(suite, "SUITE", (WRONG, TINY))
    monkeypatch.setattr(suite, "run_one", run)
    if there:
        write_all(MACHINE, [Outcome(run=TINY, took_s=1.0, result=result())], tmp_folder(tmp_path))
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run_suite((WRONG, TINY), tmp_path, out)
    assert "interrupted: 1 of 2 runs have ended and are kept" in out.getvalue()
    kept = json.loads((tmp_path / "docs" / "bench" / "results.json").read_text())["runs"]
    assert [run["name"] for run in kept] == ["wrong", "tiny"][: 1 + there]
    assert "## A wrong run" in (tmp_path / "BENCHMARKS.md").read_text()


def test_an_interrupted_run_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to end, and waited for."""
    started: list[subprocess.Popen[str]] = []
    usual = subprocess.Popen.communicate

    def interrupt(process: subprocess.Popen[str], *rest: Any, **more: Any) -> Any:
        if not started:
            started.append(process)
            raise KeyboardInterrupt
        return usual(process, *rest, **more)

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_one(replace(TINY, seconds=600), "[1/1]", io.StringIO())
    assert started[0].returncode is not None and started[0].returncode != 0


def test_an_unknown_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer"):
        run_some(["layr"], tmp_path, io.StringIO())


def test_a_run_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "SPARE_S", 0.05)
    out = io.StringIO()
    outcome = run_one(Run(name="late", title="Late", arguments=(), note="", seconds=0), "[1/1]", out)
    assert outcome.result is None and outcome.failure is not None
    assert outcome.failure.endswith("given up after 0 s") and "FAILED" in out.getvalue()


def test_folders_of_this_machine_are_not_shown() -> None:
    line = suite._last_line("first\nOSError: no file '/home/somebody/secret/x.toml': 3 tokens/s\n\n")
    assert line == "OSError: no file 'x.toml': 3 tokens/s"


def test_figures_of_an_earlier_suite_do_not_stay(tmp_path: Path) -> None:
    good = Outcome(run=TINY, took_s=1.0, result=result(4e8, NINE))
    write_all(MACHINE, [good], tmp_folder(tmp_path))
    picture = tmp_path / "docs" / "bench" / "tiny.png"
    assert picture.exists()
    assert "A tiny run" in (tmp_path / "docs" / "bench" / "index.html").read_text()
    alone = Outcome(run=TINY, took_s=1.0, result={"text": "| a table |"})  # of a benchmark of its own
    write_all(MACHINE, [alone], tmp_path)
    assert not picture.exists() and "| a table |" in (tmp_path / "BENCHMARKS.md").read_text()


def tmp_folder(folder: Path) -> Path:
    (folder / suite.FOLDER).mkdir(parents=True)
    return folder


def test_the_default_list_has_names_of_its_own_and_takes_less_than_it_says() -> None:
    assert len({run.name for run in SUITE}) == len({run.title for run in SUITE}) == len(SUITE)
    assert sum(run.seconds for run in SUITE) < 90 * 60
