"""Steps of open models on GPUs, as their frameworks' users measured them, beside predictions.

Every row of `gpu_calibration.csv` is planned by `penstock plan` in its own layout, on devices of which
nothing but the data sheet is known. Memory is not limited, since frameworks keep other things in it.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.calibration.tasks import table
from penstock.cli import main
from penstock.plan.models import open_models

BUDGET: Final = "0.05"
MEMORY_GIB: Final = "4096"
RECOMPUTE: Final = {"full": "blocks", "select": "none"}
"""What a row's recomputation is called here; of attention alone it costs next to nothing."""


@dataclass(frozen=True)
class Setup:
    """A row's model and cluster as `penstock plan` takes them.

    Attributes:
        changes: What differs from the model's `config.json`.
        note: What is different in the prediction.
    """

    model: str
    cluster: str
    changes: tuple[tuple[str, Any], ...] = ()
    note: str = ""


SETUPS: Final[Mapping[str, Setup]] = {
    "nemo-automodel": Setup("qwen3-30b-a3b", "1x8xH100"),
    "xtuner-h800": Setup("qwen3-235b-a22b", "32x8xH800,net=8x400gbit,fabric=ib"),
    "simumax-b200": Setup("deepseek-v2", "1x8xB200", (("num_hidden_layers", 4),)),
    "mlperf-6.0": Setup("gpt-oss-20b", "1x8xGB300,products=float8,graphs=full"),
    "aws-efa": Setup(
        "qwen3-30b-a3b",
        "8x8xH100,net=32x100gbit,fabric=efa",
        (("num_key_value_heads", 8),),
        "its 4 key and value heads are on two ranks each, so 8 are planned",
    ),
}
NOT_PREDICTED: Final = {
    "primus-projection": "its model's sizes are not known",
    "ms-swift": "its layout and batch are not printed",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """A measured step and its prediction.

    Attributes:
        note: Why there is no prediction, or what is different in it.
    """

    group: str
    model: str
    layout: str
    measured_s: float
    measured_rate: float | None
    predicted_s: float | None = None
    predicted_rate: float | None = None
    plan: str = ""
    note: str = ""


def steps() -> list[Step]:
    """Return every measured step with its prediction."""
    return [measured_step(row) for row in table("gpu_calibration.csv")]


def measured_step(row: Mapping[str, str]) -> Step:
    """Return a row of the table with its prediction."""
    measured = Step(
        group=row["group"],
        model=row["model"],
        layout=_layout(row),
        measured_s=float(row["step_s"]),
        measured_rate=float(row["tok_s_gpu"]) if row["tok_s_gpu"] else None,
    )
    setup = SETUPS.get(row["group"])
    if setup is None:
        return replace(measured, note=NOT_PREDICTED[row["group"]])
    with _config(setup) as model:
        report = _planned(["--model", model, "--cluster", setup.cluster, *_options(row)])
    rate = report["throughput"]["tokens_per_s_per_device"]
    seconds = int(row["gbs"]) * int(row["seq"]) / rate / int(row["gpus"])
    plan = report.get("choice") or report["stages"]["choice"]
    return replace(measured, predicted_s=seconds, predicted_rate=rate, plan=plan["schedule"], note=setup.note)


def _layout(row: Mapping[str, str]) -> str:
    sizes = " ".join(f"{name} {row[name]}" for name in ("tp", "pp", "vp", "ep") if row[name])
    batch = f"batch {row['mbs']} of {row['gbs']}" if row["mbs"] else ""
    recompute = f"recompute {row['recompute']}" if row["recompute"] else ""
    return ", ".join(part for part in (f"{row['gpus']} x {row['system']}", sizes, batch, recompute) if part)


def _options(row: Mapping[str, str]) -> list[str]:
    args = ["--batch", row["mbs"], "--global-batch", row["gbs"], "--seq-len", row["seq"]]
    args += ["--tp-size", row["tp"], "--ep-size", row["ep"], "--zero-stage", "1"]
    args += ["--recompute", RECOMPUTE.get(row["recompute"], "none")]
    if int(row["pp"]) > 1:
        args += ["--pipeline-parallel-size", row["pp"], "--virtual-pipeline-parallel-size", row["vp"] or "1"]
    # None of these frameworks computes one part of a batch under the transfers of another; sums of gradients
    # run under the backward pass.
    args.append(f"schedule.name={'flowmoe' if row['ep'] == '1' else 'sequential'}")
    return [*args, "moe.dispatch=flat"] if "alltoall" in row.get("dispatcher", "") else args


@contextmanager
def _config(setup: Setup) -> Iterator[str]:
    """Yield the model's name, or a config.json with the changes."""
    if not setup.changes:
        yield setup.model
        return
    table = json.loads(open_models()[setup.model].read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**table, **dict(setup.changes)}), encoding="utf-8")
        yield str(path)


def _planned(words: Sequence[str]) -> dict[str, Any]:
    """Return what the command prints."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["plan", *words, "--budget", BUDGET, "--memory-gib", MEMORY_GIB, "--json"])
    if code:
        raise RuntimeError(f"penstock plan {' '.join(words)}: {err.getvalue()}")
    report: dict[str, Any] = json.loads(out.getvalue())
    return report
