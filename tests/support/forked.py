"""The command on ranks that are forked off a process that has loaded torch: a run costs what it does."""

# ruff: noqa: TID251 - ranks have one deadline, after which a run hangs

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.patience import HANG_S
from tests.support.ranks import forking
from tests.support.runs import clean_environ
from tests.support.searching import short_search


def run_forked(
    processes: int, *arguments: str | Path, program: str = "penstock", timeout_s: float = HANG_S
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end on ranks that find in their environment what torchrun leaves there.

    program: a module, as `python -m` takes it, or a file. All that it does, but for starting ranks (for that
    see `tests.support.runs.run`), and with short searches for orders. The exit code is the largest; output
    and errors are those of all ranks.
    """
    from torch._C._distributed_c10d import TCPStore

    words = list(map(str, arguments))
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        ranks: list[BaseProcess] = []
        for rank in range(processes):
            environ = clean_environ() | _environ(rank, processes, store.port)
            rank_of = forking().Process(
                target=_be_rank, args=(program, words, environ, out, errors), daemon=True
            )
            rank_of.start()
            ranks.append(rank_of)
        codes = _ends(ranks, time.monotonic() + timeout_s)
        return subprocess.CompletedProcess(words, max(codes), out.read_text(), errors.read_text())


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


def _be_rank(program: str, words: list[str], environ: dict[str, str], out: Path, errors: Path) -> None:
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
