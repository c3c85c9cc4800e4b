"""What a run shows on the screen."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import resource
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.train import logs
from penstock.train.logs import RankLog, show, telling
from penstock.train.progress import Progress, describe
from tests.support.metrics import step

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("change", "width", "words"),
    [
        ({"eval_loss": 2.75}, 100, "held-out loss 2.750  12,346 tokens/s  network hidden 93 %  eta 0:01:12"),
        ({"eval_loss": 2.75}, 70, "held-out loss 2.750  12,346 tokens/s  eta 0:01:12"),
        ({"communication_s": 0.0, "exposed_communication_s": 0.0}, 100, "12,346 tokens/s  eta 0:01:12"),
    ],
)
def test_a_step_in_words_stays_within_its_width(change: dict[str, float], width: int, words: str) -> None:
    """One process has no network."""
    assert describe(replace(step(3), **change), 72.4, width) == f"loss 2.500  {words}"  # type: ignore[arg-type]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_on_a_terminal_everything_fits(columns: int) -> None:
    """A real one, of this width: the line that changes, and messages above it."""
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.environ.pop("COLUMNS", None)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        with Progress(total_steps=100_000) as progress:
            progress.say("Plan 1   " + "many words in a message " * 20)
            progress.update(replace(step(99_999, eval_loss=2.75), tokens_per_s=1e9))
        os._exit(0)
    told = ANSI.sub("", _all_of(terminal))
    assert os.waitpid(process, 0)[1] == 0, told
    lines = [line for line in re.split(r"[\r\n]+", told) if line.strip()]
    assert "99999/100000" in told and "loss 2.500" in told
    assert max(map(len, lines)) <= columns, lines


def _all_of(terminal: int) -> str:
    told = b""
    try:
        while piece := os.read(terminal, 4096):
            told += piece
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    return told.decode()


@pytest.mark.parametrize(
    ("every", "shown_steps", "eta"), [(5, (5, 7, 10, 11), "eta 0:00:03"), (0, (7, 11), "eta 0:00:02")]
)
def test_outside_a_terminal_every_few_steps_are_lines(
    capsys: pytest.CaptureFixture[str], every: int, shown_steps: tuple[int, ...], eta: str
) -> None:
    """At least the last one, and those that are evaluated; one takes half a second."""
    with Progress(total_steps=11, every=every) as progress:
        progress.say("plan [FlowMoE] chosen")
        for number in range(1, 12):
            progress.update(step(number, eval_loss=2.75 if number == 7 else None))
    shown = capsys.readouterr()
    assert shown.out == ""
    heads = [line.split("  ")[0] for line in shown.err.splitlines()]
    assert heads == ["plan [FlowMoE] chosen", *(f"step {number}/11" for number in shown_steps)]
    assert eta in shown.err


def test_shown_speed_is_all_tokens_over_all_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps with different numbers of tokens: 100 in one second, then 900 in three."""
    with Progress(total_steps=2, every=1) as progress:
        for number, (rate, seconds) in enumerate([(100.0, 1.0), (300.0, 3.0)], start=1):
            progress.update(replace(step(number), tokens_per_s=rate, iteration_s=seconds))
    assert "250 tokens/s" in capsys.readouterr().err.splitlines()[-1]


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total_steps=2, every=1, quiet=True) as progress:
        progress.say("plan")
        progress.update(step(1))
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_live_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(total_steps=20) as progress:
        progress.say("plan [FlowMoE] chosen")
        progress.update(step(4))
        print("the result")
    shown = terminal.getvalue()
    assert "plan [FlowMoE] chosen" in shown
    assert "4/20" in shown
    assert "network hidden 93 %  eta 0:00:08" in shown
    assert capsys.readouterr().out == "the result\n"


@pytest.mark.parametrize("lost", ["pipe", "disk"])
def test_a_run_goes_on_where_nothing_more_can_be_shown(lost: str) -> None:
    """A pipe without a reader; a device that is always full, for a log file on a full disk."""
    process = os.fork()
    if process == 0:
        with suppress(BaseException):
            opened = os.open("/dev/full", os.O_WRONLY)
            if lost == "pipe":
                reader, opened = os.pipe()
                os.close(reader)
            os.dup2(opened, 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            with Progress(total_steps=3, every=1) as progress:
                progress.say("Plan 1")
                progress.update(step(1))
            print("what others say is no error either", file=sys.stderr, flush=True)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(process, 0)[1] == 0


# ---- where lines go ----------------------------------------------------------------------------------------


logger = logging.getLogger("penstock.somewhere")
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) penstock\.somewhere: (.*)")


