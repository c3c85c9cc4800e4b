"""Real runs of the command for tests: a tiny configuration on a text of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from penstock.cli import main
from tests.support.patience import HANG_S, wait_for

TINY = """
[model]
num_layers = 2
hidden_size = 16
num_heads = 2
seq_len = 16

[moe]
num_experts = 4
moe_ffn_hidden_size = 24

[parallel]
processes = 2
timeout_s = 20

[data]
path = "{text}"
batch_per_device = 4
held_out_fraction = 0.1

[optimizer]
warmup_steps = 3

[train]
steps = 20
eval_every = 0
checkpoint_every = 0
eval_batches = 1

[output]
dir = "{folder}/run"
tensorboard = false
loads = false
"""


def write_config(folder: Path) -> Path:
    """A configuration and the text it trains on, both in `folder`."""
    text = folder / "text.txt"
    lines = (f"line {i}: {i * i} is the square of {i}, {i * i * i} its cube.\n" for i in range(900))
    text.write_text("".join(lines))
    path = folder / "tiny.toml"
    path.write_text(TINY.format(text=text, folder=folder))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "penstock", *map(str, arguments)]


def clean_environ() -> dict[str, str]:
    """Our environment without anything that a launcher sets."""
    started = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "TORCHELASTIC", "PENSTOCK")
    return {key: value for key, value in os.environ.items() if not key.startswith(started)}


def run(*arguments: str | Path, timeout_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
    """Run `penstock` to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=clean_environ(),
        check=False,
    )


def without_reader(words: tuple[str | Path, ...], *, buffered: bool = False) -> tuple[int, bytes]:
    """The exit code of a command whose output nobody reads, and what it says of that."""
    reader, writer = os.pipe()
    os.close(reader)
    environ = clean_environ()
    if buffered:  # then Python itself writes once more when it ends
        environ.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(command(*words), stdout=writer, stderr=subprocess.PIPE, env=environ, check=False)
    os.close(writer)
    return done.returncode, done.stderr


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What `penstock` says as it refuses, before it starts any rank; in this process, which has torch."""
    words = list(map(str, arguments))
    capsys.readouterr()  # what an earlier command said
    with pytest.MonkeyPatch.context() as environ:
        for name in os.environ.keys() - clean_environ().keys():
            environ.delenv(name)
        code = main(words)
    found = capsys.readouterr()
    check_refusal(code, found.out, found.err)
    return found.err


def check_refusal(code: int, out: str, error: str) -> None:
    """Bad usage, said once and not by every rank."""
    assert code == 2, error
    assert out == "" and "Traceback" not in error
    assert error.count("penstock: ") == 1, error


def start(*arguments: str | Path, stderr: Path, stdout: Path | None = None) -> subprocess.Popen[bytes]:
    """Start `penstock` in its own process group, as a shell would; what remains of it ends with the test."""
    return start_command(command(*arguments), stderr=stderr, stdout=stdout)


def start_command(
    argv: Sequence[str], *, stderr: Path, stdout: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start any command so. stdout: a file; None = nowhere."""
    with stderr.open("wb") as errors, Path(stdout or os.devnull).open("wb") as out:
        process = subprocess.Popen(
            argv,
            stdout=out,
            stderr=errors,
            env=clean_environ(),
            start_new_session=True,
        )
    STARTED.append(process)
    return process


class Running(Protocol):
    """A process, as far as tests ask it something: `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | Any: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


STARTED: list[Running] = []


def end_started() -> None:
    """Kill what a test has started and, as it failed, not ended."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step, from the metrics file."""
    return {entry["step"]: entry["loss"] for entry in metrics_of(folder)}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of the metrics file so far, as they are."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(_parse, lines) if entry]


def _parse(line: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:  # the line that is being written right now
        return {}
    return found


def wait_until(condition: Callable[[], bool], process: Running) -> None:
    """Poll until the condition holds; fails if the process ends first."""

    def holds() -> bool:
        if condition():
            return True
        assert process.poll() is None, f"the run ended early with code {process.returncode}"
        return False

    wait_for(holds, "what the run was to reach")
