"""A list of benchmark runs, one after the other, and the documents that they become."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from penstock.bench.document import Section, write_document
from penstock.bench.machine import Machine
from penstock.bench.page import write_page
from penstock.bench.plot import draw
from penstock.bench.text import text_of
from penstock.bench.views import rate_text
from penstock.emulate.config import parse_rate

DOCUMENT: Final = Path("BENCHMARKS.md")
FOLDER: Final = Path("docs", "bench")
PAGE, RESULTS = FOLDER / "index.html", FOLDER / "results.json"
OVERVIEW: Final = {
    "rates": "Overlap efficiency by link rate",
    "prediction": "Predicted against measured iteration",
}
PATIENCE: Final = 5
"""A run is given up after this many times the seconds that it should take, and `SPARE_S` more."""

SPARE_S: Final = 60.0

GRACE_S: Final = 30.0
"""How long a run that was told to end may take to end its ranks and remove its cluster."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call of `penstock bench`.

    name: of its files: letters, digits, `-` and `_`. arguments: behind `penstock bench`. note: why it is
    here. seconds: roughly what it takes. drawn: whether figures show its cases.
    """

    name: str
    title: str
    arguments: tuple[str, ...]
    note: str
    seconds: float
    drawn: bool = True

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[\w-]+", self.name) and self.name not in OVERVIEW, self.name

    @property
    def command(self) -> str:
        """As a person types it."""
        return shlex.join(("penstock", "bench", *self.arguments))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run. Of result (its JSON) and failure (one line) exactly one is there."""

    run: Run
    took_s: float
    result: Mapping[str, Any] | None = None
    failure: str | None = None

    @property
    def compared(self) -> Mapping[str, Any] | None:
        """The result if it compares cases, with the run's title as label: what figures show."""
        if self.result is None or "cases" not in self.result or not self.run.drawn:
            return None
        return {**self.result, "label": self.run.title}


# ---- running -----------------------------------------------------------------------------------------------


def run_suite(runs: Sequence[Run], folder: Path, out: TextIO) -> int:
    """Run all, write all documents into `folder`; 0, or 1 if a run failed.

    out: where progress and errors go, a line at a time. A run that fails stops none of the others. Raises
    `OSError` if the folder cannot be written, before the first run.
    """
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    machine = Machine.here()
    outcomes = [run_one(run, f"[{number}/{len(runs)}]", out) for number, run in enumerate(runs, 1)]
    write_all(machine, outcomes, folder)
    failed = [outcome.run.title for outcome in outcomes if outcome.failure is not None]
    print(f"wrote {folder / DOCUMENT}, {folder / PAGE} and {folder / RESULTS}", file=out)
    if failed:
        print(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}", file=out)
    return 1 if failed else 0


def run_one(run: Run, place: str, out: TextIO) -> Outcome:
    """One run in a process of its own, with its progress on `out`."""
    print(f"{place} {run.title} (about {run.seconds:.0f} s) ...", end=" ", file=out, flush=True)
    start_s = time.monotonic()
    code, stdout, stderr = _execute(run)
    took_s = time.monotonic() - start_s
    failure = f"exit code {code}. {_last_line(stderr)}".strip()
    result = _parse(stdout) if code == 0 else None
    if code == 0 and result is None:
        failure = "it printed no JSON object"
    print(f"{took_s:.0f} s" if result else f"FAILED after {took_s:.0f} s", file=out, flush=True)
    if result is not None:
        return Outcome(run=run, took_s=took_s, result=result)
    print(f"{run.command}: {failure}\n{stderr.rstrip()}", file=out, flush=True)
    return Outcome(run=run, took_s=took_s, failure=failure)


def _execute(run: Run) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. A run that hangs is told to end, so that it can remove its cluster."""
    command = [sys.executable, "-m", "penstock", "bench", *run.arguments, "--json"]
    limit_s = PATIENCE * run.seconds + SPARE_S
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            stdout, stderr = _last_words(process)
            stderr += f"\ngiven up after {limit_s:.0f} s"
    return process.returncode, stdout, stderr


def _last_words(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _parse(stdout: str) -> Mapping[str, Any] | None:
    """The one JSON object on stdout; None if something else is there."""
    try:
        found = json.loads(stdout)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _last_line(stderr: str) -> str:
    """What a command says last is why it failed; folders are left out, since they are this machine's."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    return re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)+", "", said[-1]) if said else ""


