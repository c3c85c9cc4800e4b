"""Runs the stages as one rank's parent: a child for each, with a time limit, and one report of all ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Final

import torch

import penstock
from penstock.config import from_dict
from penstock.cost import ClusterFile
from penstock.cost.cluster_file import DOCTOR
from penstock.device import best_kind
from penstock.doctor.gpu.child import FOUND, MODULE, Given
from penstock.doctor.gpu.outcome import SEVERITY, Outcome, Verdict, names_here, without_names
from penstock.doctor.gpu.stages import STAGES, Stage
from penstock.doctor.meeting import Meeting, MeetingError
from penstock.stops import die_with_parent
from penstock.train.config import RunConfig
from penstock.words import counted, folded

SPARE_S: Final = 15.0
"""How long ranks may differ in starting and ending a child."""

KILL_S: Final = 10.0
"""How long a child may take to end once it is killed."""

LAST_WORDS: Final = 300
DUMPED: Final = "(most recent call first)"
"""What stands above every thread of a dump, of which the first thread of the process is the last."""

FRAME: Final = re.compile(r'File ".*?(penstock/[\w/]+\.py)", line (\d+) in (\w+)')


@dataclass(frozen=True, kw_only=True)
class Result:
    """A stage on all ranks.

    Attributes:
        stage: The name of the stage.
        seconds: How long it took, on the first rank.
        outcome: What all ranks have found together.
    """

    stage: str
    seconds: float
    outcome: Outcome


class Crew:
    """The ranks that run the stages together, which have met; the first one judges, and tells the others."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting, self._ranks = meeting, range(meeting.size)
        meeting.leave("names", names_here())

    def collect(self, stage: Stage, mine: Outcome, until_s: float) -> Outcome:
        """Return what all ranks have found in a stage; the same on all of them.

        Raises:
            MeetingError: If the store, or the rank that judges, is gone.
        """
        self._meeting.leave(stage.name, asdict(mine))
        if self._meeting.rank == 0:
            heard = self._meeting.hear(stage.name, self._ranks, until_s)
            outcomes = {rank: from_dict(Outcome, plain, stage.name) for rank, plain in heard.items()}
            for rank in self._ranks:
                outcomes.setdefault(rank, Outcome.failed("its doctor did not answer"))
            outcome = stage.judge(outcomes)
            self._meeting.announce(f"{stage.name} on all", asdict(outcome))
            return outcome
        plain = self._meeting.announced(f"{stage.name} on all", until_s + SPARE_S)
        if plain is None:
            raise MeetingError(f"rank 0 did not say how stage {stage.name} ended")
        return from_dict(Outcome, plain, stage.name)

    def names(self) -> Mapping[str, str]:
        """Return the names of all hosts and users, and what stands for each."""
        everyone = self._meeting.hear("names", self._ranks, time.monotonic() + SPARE_S)
        return {name: stands for each in everyone.values() for name, stands in each.items()}


def run_stages(
    stages: Sequence[Stage], config: RunConfig, crew: Crew, timeout_s: float | None = None
) -> Iterator[Result]:
    """Run the stages in order; yield each result when it is there.

    Args:
        stages: What to run.
        config: The settings of the run for which curves and predictions are made.
        crew: The ranks that run the stages together.
        timeout_s: Seconds for every stage; None = its own limit.

    Raises:
        MeetingError: If the other ranks are lost.
    """
    ended: dict[str, Verdict] = {}
    cluster: ClusterFile | None = None
    kind = best_kind().type
    for stage in stages:
        start_s, limit_s = time.monotonic(), stage.timeout_s if timeout_s is None else timeout_s
        broken = [name for name in stage.needs if ended.get(name) in (Verdict.FAIL, Verdict.SKIPPED)]
        if broken:
            outcome = Outcome.skipped(f"it needs what {' and '.join(broken)} did not bring")
        else:
            given = Given(config=config, kind=kind, timeout_s=limit_s, cluster=cluster)
            own = run_child(partial(_command, stage.name), given)
            outcome = crew.collect(stage, own, start_s + limit_s + SPARE_S)
        ended[stage.name] = outcome.verdict
        measured: Any = outcome.figures.get("cluster")
        cluster = cluster if measured is None else from_dict(ClusterFile, measured, "cluster")
        yield Result(stage=stage.name, seconds=time.monotonic() - start_s, outcome=outcome)


