"""Something changes in the middle of training: does the system notice, plan anew, and end where it should?

A run whose network or one of whose ranks gets slower behind a step, beside a run that meets the slow state
from its first step. Real ranks, real traffic, real training; only the cluster is emulated.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import numpy as np

from benchmarks.command import parser_of, run_alone
from benchmarks.launching import ProgramFailedError, launch_quietly
from benchmarks.progress import in_rows
from penstock.lab.emulate import Cluster, EmulateConfig

Change = Literal["rate", "slow_rank"]
POLL_S: Final = 0.05
STOPPED_S, RUNNING_S = 0.004, 0.006
"""A rank that is held for 4 ms and runs for 6 ms, again and again, is about 1.7 times as slow."""

TOLD: Final = ("Plan ", "step time has changed", "changing to plan", "keeping plan", "show no change")
"""What lines about plans and changes have in common."""

SLOW_RANK: Final = 1

SETTINGS: Final = (
    "model.num_layers=4",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.seq_len=256",
    "moe.num_experts=2",
    "moe.top_k=2",
    "moe.moe_ffn_hidden_size=1024",
    "moe.expert=gelu",
    "moe.capacity_factor=1.25",
    "data.batch_per_device=4",
    "optimizer.lr=3e-4",  # a large one lets rounding grow within a few steps, and losses are compared
    "train.eval_every=0",
    "train.checkpoint_every=0",
    "output.tensorboard=false",
    "plan.mode=auto",
)
"""The benchmark's model, trained for real."""


@dataclass(frozen=True, kw_only=True)
class DriftCase:
    """What changes behind step `change_after` of `steps`.

    Attributes:
        rate_before, rate_after: The rate between nodes, in bit/s.
        planned_steps: Steps of the run that meets the slow state from its start.
        settled: How many of a run's last steps the median is taken of.
    """

    change: Change
    rate_before: float
    rate_after: float
    change_after: int
    steps: int
    planned_steps: int
    settled: int = 15


CASES: Final = (
    DriftCase(change="rate", rate_before=1e9, rate_after=250e6, change_after=25, steps=60, planned_steps=40),
    DriftCase(
        change="slow_rank", rate_before=1e9, rate_after=1e9, change_after=25, steps=60, planned_steps=40
    ),
)


@dataclass(frozen=True, kw_only=True)
class DriftResult:
    """What a change did to a run; seconds are medians of an iteration.

    Attributes:
        before_s: Before the change.
        hit_s: From the change to a new plan.
        settled_s: At the end of the run.
        planned_s: At the end of the run that knew the slow state from the start.
        noticed_after: Steps from the change to the first other plan; None if there was none.
        loss_distance: Largest relative difference of the two runs' losses, of all steps that both have.
        end_loss_distance: Relative difference of the means of their losses over the last of these steps.
        said: What the drifting run said about its plans.
    """

    change: Change
    rate_before: float
    rate_after: float
    before_s: float
    hit_s: float
    settled_s: float
    planned_s: float
    noticed_after: int | None
    loss_distance: float
    end_loss_distance: float
    said: tuple[str, ...]

    @property
    def distance(self) -> float:
        """How much longer than planned from the start; negative: shorter."""
        return self.settled_s / self.planned_s - 1


@dataclass(frozen=True, kw_only=True)
class DriftsResult:
    cases: tuple[DriftResult, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"drifts": [asdict(case) | {"distance": case.distance} for case in self.cases]}


def measure_drifts(cases: Sequence[DriftCase] = CASES) -> DriftsResult:
    """Measure all cases, one after the other; minutes. Linux, root.

    Raises:
        KeyboardInterrupt: If a signal ends a run.
    """
    rows = [(_named(case), partial(_measure, case)) for case in cases]
    return DriftsResult(cases=in_rows(rows, lambda found: DriftsResult(cases=found)))


def _measure(case: DriftCase) -> DriftResult:
    with tempfile.TemporaryDirectory(prefix="penstock-drift-") as folder:
        drifting = _train(case, Path(folder, "drifting"), from_start=False)
        planned = _train(case, Path(folder, "planned"), from_start=True)
    seconds = [step["iteration_s"] for step in drifting.steps]
    behind = seconds[case.change_after + 1 :]
    noticed = drifting.noticed_after(case.change_after)
    hit = behind[: max(1, (noticed or len(behind)) - 1)]
    losses = [
        np.array([step["loss"] for step in run.steps[: case.planned_steps]]) for run in (drifting, planned)
    ]
    ends = [float(loss[-case.settled :].mean()) for loss in losses]
    return DriftResult(
        change=case.change,
        rate_before=case.rate_before,
        rate_after=case.rate_after,
        before_s=median(seconds[5 : case.change_after]),
        hit_s=median(hit),
        settled_s=median(seconds[-case.settled :]),
        planned_s=median(step["iteration_s"] for step in planned.steps[-case.settled :]),
        noticed_after=noticed,
        loss_distance=float(np.abs(losses[0] / losses[1] - 1).max()),
        end_loss_distance=abs(ends[0] / ends[1] - 1),
        said=drifting.said,
    )