# ---- writing -----------------------------------------------------------------------------------------------


def write_all(machine: Machine, outcomes: Sequence[Outcome], folder: Path) -> None:
    """BENCHMARKS.md, figures, page and results of these outcomes."""
    compared = {o.run.name: result for o in outcomes if (result := o.compared) is not None}
    pictures = draw(compared, folder / FOLDER)
    sections = [_section(outcome, pictures, folder) for outcome in outcomes]
    overview = [(title, _beside(pictures[n], folder)) for n, title in OVERVIEW.items() if n in pictures]
    subtitle = ", ".join(f"{name} {value}" for name, value in machine.lines())
    page = write_page(compared, subtitle=subtitle)
    (folder / PAGE).write_text(page, encoding="utf-8")
    for name in {*OVERVIEW, *(outcome.run.name for outcome in outcomes)} - pictures.keys():
        (folder / FOLDER / f"{name}.png").unlink(missing_ok=True)  # of an earlier suite, and no longer true
    plain = {"machine": machine.to_dict(), "runs": [_plain(outcome) for outcome in outcomes]}
    (folder / RESULTS).write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    text = write_document(machine, sections, overview, PAGE.as_posix())
    (folder / DOCUMENT).write_text(text, encoding="utf-8")


def _section(outcome: Outcome, pictures: Mapping[str, Path], folder: Path) -> Section:
    run = outcome.run
    return Section(
        title=run.title,
        command=run.command,
        note=run.note,
        table=None if outcome.result is None else text_of(outcome.result),
        failure=outcome.failure,
        picture=_beside(pictures[run.name], folder) if run.name in pictures else None,
    )


def _plain(outcome: Outcome) -> dict[str, Any]:
    run = outcome.run
    about = {"name": run.name, "title": run.title, "command": run.command, "took_s": round(outcome.took_s, 1)}
    if outcome.failure is not None:
        return about | {"failure": outcome.failure}
    return about | {"result": outcome.result}


def _beside(path: Path, folder: Path) -> str:
    """The path as the document in `folder` links it."""
    return path.relative_to(folder).as_posix()


# ---- the default list --------------------------------------------------------------------------------------

ALL: Final = ("--schedules", "sequential,moe_pipeline,flowmoe,penstock")
ENDS: Final = ("--schedules", "sequential,penstock")


def _cluster(shape: str, rate: str) -> tuple[str, ...]:
    return ("--emulate", shape, "--inter-rate", rate)


def _rates(rate: str, note: str, seconds: float) -> Run:
    """All schedules, each with the number of pieces that promises most, one rank per core."""
    arguments = (*_cluster("2x1", rate), *ALL, "compare.tune=true", "compare.rounds=3")
    title = _title("2x1", rate)
    return Run(name=f"2x1-{rate}", title=title, arguments=arguments, note=note, seconds=seconds)


def _shared(shape: str, note: str) -> Run:
    """Four ranks that compute on the cores of two."""
    arguments = (*_cluster(shape, "400mbit"), *ENDS, "moe.num_experts=4", "compare.rounds=2")
    title = _title(shape, "400mbit")
    return Run(name=f"{shape}-400mbit", title=title, arguments=arguments, note=note, seconds=70)


def _virtual(shape: str, experts: int, pieces: str, note: str) -> Run:
    settings = (f"moe.num_experts={experts}", pieces, "compare.rounds=2")
    arguments = ("--virtual", *_cluster(shape, "400mbit"), *ENDS, *settings)
    title = f"{_title(shape, '400mbit')}, virtual"
    name = f"virtual-{shape}-400mbit"
    return Run(name=name, title=title, arguments=arguments, note=note, seconds=65)


def _collectives(shape: str, experts: int, note: str) -> Run:
    arguments = ("--collectives", *_cluster(shape, "400mbit"), f"moe.num_experts={experts}")
    title = f"Collectives alone, {_title(shape, '400mbit')}"
    return Run(name=f"collectives-{shape}-400mbit", title=title, arguments=arguments, note=note, seconds=30)


