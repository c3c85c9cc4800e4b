"""A process that is asked to stop: while it loads modules, works, has finished, and hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.cli.run import NO_RESULT, NOT_BEGUN
from penstock.stops import NOT_YET
from tests.support.patience import HANG_S, OWN_TIME
from tests.support.runs import clean_environ

SAID = f"penstock: {NOT_YET}\n"
SCRIPT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
MODULE, _, FUNCTION = SCRIPT["penstock"].partition(":")
AS_MODULE = 'import runpy; runpy.run_module("penstock", run_name="__main__", alter_sys=True)'
AS_SCRIPT = f"from {MODULE} import {FUNCTION}; sys.exit({FUNCTION}())"
LOADING = """
import signal, sys

class Asked:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            signal.raise_signal(signal.{number})

sys.meta_path.insert(0, Asked())
sys.argv = ["penstock", *{words}]
{start}
"""


def ran(program: str, **environ: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a program of its own."""
    words = [sys.executable, "-c", program]
    own = {**clean_environ(), **environ}
    done = subprocess.run(words, capture_output=True, text=True, env=own, check=False, timeout=HANG_S)
    return done.returncode, done.stdout, done.stderr


# ---- while modules are loaded ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.every_value
@pytest.mark.parametrize("start", [AS_MODULE, AS_SCRIPT], ids=["module", "script"])
@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("penstock.cli", ["list"], NOT_YET),
        ("numpy", ["plan"], NOT_YET),
        ("torch", ["train", "tiny"], NOT_BEGUN),
        ("torch", ["profile"], NO_RESULT),
    ],
    ids=["at the start", "plan", "train", "profile"],
)
def test_a_stop_while_modules_are_loaded(
    start: str, number: str, code: int, module: str, words: list[str], said: str
) -> None:
    program = LOADING.format(module=module, number=number, words=words, start=start)
    assert ran(program) == (code, "", f"penstock: {said}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("RANK", "0", SAID), ("RANK", "1", ""), ("SLURM_PROCID", "0", SAID), ("SLURM_PROCID", "3", "")],
)
def test_of_several_ranks_one_speaks(name: str, value: str, said: str) -> None:
    program = LOADING.format(module="penstock.cli", number="SIGINT", words=["list"], start=AS_MODULE)
    assert ran(program, **{name: value}) == (130, "", said)


@pytest.mark.slow
def test_a_signal_that_was_held_back_ends_the_process_when_it_can_hear() -> None:
    held = "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [2]); os.kill(os.getpid(), 2)"
    assert ran(f"{held}\nimport sys; sys.argv = ['penstock', 'list']; {AS_MODULE}") == (130, "", SAID)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGINT", "SIGHUP"])
def test_an_ignored_signal_stays_ignored(number: str) -> None:
    """As in the background of a script, and under nohup."""
    ignored = f"import signal; signal.signal(signal.{number}, signal.SIG_IGN)"
    program = LOADING.format(module="penstock.cli", number=number, words=["--version"], start=AS_MODULE)
    code, out, error = ran(f"{ignored}\n{program}")
    assert (code, error) == (0, "") and out.startswith("penstock ")


# ---- while it works, and afterwards ------------------------------------------------------------------------

WORKS = """
import os, signal, sys, threading, time
from penstock import stops
from penstock.cli.run import exit_code
from penstock.stops import STOPS

stops.GRACE_S, stops.SAME_REQUEST_S, stops.SAY_S = {grace_s}, {same_s}, 60.0
ask = lambda: signal.raise_signal(signal.SIGINT)
from_outside = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))

def hang():
    '''Where Python's own handlers do not run.'''
    import ctypes
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)

def command():
{body}

{before}
STOPS.hear()
sys.exit(exit_code(command, "stopped; half is done"))
"""
HALF = "penstock: stopped; half is done\n"


def worked(body: str, grace_s: float = 60.0, same_s: float = 60.0, before: str = "") -> tuple[int, str, str]:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return ran(WORKS.format(body=lines, grace_s=grace_s, same_s=same_s, before=before))


@pytest.mark.slow
def test_a_stop_interrupts_the_work_once_and_says_what_is_left() -> None:
    body = "try:\n    ask()\nfinally:\n    ask()  # the same Ctrl-C again\n    print('cleared up')"
    assert worked(body) == (130, "cleared up\n", HALF)


@pytest.mark.slow
def test_what_is_true_is_said_when_it_is_said() -> None:
    body = "done = []\nSTOPS.says(lambda: f'stopped; {len(done)} are done')\ndone.append(1)\nask()"
    assert worked(body) == (130, "", "penstock: stopped; 1 are done\n")


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "signal.signal(signal.SIGHUP, signal.SIG_IGN)"])
def test_what_hangs_is_ended(before: str) -> None:
    """Also under nohup, where one of the signals is ignored."""
    found = worked("from_outside.start()\nhang()", grace_s=0.2, before=before)
    assert found == (143, "", HALF)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_every_request_to_stop_is_said_and_has_its_code(number: str) -> None:
    assert worked(f"signal.raise_signal(signal.{number})") == (128 + signal.Signals[number], "", HALF)


@pytest.mark.slow
def test_a_stop_after_the_work_changes_nothing() -> None:
    assert worked("STOPS.finish(7)\nask()\nprint('to the end')\nreturn 7") == (7, "to the end\n", "")


@pytest.mark.slow
def test_a_stop_after_the_command_changes_nothing() -> None:
    body = "import atexit\natexit.register(ask)\natexit.register(print, 'to the end')\nreturn 7"
    assert worked(body) == (7, "to the end\n", "")


@pytest.mark.slow
def test_a_stop_while_python_takes_itself_down_changes_nothing() -> None:
    late = "type('Late', (), {'__del__': lambda self, kill=os.kill, pid=os.getpid(): kill(pid, 15)})()"
    assert worked(f"global late\nlate = {late}\nreturn 7") == (7, "", "")


@pytest.mark.slow
def test_printing_is_not_cut_off_while_it_goes_on() -> None:
    """For three times as long as a process may stand still; by the clock of a thread that computes."""
    body = "STOPS.finish(7)\nask()\nwhile time.thread_time() < 0.6: pass\nprint('to the end')\nreturn 7"
    assert worked(body, grace_s=0.2, before=OWN_TIME) == (7, "to the end\n", "")


@pytest.mark.slow
def test_what_stands_still_after_the_work_is_ended_with_its_code() -> None:
    body = "STOPS.finish(None, 'stopped while printing')\nask()\ntime.sleep(600)"
    assert worked(body, grace_s=0.2) == (130, "", "penstock: stopped while printing\n")


@pytest.mark.slow
def test_another_signal_insists() -> None:
    body = "STOPS.finish(7)\nask()\nfrom_outside.start()\nwhile True: pass"
    assert worked(body, same_s=0.0) == (7, "", "")


@pytest.mark.slow
def test_who_handles_signals_for_a_while_is_left_alone() -> None:
    body = "signal.signal(2, lambda *_: None)\nask()\ntime.sleep(0.3)\nprint('to the end')\nreturn 0"
    assert worked(body, grace_s=0.05) == (0, "to the end\n", "")