def _command(stage: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", MODULE, stage, str(folder)]


def run_child(command: Callable[[Path], Sequence[str]], given: Given) -> Outcome:
    """Run a command to its end, or for as long as it may; return what it has found, or how it ended.

    Args:
        command: Returns the command for a folder, in which it finds what it is given and leaves what it has
            found.
        given: What the stage needs to know.
    """
    # Where ranks meet at their launcher's store, or at that of the first parent, no child makes one.
    environ = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with TemporaryDirectory(prefix="penstock-doctor-") as name:
        folder = Path(name)
        given.save(folder)
        with TemporaryFile() as log:
            child = subprocess.Popen(
                command(folder),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - a system call
            )
            start_s = time.monotonic()
            try:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(given.timeout_s)
            finally:
                lasted_s = time.monotonic() - start_s
                child.kill()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(KILL_S)
            log.seek(0)
            said = log.read().decode(errors="replace")
        if (folder / FOUND).exists():
            return from_dict(Outcome, json.loads((folder / FOUND).read_text(encoding="utf-8")), FOUND)
        return Outcome.failed(ending(child.returncode, said, lasted_s, given.timeout_s))


def ending(code: int | None, said: str, lasted_s: float, timeout_s: float) -> str:
    """Return in words how a child ended that has left nothing.

    Args:
        code: Its exit code; None if it has not ended though it was killed.
        said: What it has written.
        lasted_s: How long it ran, up to `timeout_s` or a little more.
    """
    if code == -signal.SIGKILL and lasted_s < timeout_s:
        return f"was killed after {lasted_s:.0f} s, perhaps as memory ran out"
    if code is None or code == -signal.SIGKILL:
        frame = FRAME.search(said.rpartition(DUMPED)[2])
        where = f"; it was in {frame[1]} line {frame[2]}, {frame[3]}" if frame else ""
        held = "; killed, it waits inside the kernel, as for a driver or a disk" if code is None else ""
        return f"did not end within {timeout_s:g} s{where}{held}"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    tail = " ".join(said.split())[-LAST_WORDS:]
    return f"{how}: {tail}" if tail else how


def cluster_of(results: Sequence[Result]) -> dict[str, Any] | None:
    """Return the cluster file that the stages have measured, as plain data."""
    return next((dict(r.outcome.figures["cluster"]) for r in results if "cluster" in r.outcome.figures), None)


def without_cluster(result: Result) -> Result:
    """Return the result without the cluster file, which has a place of its own."""
    figures = {name: value for name, value in result.outcome.figures.items() if name != "cluster"}
    return replace(result, outcome=replace(result.outcome, figures=figures))


VERSION: Final = 1
WIDTHS: Final = (8, 12)


def worst_of(results: Sequence[Result]) -> Verdict:
    """Return the verdict of all stages together."""
    return max((each.outcome.verdict for each in results), key=SEVERITY.index, default=Verdict.SKIPPED)


def report_of(results: Sequence[Result], names: Mapping[str, str], ranks: int, device: str) -> dict[str, Any]:
    """Return the JSON: a cluster file, if one was measured, with everything else under one more key.

    Args:
        names: Names of hosts and users, none of which is in the result, and what stands for each.
        ranks: How many ranks there are.
        device: The name of their devices.
    """
    doctor = {
        "version": VERSION,
        "verdict": worst_of(results),
        "device": device,
        "ranks": ranks,
        "date": datetime.now(UTC).date().isoformat(),
        "penstock": penstock.__version__,
        "torch": torch.__version__,
        "stages": [
            {"stage": result.stage, "seconds": round(result.seconds, 3), **asdict(result.outcome)}
            for result in map(without_cluster, results)
        ],
    }
    plain: dict[str, Any] = without_names({**(cluster_of(results) or {}), DOCTOR: doctor}, names)
    return plain


def result_text(stage: Mapping[str, Any], width: int) -> str:
    """Return the lines of one stage of a report."""
    verdict, name = stage["verdict"].ljust(WIDTHS[0]), stage["stage"].ljust(WIDTHS[1])
    lines = [f"{verdict}{name}{stage['seconds']:6.1f} s  {STAGES[stage['stage']].title}"]
    indent = " " * WIDTHS[0]
    lines += [f"{indent}{line}" for line in stage["lines"]]
    lines += [f"{indent}-> {stage['reason']}"] if stage["reason"] else []
    return folded("\n".join(lines), width)


def last_line(report: Mapping[str, Any]) -> str:
    """Return what all stages say together."""
    doctor = report[DOCTOR]
    verdicts = [stage["verdict"] for stage in doctor["stages"]]
    count = ", ".join(f"{verdicts.count(each)} {each}" for each in Verdict if each in verdicts)
    on = f"{counted(doctor['ranks'], 'rank')} on {doctor['device']}"
    return f"{doctor['verdict']}: {on}: {count}"
