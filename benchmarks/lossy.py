"""`python -m benchmarks.lossy`: what rows that are rounded in transit change in a loss after some training.

The same small model, seed and data every time, on two processes: rows as they are, as bfloat16 and as int8;
and, as a control, rows as they are in other numbers of microbatches, which changes the order of sums and
nothing else. What rounding of rows does is to be read beside what rounding of sums does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.command import parser_of, run_alone
from benchmarks.launching import ProgramFailedError
from benchmarks.progress import in_rows
from penstock.words import markdown_table

STEPS: Final = 300
LAST: Final = 50
"""Steps at the end, over which the training loss is a mean."""

CASES: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": (),
    "bfloat16": ("moe.comm_dtype=bfloat16",),
    "int8": ("moe.comm_dtype=int8",),
    "float32, 2 microbatches": ("schedule.microbatches=2",),
    "float32, 4 microbatches": ("schedule.microbatches=4",),
}
"""What is set, by the name of the case; the first is what others are compared with."""

ROUNDED: Final = ("bfloat16", "int8")
"""The others are controls."""

SETTINGS: Final = (
    *("model.num_layers=2", "model.hidden_size=128", "model.num_heads=4", "model.seq_len=64"),
    *("moe.num_experts=8", "moe.top_k=2", "moe.moe_ffn_hidden_size=256", "parallel.processes=2"),
    *("data.batch_per_device=8", "schedule.name=flowmoe", "schedule.microbatches=1", "plan.mode=fixed"),
    *("optimizer.lr=3e-3", "optimizer.warmup_steps=30", "train.checkpoint_every=0"),
    *("output.tensorboard=false", "output.trace_steps=0", "output.loads=false"),
)


@dataclass(frozen=True, kw_only=True)
class LossyCase:
    """One run.

    Attributes:
        loss: Nats per token, the mean of the last steps.
        held_out: The loss on text that the run has not seen.
    """

    name: str
    loss: float
    held_out: float


@dataclass(frozen=True, kw_only=True)
class LossyResult:
    """All runs of so many steps."""

    steps: int
    cases: tuple[LossyCase, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"lossy": asdict(self)}


def measure(steps: int) -> LossyResult:
    """Run every case, one after the other; minutes.

    Raises:
        ProgramFailedError: If a run fails.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-lossy-") as name:
        rows = [(case, partial(_train, case, Path(name) / str(i), steps)) for i, case in enumerate(CASES)]
        cases = in_rows(rows, lambda found: LossyResult(steps=steps, cases=found))
    return LossyResult(steps=steps, cases=cases)


def _train(case: str, folder: Path, steps: int) -> LossyCase:
    folder.mkdir()
    (folder / "config.toml").write_text("", encoding="utf-8")
    own = (f"train.steps={steps}", f"train.eval_every={steps}", f"output.dir={folder / 'run'}")
    command = (sys.executable, "-m", "penstock", "train", str(folder / "config.toml"))
    given = (*command, *SETTINGS, *own, *CASES[case])
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramFailedError(f"training with {case} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return summary(case, list(lines))


def summary(name: str, steps: list[dict[str, Any]]) -> LossyCase:
    """Return what a run's metrics say of its end."""
    return LossyCase(
        name=name, loss=fmean(step["loss"] for step in steps[-LAST:]), held_out=steps[-1]["eval_loss"]
    )


def render_lossy(result: LossyResult) -> str:
    """Return a Markdown table, and how far apart the controls are."""
    first, *others = result.cases
    rows = [("rows", "loss", "difference", "held-out loss", "difference"), _row(first, None)]
    rows += [_row(case, first) for case in others]
    about = f"Loss: mean of the last {LAST} of {result.steps} steps, nats per byte."
    if control := [case for case in others if case.name not in ROUNDED]:
        apart = max(abs(case.loss - first.loss) for case in control)
        held = max(abs(case.held_out - first.held_out) for case in control)
        about += (
            f" Sums in another order alone change it by up to {apart:.4f}, and the held-out loss by up to "
            f"{held:.4f}."
        )
    return "\n".join([*markdown_table(rows), "", about])


def _row(case: LossyCase, first: LossyCase | None) -> tuple[str, ...]:
    if first is None:
        return case.name, f"{case.loss:.4f}", "-", f"{case.held_out:.4f}", "-"
    apart, held = case.loss - first.loss, case.held_out - first.held_out
    return case.name, f"{case.loss:.4f}", f"{apart:+.4f}", f"{case.held_out:.4f}", f"{held:+.4f}"


def _parser() -> argparse.ArgumentParser:
    about = "Trains with rows as they are and with rows that are rounded in transit. Five minutes."
    parser = parser_of("lossy", about, "--steps 100")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of every run ({STEPS})")
    return parser


if __name__ == "__main__":
    run_alone(_parser(), lambda options: measure(options.steps), render_lossy)