@dataclass(frozen=True, kw_only=True)
class _Training:
    """Metrics of every step, and what was said about plans."""

    steps: list[dict[str, Any]]
    said: tuple[str, ...]

    def noticed_after(self, change_after: int) -> int | None:
        """Return steps between the change and the first other plan; None if there was none."""
        plans = [step["plan"] for step in self.steps]
        changed = (n for n in range(change_after, len(plans)) if plans[n] != plans[change_after - 1])
        first = next(changed, None)
        return None if first is None else first - change_after


def _train(case: DriftCase, folder: Path, *, from_start: bool) -> _Training:
    rate = case.rate_after if from_start else case.rate_before
    output = folder / "run"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("", encoding="utf-8")
    emulate = EmulateConfig(nodes=2, devices=1, inter_rate_bit_per_s=rate)
    with Cluster(emulate) as cluster, _watching(case, cluster, output / "metrics.jsonl", from_start):
        steps = case.planned_steps if from_start else case.steps
        settings = (*SETTINGS, f"train.steps={steps}", f"output.dir={output}", "parallel.processes=2")
        command = [sys.executable, "-m", "penstock", "train", str(folder / "config.toml"), *settings]
        # It fails before what watches it complains that nothing was changed.
        text = launch_quietly(command, emulate.shape.ranks, cluster, folder / "said.txt")
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    whole = text.replace("\n    ", " ").splitlines()  # a wrapped line is one line again
    about = tuple(line.strip() for line in whole if any(word in line for word in TOLD))
    return _Training(steps=[json.loads(line) for line in lines], said=about)


@contextmanager
def _watching(case: DriftCase, cluster: Cluster, metrics: Path, from_start: bool) -> Iterator[None]:
    """Make the change when the step is reached, at once if from_start; until the run has ended."""
    ended = threading.Event()

    def reached() -> bool:
        return from_start or (metrics.exists() and _count_lines(metrics) >= case.change_after)

    with ThreadPoolExecutor(1, thread_name_prefix="penstock-change") as pool:
        changing = pool.submit(_change, case, cluster, reached, ended)
        try:
            yield
        finally:
            ended.set()
        changing.result()


def _change(case: DriftCase, cluster: Cluster, reached: Callable[[], bool], ended: threading.Event) -> None:
    """Raises ProgramFailedError if the run has ended before the change: there would be nothing to report."""
    while not reached():
        if ended.wait(POLL_S):
            raise ProgramFailedError(f"the run ended before step {case.change_after}, so nothing was changed")
    if case.change == "rate":
        cluster.set_rate(inter=case.rate_after)
        return
    while not ended.is_set():
        pid = _pid_of_rank(SLOW_RANK)
        if pid is None:  # not started yet, or ended
            ended.wait(POLL_S)
        else:
            _hold(pid, ended)


def _hold(pid: int, ended: threading.Event) -> None:
    """Slow a process down until it or the run has ended; it never stays held."""
    try:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(RUNNING_S)
    except ProcessLookupError:
        return


def _pid_of_rank(rank: int) -> int | None:
    """Return the child of this process that is this rank."""
    for pid in _children():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if f"RANK={rank}".encode() in environ:
            return pid
    return None


def _children() -> Iterator[int]:
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        try:
            yield from map(int, path.read_text(encoding="utf-8").split())
        except OSError:  # a thread that has ended meanwhile
            continue


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def render_drifts(result: DriftsResult) -> str:
    """Return a Markdown table, and below what each run said."""
    head = (
        "| change | before ms | until noticed ms | steps until a new plan | settled ms | planned ms | off |"
    )
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|"]
    for case in result.cases:
        cells = (1e3 * x for x in (case.before_s, case.hit_s))
        before, hit = (f"{cell:.0f}" for cell in cells)
        ends = f"{1e3 * case.settled_s:.0f} | {1e3 * case.planned_s:.0f} | {100 * case.distance:+.1f} %"
        lines.append(f"| {_named(case)} | {before} | {hit} | {case.noticed_after} | {ends} |")
    furthest = max(case.loss_distance for case in result.cases)
    at_end = max(case.end_loss_distance for case in result.cases)
    about = (
        f"Losses of the two runs of a row, whose learning rates decay over other numbers of steps, differ by "
        f"{furthest:.1e} at most, their means over the last steps by {at_end:.1e} (relative)."
    )
    lines += ["", about, ""]
    return "\n".join([*lines, *(f"    {line}" for case in result.cases for line in case.said)])


def _named(case: DriftCase | DriftResult) -> str:
    if case.change == "rate":
        return f"{case.rate_before / 1e6:.0f} to {case.rate_after / 1e6:.0f} Mbit/s"
    return f"rank {SLOW_RANK} held 4 of every 10 ms"


if __name__ == "__main__":
    about = "Trains while the network or a rank gets slower. Linux, root, a quarter of an hour."
    run_alone(parser_of("drift", about), lambda _: measure_drifts(), render_drifts)
