"""Benchmarks that are stopped: what they tell before, what is left of them, and that they end."""

# ruff: noqa: TID251 - a process that is killed sleeps

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.layer.measure import in_turns
from benchmarks.progress import PROGRESS, in_rows
from benchmarks.published.study import in_processes
from tests.support.forked import run_text
from tests.support.launched import start_launcher
from tests.support.patience import HANG_S, OWN_TIME, wait_for
from tests.support.runs import STARTED, clean_environ, wait_until

NOTHING = "penstock: stopped before the command began; nothing was done\n"
UNTIL_THEN = "penstock: stopped; the table has what was measured until then\n"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Afterwards nothing is told any more."""
    yield
    PROGRESS.begin("", shown=False)


def stop() -> int:
    raise KeyboardInterrupt


def summed(found: tuple[int, ...]) -> int:
    return sum(found)


# ---- in one process ----------------------------------------------------------------------------------------


def test_rows_are_told_with_their_number_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    PROGRESS.begin("sums", shown=True)
    rows: list[tuple[str, Callable[[], int]]] = [("five", lambda: 5), ("seven", lambda: 7), ("never", stop)]
    with pytest.raises(KeyboardInterrupt):
        in_rows(rows, summed)
    assert PROGRESS.kept() == 12
    said = capsys.readouterr().err.splitlines()
    assert said == ["sums: five, 1 of 3", "sums: seven, 2 of 3", "sums: never, 3 of 3"]


def test_nothing_is_kept_where_no_row_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    PROGRESS.begin("sums", shown=False)
    with pytest.raises(KeyboardInterrupt):
        in_rows([("never", stop)], summed)
    assert PROGRESS.kept() is None
    assert capsys.readouterr().err == ""


def test_only_whole_rounds_are_kept() -> None:
    PROGRESS.begin("turns", shown=False)
    numbers = iter(range(5))
    ways = {"a": lambda: next(numbers), "b": lambda: next(numbers, None) or stop()}
    with pytest.raises(KeyboardInterrupt):
        in_turns(ways, rounds=3, warmup=0, result=dict)
    assert PROGRESS.kept() == {"a": [0, 3], "b": [1, 2]}


def _mark(folder: Path, number: int) -> dict[str, float]:
    """Soon for the first 16, which two processes take first; later ones leave a file, after a long while."""
    if number >= 16:
        time.sleep(HANG_S)
        (folder / str(number)).touch()
    return {}


def test_processes_that_share_the_work_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(what: str) -> None:
        raise KeyboardInterrupt(what)

    monkeypatch.setattr(PROGRESS, "say", interrupt)
    other = multiprocessing.Process(target=time.sleep, args=(600,))
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            in_processes(partial(_mark, tmp_path), list(range(32)), workers=2)
        assert list(tmp_path.iterdir()) == []
        assert other.is_alive(), "processes that others have started are theirs to end"
    finally:
        other.kill()
        other.join()


# ---- in a process of its own -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "said"), [(None, NOTHING), ("0", NOTHING), ("1", "")])
def test_a_stop_while_modules_are_loaded(rank: str | None, said: str) -> None:
    own = "" if rank is None else f"os.environ['RANK'] = {rank!r}\n"
    lines = "sys.argv = ['-m']  # as it is then\nimport benchmarks\nsignal.raise_signal(signal.SIGINT)"
    words = [sys.executable, "-c", f"import os, signal, sys\n{own}{lines}"]
    environ = clean_environ()
    done = subprocess.run(words, capture_output=True, text=True, env=environ, check=False, timeout=HANG_S)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


STUCK = """
import signal
from functools import partial
from benchmarks.command import _left
from benchmarks.progress import PROGRESS
from penstock import stops
{clock}
stops.GRACE_S = 0.1
stops.STOPS.hear()
stops.STOPS.begin("")
PROGRESS.begin("stuck", shown=False)
PROGRESS.keep(lambda: 7)
stops.STOPS.says(partial(_left, print))
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    while True:  # as for others that are gone
        pass
"""


def test_what_does_not_end_by_itself_is_ended_and_prints_what_it_has() -> None:
    done = run_text(STUCK.format(clock=OWN_TIME))
    assert (done.returncode, done.stdout, done.stderr) == (130, "7\n", UNTIL_THEN)


ASKED = """
import os, signal, sys
from benchmarks.collectives import CollectivesResult
from benchmarks.command import parser_of, run_alone, run_on_ranks
from benchmarks.progress import PROGRESS
from penstock.stops import STOPS
from penstock.topology import CommunicationError

class Late(CommunicationError):
    def __str__(self):
        signal.raise_signal(signal.SIGINT)
        return "rank 1 is gone"

