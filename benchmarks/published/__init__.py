"""Published planners on the layers of their own papers, by simulation. No torch."""

from collections.abc import Callable
from functools import partial

from benchmarks.progress import in_rows
from benchmarks.published.parm_study import TESTBEDS, ParmResult, run_parm
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
    """Run all studies.

    Args:
        sample, joint_sample, workers: See `run_grid`.
        effort: How thoroughly the joint plans are searched.
    """
    joint = partial(joint_plan_s, effort=effort)
    rows: list[tuple[str, Callable[[], GridResult | ParmResult]]] = []
    for grid in grids():
        run = partial(run_grid, sample=sample, joint_sample=joint_sample, joint=joint, workers=workers)
        rows.append((f"{grid.title} on {grid.cluster}", partial(run, grid)))
    for cluster in TESTBEDS:
        rows.append(
            (f"Parm's layers on {cluster}", partial(run_parm, cluster, sample=sample, workers=workers))
        )
    return _result(in_rows(rows, _result))


def _result(found: tuple[GridResult | ParmResult, ...]) -> PublishedResult:
    return PublishedResult(
        grids=tuple(each for each in found if isinstance(each, GridResult)),
        parm=tuple(each for each in found if isinstance(each, ParmResult)),
    )


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
]