@pytest.fixture
def shown() -> Iterator[list[str]]:
    """What the terminal shows; nothing shows anything afterwards."""
    before, found = list(logs.PACKAGE.handlers), list[str]()
    show(found.append)
    yield found
    logs.PACKAGE.handlers[:] = before


def lines(path: Path) -> list[tuple[str, str]]:
    found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    return [(each[1], each[2]) for each in found if each]


def test_the_terminal_shows_decisions_and_the_file_has_everything_with_times(
    tmp_path: Path, shown: list[str]
) -> None:
    with RankLog(3) as log:
        logger.info("before there is a folder")
        log.open(tmp_path)
        logger.debug("a measurement of 100 %")
        logger.warning("another cluster")
        logger.error("the end")
    logger.info("later")
    assert shown == ["before there is a folder", "warning: another cluster", "later"]
    assert lines(tmp_path / "logs" / "rank-00003.log") == [
        ("INFO", "before there is a folder"),
        ("DEBUG", "a measurement of 100 %"),
        ("WARNING", "another cluster"),
        ("ERROR", "the end"),
    ]


def test_only_the_last_to_show_shows_but_all_that_are_told_hear(shown: list[str]) -> None:
    second, told = list[str](), list[str]()
    with telling(told.append):
        logger.debug("a round")
        show(second.append)
        logger.info("a plan")
    logger.info("a step")
    assert (shown, second, told) == ([], ["a plan", "a step"], ["a round", "a plan"])


@pytest.mark.usefixtures("shown")
def test_a_run_that_goes_on_adds_to_its_file(tmp_path: Path) -> None:
    for number in range(2):
        with RankLog(0) as log:
            log.open(tmp_path)
            logger.info(f"start {number}")
    assert [line for _, line in lines(tmp_path / "logs" / "rank-00000.log")] == ["start 0", "start 1"]


@pytest.mark.usefixtures("shown")
def test_a_file_grows_to_its_limit_and_the_one_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_BYTES", 1000)
    with RankLog(0) as log:
        log.open(tmp_path)
        for number in range(100):
            logger.info(f"line {number}")
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["rank-00000.log", "rank-00000.log.1"]
    kept = [line for name in reversed(files) for _, line in lines(tmp_path / "logs" / name)]
    assert kept == [f"line {number}" for number in range(100 - len(kept), 100)]
    assert all((tmp_path / "logs" / name).stat().st_size <= 1000 for name in files)


@pytest.mark.usefixtures("shown")
def test_a_file_that_is_taken_away_is_begun_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RankLog(0) as log:
        log.open(folder)
        logger.info("first")
        folder.rename(tmp_path / "elsewhere")
        logger.info("second")
    assert [line for _, line in lines(folder / "logs" / "rank-00000.log")] == ["second"]


def test_a_file_that_cannot_be_written_is_named_once_and_ends_nothing(
    tmp_path: Path, shown: list[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "mine").write_text("as it was")
    (tmp_path / "logs" / "rank-00000.log").symlink_to(tmp_path / "mine")
    with RankLog(0) as log:
        log.open(tmp_path)
        for number in range(3):
            logger.info(f"line {number}")
    warnings = [line for line in shown if line.startswith("warning: ")]
    assert len(warnings) == 1 and str(tmp_path / "logs" / "rank-00000.log") in warnings[0]
    assert [line for line in shown if line not in warnings] == ["line 0", "line 1", "line 2"]
    assert (tmp_path / "mine").read_text() == "as it was"


def test_a_full_disk_ends_the_file_and_nothing_else(tmp_path: Path, shown: list[str]) -> None:
    """A limit on the size of files stands for the disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with RankLog(0) as log:
            log.open(tmp_path)
            logger.info("first")
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, usual[1]))
            logger.info("x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert [line[:9] for line in shown] == ["first", "x" * 9, "warning: "]
