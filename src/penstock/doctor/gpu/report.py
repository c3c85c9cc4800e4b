"""What `penstock doctor --gpu` writes and prints: one JSON object without names, and some lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

import torch

import penstock
from penstock.cost.cluster_file import DOCTOR
from penstock.doctor.gpu.outcome import SEVERITY, Verdict, without_names
from penstock.doctor.gpu.run import Result, cluster_of, without_cluster
from penstock.doctor.gpu.stages import STAGES
from penstock.words import counted, folded

VERSION: Final = 1
WIDTHS: Final = (8, 12)


def worst_of(results: Sequence[Result]) -> Verdict:
    """Return the verdict of all stages together."""
    return max((each.outcome.verdict for each in results), key=SEVERITY.index, default=Verdict.SKIPPED)


def report_of(results: Sequence[Result], names: Mapping[str, str], ranks: int, device: str) -> dict[str, Any]:
    """Return the JSON: a cluster file, if one was measured, with everything else under one more key.

    names: of hosts and users, none of which is in the result.
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
            {"stage": each.stage, "seconds": round(each.seconds, 3), **asdict(each.outcome)}
            for each in map(without_cluster, results)
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
