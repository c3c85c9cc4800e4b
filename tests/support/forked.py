"""The command on ranks that are forked off a process that has loaded torch: a run costs what it does."""

# ruff: noqa: TID251 - ranks have one deadline, after which a run hangs

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from penstock.stops import die_with_parent
from tests.support.patience import HANG_S
from tests.support.ranks import forking
from tests.support.runs import clean_environ
from tests.support.searching import short_search


def run_forked(
    processes: int,
    *arguments: str | Path,
    program: str = "penstock",
    timeout_s: float = HANG_S,
    loads: Sequence[str] = (),
    environs: Sequence[dict[str, str]] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end on ranks that find in their environment what torchrun leaves there.

    program: a module, as `python -m` takes it, or a file. All that it does, but for starting ranks (for that
    see `tests.support.runs.run`), and with short searches for orders. The exit code is the largest; output
    and errors are those of all ranks. loads: modules that take seconds to import, once for all ranks.
    environs: of the ranks, in place of torchrun's.
    """
    from torch._C._distributed_c10d import TCPStore

    words = list(map(str, arguments))
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        own = environs or [_environ(rank, processes, store.port) for rank in range(processes)]
        started: list[BaseProcess] = []
        if loads:
            given = (loads, program, words, [clean_environ() | each for each in own], out, errors)
            started = [forking().Process(target=_be_ranks, args=given)]
        else:
            for each in own:
                environ = clean_environ() | each
                given_one = (program, words, environ, out, errors)
                started.append(forking().Process(target=_be_rank, args=given_one, daemon=True))
        for process in started:
            process.start()
        codes = _ends(started, time.monotonic() + timeout_s)
        return subprocess.CompletedProcess(words, max(codes), out.read_text(), errors.read_text())


def run_text(program: str) -> subprocess.CompletedProcess[str]:
    """Run the text of a program to its end as `python -c` would, in a process that has loaded torch."""
    with tempfile.TemporaryDirectory() as folder:
        file, out, errors = (Path(folder) / name for name in ("program.py", "out", "errors"))
        file.write_text(program)
        no_words: list[str] = []
        given = (str(file), no_words, clean_environ(), out, errors)
        process = forking().Process(target=_be_rank, args=given, daemon=True)
        process.start()
        (code,) = _ends([process], time.monotonic() + HANG_S)
        return subprocess.CompletedProcess(program, code, out.read_text(), errors.read_text())


def _environ(rank: int, processes: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _be_ranks(
    loads: Sequence[str],
    program: str,
    words: list[str],
    environs: Sequence[dict[str, str]],
    out: Path,
    errors: Path,
) -> None:
    """Load the modules and go on as all ranks, of which none outlives this process."""
    os.environ.clear()
    os.environ.update(environs[0])
    torch.set_num_threads(1)  # threads of this process would be missing in those that are forked off it
    for name in loads:
        importlib.import_module(name)
    ranks: list[BaseProcess] = []
    for environ in environs:
        given_one = (program, words, environ, out, errors)
        ranks.append(multiprocessing.get_context("fork").Process(target=_be_rank, args=given_one))
        ranks[-1].start()
    for rank in ranks:
        rank.join()
    codes = [1 if rank.exitcode is None or rank.exitcode < 0 else rank.exitcode for rank in ranks]
    os._exit(max(codes))


def _be_rank(program: str, words: list[str], environ: dict[str, str], out: Path, errors: Path) -> None:
    """Go on as a rank, which ends with the process that has forked it, also when that is killed."""
    if ask := die_with_parent(os.getppid()):
        ask()
    for path, descriptor in ((out, 1), (errors, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [program, *words]
    with short_search():
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)


def _ends(ranks: list[BaseProcess], deadline_s: float) -> list[int]:
    """Exit codes; AssertionError if they take too long. None is left."""
    try:
        for rank in ranks:
            rank.join(deadline_s - time.monotonic())
        codes = [rank.exitcode for rank in ranks]
        assert None not in codes, "the run did not end"
        return [code for code in codes if code is not None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
