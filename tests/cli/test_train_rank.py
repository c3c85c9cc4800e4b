"""Training that is asked to stop: wherever that happens, what is said is true, once, and so is the code."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from penstock.checkpoint.folder import complete_checkpoints
from penstock.checkpoint.storage import CheckpointError
from penstock.cli import main, train_rank
from penstock.cli.run import NOT_BEGUN
from tests.support import asked, little_room
from tests.support.forked import run_forked
from tests.support.runs import losses, write_config

pytestmark = pytest.mark.slow

NOTHING = ""
NONE_YET = "stopped; no checkpoint has been written yet"
FROM_2 = "stopped; continue from step-00000002 with train.resume=true"
ENDED = "stopped after the last step; step-00000004 is saved"
SETTINGS = ("train.steps=4", "train.checkpoint_every=2", "output.trace_steps=0")

CASES = [
    ("joining", "SIGINT", 130, NOT_BEGUN, 0, (1, 2)),
    ("building the model", "SIGINT", 130, NOT_BEGUN, 0, (2,)),
    ("building the model", "SIGTERM", 143, NOT_BEGUN, 0, (1,)),
    ("building the model", "SIGHUP", 129, NOT_BEGUN, 0, ()),
    ("in the first step", "SIGINT", 0, NOTHING, 1, (1,)),
    ("in the first step", "SIGINT,SIGINT", 130, NONE_YET, 0, (2,)),
    ("before step 3", "SIGTERM", 0, NOTHING, 3, (1,)),
    ("before step 3", "SIGHUP", 0, NOTHING, 3, ()),
    ("before step 3", "SIGUSR1", 0, NOTHING, 3, (2,)),
    ("before step 3", "SIGUSR1,SIGUSR1", 138, FROM_2, 2, (1,)),
    ("before step 3", "SIGINT,SIGINT", 130, FROM_2, 2, (2,)),
    ("before step 3", "SIGTERM,SIGTERM", 143, FROM_2, 2, ()),
    ("in the second save", "SIGINT", 0, NOTHING, 4, (1,)),
    ("in the second save", "SIGINT,SIGINT", 130, FROM_2, 2, (2,)),
    ("after step 4", "SIGINT", 0, NOTHING, 4, (1,)),
    ("in the last evaluation", "SIGINT", 0, NOTHING, 4, (1,)),
    ("summing up", "SIGINT", 0, NOTHING, 4, (1,)),
    ("summing up", "SIGINT,SIGINT", 130, ENDED, 4, (1,)),
    ("leaving", "SIGINT,SIGINT", 0, NOTHING, 4, (2,)),
    ("printing", "SIGINT", 0, NOTHING, 4, (1,)),
]
"""Place, signals, code, what is said, the last step that is saved; and on how many ranks: `make soak` has all
of them on one and on two."""


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("place", "signals", "code", "said", "saved", "ranks"),
    [
        pytest.param(*case, ranks, marks=() if ranks in usual else pytest.mark.soak)
        for *case, usual in CASES
        for ranks in (1, 2)
    ],
)
def test_what_a_stop_leaves(
    tmp_path: Path, place: str, signals: str, code: int, said: str, saved: int, ranks: int
) -> None:
    words = (place, signals, "train", write_config(tmp_path), f"parallel.processes={ranks}", *SETTINGS)
    done = run_forked(ranks, *words, program=asked.__file__)
    lines = [line for line in done.stderr.splitlines() if line.startswith("penstock: ")]
    assert (done.returncode, lines) == (code, [f"penstock: {said}"] if said else []), done.stderr
    assert "Traceback" not in done.stderr
    there = [path.name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")]
    assert there[-1:] == ([f"step-{saved:08d}"] if saved else [])
    assert ("steps" in done.stdout) == (code == 0), "a run that ends tells what has become of it"
    assert ((tmp_path / "run" / "summary.json").exists()) == (code == 0)


def test_an_earlier_run_in_the_folder_is_not_what_was_saved(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "step-00000007").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000007" / "SHA256SUMS").touch()
    words = ("in the first step", "SIGINT,SIGINT", "train", write_config(tmp_path), *SETTINGS)
    done = run_forked(1, *words, "parallel.processes=1", program=asked.__file__)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, f"penstock: {NONE_YET}")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "error", [RuntimeError("no such model"), CheckpointError("no such model\n\nTraceback")]
)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_model_that_cannot_be_built_leaves_the_reports_of_an_earlier_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    earlier: bool,
    error: Exception,
) -> None:
    """It is moved aside only when this one begins; without a run in the folder there is a report."""

    def broken(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(train_rank, "decoder_of", broken)
    report = tmp_path / "run" / "failure-rank0.txt"
    if earlier:
        report.parent.mkdir()
        report.write_text("earlier")
        (tmp_path / "run" / "metrics.jsonl").touch()
    words = ("train", str(write_config(tmp_path)), "parallel.processes=1", "train.resume=auto")
    assert main(words) == 1
    said, left = capsys.readouterr().err, report.read_text()
    assert "no such model" in said and (f"(details: {report})" in said) is not earlier
    assert left == "earlier" if earlier else "no such model" in left
    assert "Traceback" in (said if earlier else left)


def test_a_disk_that_becomes_full_is_said_in_a_line_by_each_rank(tmp_path: Path) -> None:
    words = ("70000", "train", write_config(tmp_path), "parallel.processes=2", *SETTINGS)
    endless = ("train.steps=100000", "train.checkpoint_every=0")
    done = run_forked(2, *words, *endless, program=little_room.__file__)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("penstock: ")]
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert len(lines) == 2 and all(f"{metrics} cannot be written" in line for line in lines), lines
    assert list(losses(tmp_path / "run")) == list(range(1, len(losses(tmp_path / "run")) + 1))
