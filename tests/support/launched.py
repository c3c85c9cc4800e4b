"""The command and its launcher on ranks that are forked, so that torch is loaded already.

Ranks are children of their launcher as they always are: signals, stops and deaths are real. Only `exec` is
left out; a run in tests/cli/test_train.py and those in tests/lab/emulate start Python anew for every rank.
"""

from __future__ import annotations

import os
import pickle
import runpy
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from itertools import takewhile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from penstock.lab.emulate import Cluster, open_cluster
from penstock.lab.emulate.system import enter
from penstock.stops import die_with_parent
from penstock.train import launcher
from penstock.train.launcher import LaunchOutcome
from tests.support.patience import HANG_S
from tests.support.ranks import forking
from tests.support.runs import STARTED, clean_environ
from tests.support.searching import short_search

POPEN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler.Popen"
"""What torch's agent starts processes with."""

CLUSTER = "TESTS_CLUSTER"
"""The emulated cluster into which a rank goes; one that starts Python anew goes there by `ip netns exec`."""


class ForkedRank:
    """In place of `subprocess.Popen`: a child that goes on as `python -m MODULE ...`, or `env`, would."""

    returncode: int | None

    def __init__(self, args: Sequence[str], *, env: dict[str, str], **more: Any) -> None:
        assert more["start_new_session"], args
        own = list(takewhile(lambda word: "=" in word, args[1:])) if args[0] == "env" else []
        module, *words = args[args.index("-m") + 1 :]
        self.pid, self.returncode = os.fork(), None
        if self.pid == 0:
            _be_rank(module, words, {**env, **dict(each.split("=", 1) for each in own)})

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        del timeout
        return self._reap(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _be_rank(module: str, words: list[str], environ: dict[str, str]) -> None:
    """Run the module and end this process."""
    code = 1
    try:
        os.setsid()
        if cluster := environ.pop(CLUSTER, ""):
            place = open_cluster(cluster)
            environ |= place.environ(rank := int(environ["RANK"]))
            enter(place.namespaces[rank])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The command asks for this by itself, which is what its tests show.
        if module != "penstock" and (ask := die_with_parent(int(environ["PENSTOCK_LAUNCHED"]))):
            ask()
        _run_module(module, words, environ)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_module(module: str, words: Sequence[str], environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *words]
    with short_search():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def alone(stderr: Path, stdout: Path | None = None) -> None:
    """As a shell starts a program: in a group of its own; errors go to a file, output to one or nowhere.

    Unlike there it ends with the tests, also when they are killed.
    """
    os.setsid()
    if ask := die_with_parent(os.getppid()):
        ask()
    nowhere = os.open(os.devnull, os.O_RDWR)
    errors, out = (
        os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in (stderr, stdout)
    )
    for opened, descriptor in ((nowhere, 0), (out, 1), (errors, 2)):
        os.dup2(opened, descriptor)


class Started:
    """A launcher at work, to be asked as `subprocess.Popen` is."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it did not end in time"
        return self._process.exitcode


def started(work: Callable[..., None], *arguments: Any) -> Started:
    """Call `work` in a process that has torch; what remains of it ends with the test."""
    process = forking().Process(target=work, args=arguments, daemon=True)
    process.start()
    STARTED.append(found := Started(process))
    return found


def start_launcher(
    *arguments: str | Path,
    stderr: Path,
    stdout: Path | None = None,
    meddle: Callable[[], None] | None = None,
    program: str = "penstock",
) -> Started:
    """Start `penstock` as `tests.support.runs.start` does; what remains of it ends with the test.

    meddle: called in the launcher's process, before anything else. program: a module in place of `penstock`.
    """
    words = list(map(str, arguments))
    return started(_be_command, program, words, clean_environ(), stderr, stdout, meddle)


def start_torchrun(
    cluster: Cluster, node: int, *arguments: str | Path, stderr: Path, stdout: Path
) -> Started:
    """Start `torchrun` on a machine of an emulated cluster; what remains of it ends with the test."""
    words, first = list(map(str, arguments)), node * cluster.config.devices
    environ = clean_environ() | cluster.environ(first)
    return started(_be_torchrun, cluster.namespaces[first], words, environ, stderr, stdout)


def _be_torchrun(
    namespace: str, words: list[str], environ: dict[str, str], stderr: Path, stdout: Path
) -> None:
    alone(stderr, stdout)
    enter(namespace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(POPEN, ForkedRank)
        _run_module("torch.distributed.run", words, environ)


def _be_command(
    program: str,
    words: list[str],
    environ: dict[str, str],
    stderr: Path,
    stdout: Path | None,
    meddle: Callable[[], None] | None,
) -> None:
    alone(stderr, stdout)
    if meddle is not None:
        meddle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(POPEN, ForkedRank)
        patch.setattr(Cluster, "wrapper", lambda cluster: [f"{CLUSTER}={cluster.name}"])
        _run_module(program, words, environ)


def launch_forked(
    command: Sequence[str], processes: int, *, grace_s: float, environ: dict[str, str]
) -> Callable[[], tuple[LaunchOutcome, str]]:
    """Begin what `penstock.train.launcher.launch` does.

    Returns: waits for the end; what it returns, and what the ranks have said on their standard error. Several
    may be waited for one after the other, and not by threads: multiprocessing reads each exit code once.
    """
    folder = Path(tempfile.mkdtemp())
    stderr, found = folder / "stderr", folder / "outcome"
    process = started(_be_launcher, list(command), processes, grace_s, environ, stderr, found)

    def ended() -> tuple[LaunchOutcome, str]:
        code, said = process.wait(timeout=HANG_S), stderr.read_text()
        assert code == 0, said
        outcome: LaunchOutcome = pickle.loads(found.read_bytes())
        shutil.rmtree(folder)
        return outcome, said

    return ended


def _be_launcher(
    command: list[str], processes: int, grace_s: float, environ: dict[str, str], stderr: Path, found: Path
) -> None:
    alone(stderr)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(POPEN, ForkedRank)
        os.environ.clear()
        os.environ.update(environ)
        outcome = launcher.launch(command, processes, grace_s=grace_s)
    found.write_bytes(pickle.dumps(outcome))


def pid_of_rank(parent: int, rank: int) -> int:
    """The child process of a launcher that is `rank`: it starts them one after the other."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[rank])
