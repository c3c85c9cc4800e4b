"""Ranks that stop answering: within the timeout plus 5 s the run has ended and the right rank is named."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.train.launcher import LaunchOutcome
from tests.support.launched import launch_forked
from tests.support.patience import HANG_S
from tests.support.runs import clean_environ, write_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]

TIMEOUT_S = 5.0
ROOT = Path(__file__).parents[2]


def command(folder: Path, place: str, rank: int) -> list[str]:
    config = write_config(folder)
    words = [f"parallel.timeout_s={TIMEOUT_S}", "train.steps=100000", "train.checkpoint_every=2"]
    return [sys.executable, "-m", "tests.support.faulty", place, str(rank), "train", str(config), *words]


def environ() -> dict[str, str]:
    return {**clean_environ(), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


Ended = tuple[LaunchOutcome, str]
"""How a run ended, and what was said."""

USUAL = [
    ("stopped in a step", 0, 4),
    ("stopped at the vote", 1, 2),
    ("stopped in a save", 1, 2),
    ("fails in a task", 2, 4),
]
"""Runs of `make test`: the place of the trouble, the rank that gets into it, and how many ranks there are."""


Run = Callable[[str, int, int], Ended]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """How a run ends; the usual ones are made all at once, since waiting is most of what they do."""

    def begin(place: str, rank: int, processes: int) -> Callable[[], Ended]:
        words = command(tmp_path_factory.mktemp("run"), place, rank)
        return launch_forked(words, processes, grace_s=TIMEOUT_S + 10, environ=environ())

    begun = {asked: begin(*asked) for asked in USUAL}
    usual = {asked: ended() for asked, ended in begun.items()}
    return lambda *asked: usual[asked] if asked in usual else begin(*asked)()


def reports(said: str) -> dict[int, str]:
    """What each rank printed of its failure."""
    return {int(rank): line for rank, line in re.findall(r"^penstock: rank (\d+): (.*)$", said, re.M)}


@pytest.mark.parametrize(
    ("place", "rank", "processes", "waited_for"),
    [
        pytest.param("stopped in a step", 1, 2, "task L", marks=pytest.mark.soak),
        ("stopped in a step", 0, 4, "task L"),
        ("stopped at the vote", 1, 2, "agreeing whether to stop after step 3"),
        ("stopped in a save", 1, 2, "saving the checkpoint of step 2"),
        pytest.param("stopped in a save", 0, 4, "saving the checkpoint of step 2", marks=pytest.mark.soak),
    ],
)
def test_a_stopped_rank_is_named(run: Run, place: str, rank: int, processes: int, waited_for: str) -> None:
    outcome, said = run(place, rank, processes)
    found = [line for line in said.splitlines() if " failed" in line]
    assert len(found) == processes - 1
    for line in found:
        assert f"rank {rank} does not answer: it is stopped, disconnected or dead" in line, line
        assert waited_for in line, line
    last = outcome.describe()
    assert last is not None
    assert last.startswith(f"rank {rank} did not answer: it was stopped by a signal; rank "), last
    assert waited_for in last, last
    assert (outcome.exit_code, outcome.exit_codes[rank]) == (1, -signal.SIGKILL)


@pytest.mark.soak
def test_a_rank_that_runs_and_takes_no_part_is_named(run: Run) -> None:
    outcome, said = run("loading for ever", 1, 2)
    (line,) = reports(said).values()
    assert re.search(r"rank 1 answers, but was outside every exchange and task for \d\.\d s", line), line
    assert (outcome.describe() or "").startswith("rank 1 did not answer and was killed; rank 0 ")
    assert outcome.exit_code == 1


def test_a_rank_that_failed_by_itself_is_named(run: Run) -> None:
    outcome, said = run("fails in a task", 2, 4)
    found = reports(said)
    assert found.keys() == set(range(4))
    assert "ZeroDivisionError: a fault of this rank alone" in found[2]
    for rank in (0, 1, 3):
        assert "rank 2" in found[rank], found[rank]
    assert (outcome.exit_code, outcome.silent) == (1, {})
    assert re.fullmatch(
        r"rank 2 exited with code 1: task L\S+: ZeroDivisionError: a fault of this rank alone",
        outcome.describe() or "",
    )


@pytest.mark.soak
def test_the_rank_that_holds_the_store_may_stop(tmp_path: Path) -> None:
    """Without a launcher rank 0 holds it, as on Slurm; the others must do without it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            command(tmp_path, "stopped in a step", 0),
            env={**environ(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=HANG_S)[1] for process in ranks[1:]]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks[1:]] == [1]
    for text in said:
        assert "rank 0 does not answer: it is stopped, disconnected or dead" in text, text
        assert "Traceback" not in text and "[W" not in text, text