def _dispatch(shape: str, rate: str, experts: int, note: str, seconds: float) -> Run:
    arguments = ("--dispatch", *_cluster(shape, rate), f"moe.num_experts={experts}", "compare.rounds=3")
    title = f"Ways to dispatch, {_title(shape, rate)}"
    return Run(name=f"dispatch-{shape}-{rate}", title=title, arguments=arguments, note=note, seconds=seconds)


def _plan(rate: str, note: str) -> Run:
    """What is chosen, beside four published plans, all predicted from one profile."""
    arguments = ("--plan", *_cluster("2x1", rate), "compare.rounds=5")
    title = f"The chosen plan, {rate_text(parse_rate(rate))}"
    return Run(name=f"plan-2x1-{rate}", title=title, arguments=arguments, note=note, seconds=170, drawn=False)


def _title(shape: str, rate: str) -> str:
    nodes, devices = shape.split("x")
    plural = "s" if devices != "1" else ""
    return f"{nodes} nodes of {devices} device{plural}, {rate_text(parse_rate(rate))}"


SUITE: Final = (
    _rates("300mbit", "A slow link: the bytes take longer than the computation.", 120),
    _rates("400mbit", "Bytes and computation take about the same time: there is most to hide.", 110),
    _rates("700mbit", "A faster link: computation takes longer than the bytes.", 100),
    _rates("2gbit", "A link so fast that little is left to hide.", 90),
    Run(
        name="peers-2x1-400mbit",
        title="Beside DeepSpeed and Megatron-Core, 400 Mbit/s",
        arguments=(
            *_cluster("2x1", "400mbit"),
            *ENDS,
            "--peers",
            "deepspeed,megatron",
            "compare.rounds=3",
        ),
        note="The same attention, weights and data through the MoE layers of other systems, with their own "
        "gradient synchronisation. `(gloo)` is as shipped; the other row of each has Penstock's all-to-all "
        "under it, so that a better all-to-all is not mistaken for better scheduling. What had to be worked "
        "around to run them on CPUs: [docs/peers.md](docs/peers.md).",
        seconds=140,
    ),
    _shared("2x2", "Two devices share each uplink, and four ranks share two cores."),
    _shared("4x1", "Four nodes with an uplink each; four ranks share two cores."),
    _virtual(
        "4x2", 8, "schedule.microbatches=4", "More devices than cores: they sleep instead of computing."
    ),
    _virtual("4x4", 16, "schedule.microbatches=2", "The same with four devices behind each uplink."),
    _collectives("2x1", 2, "How near the transport comes to the wire; 0.99 is a wire that is never idle."),
    _collectives("4x1", 4, "The same with four ranks."),
    _dispatch(
        "2x2", "2gbit", 4, "Which of the three is the fastest, and whether the fitted models say so.", 60
    ),
    _dispatch("4x4", "2gbit", 16, "The same with sixteen ranks, which only send.", 150),
    _plan("200mbit", "A profile, a search, and what was promised against what was measured."),
    _plan("300mbit", "The same on a faster link."),
    _plan("400mbit", "The same on a faster link."),
    _plan("700mbit", "The same on a faster link."),
    _plan("2gbit", "The same on a link that is hardly felt."),
    Run(
        name="drift",
        title="Drift: the network or a rank gets slower in mid-training",
        arguments=("--drift",),
        note="Each row is two runs: one that meets the change behind step 25, and one that was planned for "
        "the slow state from its start. Real training steps; medians of the last 15.",
        seconds=800,
    ),
    Run(
        name="published",
        title="The layers of the FSMoE and FlowMoE studies",
        arguments=("--published",),
        note="By simulation, from rates fitted to tasks that the studies measured; how they are read and why "
        "figures differ: [docs/planning.md](docs/planning.md).",
        seconds=180,
    ),
    Run(
        name="layer",
        title="The MoE layer in one process",
        arguments=("--layer",),
        note="One thread, forward and backward: the layer beside the same block of Hugging Face transformers "
        "and a loop over experts; orders beside the machine's copy; compression of rows.",
        seconds=90,
    ),
)
"""What `penstock bench --suite` runs."""