def ends(*given):
    found = CollectivesResult(ranks=1, nodes=1, inter_rate_bit_per_s=None, rows=())
    PROGRESS.keep(lambda: found)
    {ends}
    return found

def render(result):
    return f"ranks: {{result.ranks}}"

{before}
sys.argv = ["asked"]
{run}
"""
ALONE = "run_alone(parser_of('asked', ''), ends, render)"
HEARD = "STOPS.heard = signal.SIGINT"  # by the thread that hears of a signal first


@pytest.mark.parametrize(
    ("ends", "run"),
    [
        (f"{HEARD}; raise RuntimeError('rank 1 is gone')", ALONE),
        (HEARD, ALONE),
        ("raise Late", "sys.argv += ['parallel.processes=1']; run_on_ranks('asked', '', '', ends, render)"),
    ],
    ids=["an error", "a result", "an error that is reported"],
)
def test_whatever_a_stop_led_to_what_was_measured_is_printed(ends: str, run: str) -> None:
    done = run_text(ASKED.format(ends=ends, run=run, before=""))
    assert (done.returncode, done.stdout, done.stderr) == (130, "ranks: 1\n", UNTIL_THEN)


def test_a_stop_of_what_nobody_reads_any_more_is_no_failure() -> None:
    """Ctrl-C ends `tee`, too."""
    before = "read, write = os.pipe(); os.dup2(write, 1); os.close(read); os.close(write)"
    done = run_text(ASKED.format(ends="signal.raise_signal(signal.SIGINT)", run=ALONE, before=before))
    assert (done.returncode, done.stderr) == (0, "")


# ---- the commands ------------------------------------------------------------------------------------------


def stopped(tmp_path: Path, reached: str, *arguments: str, whole: bool = True) -> tuple[int, str, str]:
    """Exit code, output and errors of a benchmark that is interrupted when it says what matches.

    whole: with all that it has started, as a terminal does it.
    """
    out, errors = tmp_path / "out", tmp_path / "errors"
    module, *words = arguments
    process = start_launcher(*words, stderr=errors, stdout=out, program=module)
    wait_until(errors.exists, process)
    wait_until(lambda: re.search(reached, errors.read_text()) is not None, process)
    (os.killpg if whole else os.kill)(process.pid, signal.SIGINT)
    code = process.wait(timeout=HANG_S)
    return code, out.read_text(), errors.read_text()


def test_a_benchmark_that_is_stopped_prints_what_it_has(tmp_path: Path) -> None:
    own = ("parallel.processes=1", "--json")
    code, out, error = stopped(tmp_path, r"round [2-9]", "benchmarks.interpreter", *own)
    assert code == 130, error
    assert error.endswith(UNTIL_THEN) and "Traceback" not in error
    assert 1 <= json.loads(out)["interpreter"]["rounds"] < 60


@pytest.mark.skipif(os.geteuid() != 0, reason="the suite emulates clusters")
def test_a_suite_that_is_stopped_keeps_what_has_ended_and_ends_its_run(tmp_path: Path) -> None:
    """Of hours of runs: the signal reaches the suite alone, as from `kill`."""
    known = Path(__file__).parents[2]
    results = tmp_path / "docs" / "bench" / "results.json"
    results.parent.mkdir(parents=True)
    results.write_bytes((known / "docs" / "bench" / "results.json").read_bytes())
    (tmp_path / "BENCHMARKS.md").write_bytes((known / "BENCHMARKS.md").read_bytes())
    only = ("--only", "solvers")
    code, _, error = stopped(tmp_path, r"\[1/1\]", "benchmarks.suite", str(tmp_path), *only, whole=False)
    assert code == 130, error
    assert "interrupted: 0 of 1 runs have ended and are kept" in error and "Traceback" not in error
    with pytest.raises(ProcessLookupError):
        wait_for(lambda: os.killpg(STARTED[-1].pid, 0), "the end of its run")


def test_ranks_that_are_stopped_end_together(tmp_path: Path) -> None:
    code, out, error = stopped(tmp_path, r"all-to-all", "benchmarks.collectives", "parallel.processes=2")
    assert code == 130, error
    assert error.endswith(UNTIL_THEN) and "Traceback" not in error
    assert error.count("penstock: ") == 1
    assert " counts " in out


def test_a_process_that_starts_others_prints_what_it_has(tmp_path: Path) -> None:
    code, out, error = stopped(tmp_path, r"link . device", "benchmarks.planners")
    assert code == 130, error
    assert error.count("penstock: stopped; ") == 1 and "Traceback" not in error
    assert "every planner, 1 of" in error and "| planner " in out
