"""What a run shows on the screen."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from contextlib import suppress
from dataclasses import replace

import pytest

from penstock.train.progress import Progress, describe
from tests.support.metrics import step

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_step_in_words() -> None:
    words = describe(step(3, eval_loss=2.75), 72.4, 100)
    assert words == "loss 2.500  held-out loss 2.750  12,346 tokens/s  network hidden 93 %  eta 0:01:12"


def test_a_step_in_words_stays_within_its_width() -> None:
    words = describe(step(3, eval_loss=2.75), 72.4, 70)
    assert words == "loss 2.500  held-out loss 2.750  12,346 tokens/s  eta 0:01:12"


def test_one_process_has_no_network() -> None:
    words = describe(replace(step(3), communication_s=0.0, exposed_communication_s=0.0), 72.4, 100)
    assert words == "loss 2.500  12,346 tokens/s  eta 0:01:12"


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


def test_without_a_number_of_steps_only_the_last_one_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total_steps=11, every=0) as progress:
        for number in range(1, 12):
            progress.update(step(number))
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == ["step 11/11"]


def test_outside_a_terminal_every_few_steps_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total_steps=11, every=5) as progress:
        progress.say("plan [FlowMoE] chosen")
        for number in range(1, 12):
            progress.update(step(number, eval_loss=2.75 if number == 7 else None))
    shown = capsys.readouterr()
    assert shown.out == ""
    heads = [line.split("  ")[0] for line in shown.err.splitlines()]
    assert heads == ["plan [FlowMoE] chosen", "step 5/11", "step 7/11", "step 10/11", "step 11/11"]
    assert "eta 0:00:03" in shown.err  # six steps of half a second


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
