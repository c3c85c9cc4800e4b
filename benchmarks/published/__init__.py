"""Published planners on the layers of their own papers, by simulation. No torch."""

import json
from functools import partial
from pathlib import Path

from benchmarks.published.parm_study import TESTBEDS, run_parm
from benchmarks.published.render import render_published
from benchmarks.published.result import PublishedResult
from benchmarks.published.study import (
    Gain,
    Grid,
    GridResult,
    grids,
    joint_plan_s,
    run_grid,
)
from penstock.plan.effort import Effort


def run_published(
    *, sample: int | None = None, joint_sample: int = 0, effort: Effort = "usual", workers: int = 1
) -> PublishedResult:
    """All studies. effort: of the joint search; the other arguments are those of `run_grid`."""
    joint = partial(joint_plan_s, effort=effort)
    found = [
        run_grid(grid, sample=sample, joint_sample=joint_sample, joint=joint, workers=workers)
        for grid in grids()
    ]
    parm = [run_parm(cluster, sample=sample, workers=workers) for cluster in TESTBEDS]
    return PublishedResult(grids=tuple(found), parm=tuple(parm))


def write(result: PublishedResult, path: Path) -> None:
    """The result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")


__all__ = [
    "Gain",
    "Grid",
    "GridResult",
    "PublishedResult",
    "grids",
    "joint_plan_s",
    "render_published",
    "run_grid",
    "run_published",
    "write",
]
