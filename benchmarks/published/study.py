"""Every planner on every layer of a grid, by simulation, and what that means on average.

Layers that cost the same, such as those that differ in heads only, are simulated once and counted as often as
they stand in the grid.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeVar

from benchmarks.progress import PROGRESS
from benchmarks.published.layers import (
    FSMOE_SEQ_LENS,
    LayerProblem,
    LayerSpec,
    flowmoe_layers,
    flowmoe_problem,
    fsmoe_layers,
    fsmoe_problem,
    one_lane,
    simulated_s,
)
from penstock.plan import Problem
from penstock.plan.effort import Effort
from penstock.plan.published import (
    PUBLISHED,
    dense_overlap_choice,
    flowmoe_published_choice,
    fsmoe_choice,
    lina_choice,
    pipemoe_choice,
    sequential_choice,
)
from penstock.plan.search import find_plan

JOINT: Final = "joint"
SEED: Final = 20250330

LayerSeconds = Mapping[str, float]
"""Simulated seconds of an iteration by contender."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How many times as fast as the baseline a contender is, over all layers.

    Attributes:
        published: The mean that the paper gives.
    """

    contender: str
    mean: float
    least: float
    most: float
    published: float | None = None

    @staticmethod
    def of(contender: str, ratios: Sequence[float], published: float | None = None) -> Gain:
        mean = sum(ratios) / len(ratios)
        return Gain(contender=contender, mean=mean, least=min(ratios), most=max(ratios), published=published)


@dataclass(frozen=True, kw_only=True)
class GridResult:
    """One grid on one cluster.

    Attributes:
        layers: How many layers count.
        distinct: How many of them differ and were simulated.
        gains: Speed-ups over `baseline`.
        sampled: How many of the distinct layers were planned jointly.
        joint: Speed-ups of the joint plan over each planner and over the best of them, on those layers.
    """

    title: str
    cluster: str
    layers: int
    distinct: int
    baseline: str
    gains: tuple[Gain, ...]
    sampled: int = 0
    joint: tuple[Gain, ...] = ()


# ---- grids -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Layers, the cluster they are on, and who runs them.

    Attributes:
        published: Mean speed-ups over the baseline.
    """

    title: str
    cluster: str
    specs: tuple[LayerSpec, ...]
    problem: Callable[[LayerSpec, str], LayerProblem]
    measure: Callable[[LayerProblem], LayerSeconds]
    baseline: str
    published: Mapping[str, float] = field(default_factory=dict)


FSMOE_BASELINE: Final = "pipemoe, one lane"
FSMOE_PUBLISHED: Final = {
    "fsmoe-testbed-a": {"dense_overlap, one lane": 1.09, "fsmoe, one lane": 1.12, "fsmoe": 1.18},
    "fsmoe-testbed-b": {"dense_overlap, one lane": 1.08, "fsmoe, one lane": 1.16, "fsmoe": 1.22},
}


def fsmoe_seconds(problem: LayerProblem) -> LayerSeconds:
    """Simulate the systems of the FSMoE study; on one lane, traffic in and between nodes cannot overlap."""
    narrow = one_lane(problem)
    return {
        FSMOE_BASELINE: simulated_s(narrow, pipemoe_choice(narrow)),
        "dense_overlap, one lane": simulated_s(narrow, dense_overlap_choice(narrow)),
        "fsmoe, one lane": simulated_s(narrow, fsmoe_choice(narrow)),
        "fsmoe": simulated_s(problem, fsmoe_choice(problem)),
        "pipemoe": simulated_s(problem, pipemoe_choice(problem)),
        "dense_overlap": simulated_s(problem, dense_overlap_choice(problem)),
    }


def flowmoe_seconds(problem: LayerProblem) -> LayerSeconds:
    """Simulate systems that know one network; FlowMoE with two microbatches, as published."""
    planners = {
        "pipemoe": pipemoe_choice,
        "sequential": sequential_choice,
        "lina": lina_choice,
        "dense_overlap": dense_overlap_choice,
        "fsmoe": fsmoe_choice,
        "flowmoe": flowmoe_published_choice,
    }
    return {name: simulated_s(problem, plan(problem)) for name, plan in planners.items()}


def grids() -> tuple[Grid, ...]:
    """Return the grids: FSMoE's 1,458 layers on its two testbeds; FlowMoE's 675 on its two clusters."""
    fsmoe = [
        Grid(
            title="FSMoE's configured layers",
            cluster=cluster,
            specs=tuple(fsmoe_layers(cluster)),
            problem=fsmoe_problem,
            measure=fsmoe_seconds,
            baseline=FSMOE_BASELINE,
            published=FSMOE_PUBLISHED[cluster],
        )
        for cluster in FSMOE_SEQ_LENS
    ]
    flowmoe = [
        Grid(
            title="FlowMoE's customised layers",
            cluster=cluster,
            specs=tuple(flowmoe_layers()),
            problem=flowmoe_problem,
            measure=flowmoe_seconds,
            baseline="pipemoe",
        )
        for cluster in ("flowmoe-cluster-1", "flowmoe-cluster-2")
    ]
    return (*fsmoe, *flowmoe)


# ---- running them ------------------------------------------------------------------------------------------

JointPlanner = Callable[[Problem], float]
"""Predicted seconds of the plan that is to be compared with all published ones."""


def joint_plan_s(problem: Problem, effort: Effort = "usual") -> float:
    """Search jointly, as `penstock plan` does; `low` is meant for thousands of layers."""
    return find_plan(problem, effort=effort).best.predicted_s


def run_grid(
    grid: Grid,
    *,
    sample: int | None = None,
    joint_sample: int = 0,
    joint: JointPlanner = joint_plan_s,
    workers: int = 1,
) -> GridResult:
    """Run one grid; samples are drawn with a fixed seed.

    Args:
        grid: The layers, their cluster and their planners.
        sample: How many of the distinct layers to simulate; None = all.
        joint_sample: How many of them to plan jointly; may be larger than there are layers.
        joint: Plans a layer jointly and returns its seconds.
        workers: How many processes simulate.
    """
    counts = Counter(replace(spec, heads=0) for spec in grid.specs)
    chosen = _drawn(tuple(counts), len(counts) if sample is None else sample)
    seconds = in_processes(partial(_measured, grid), chosen, workers)
    planned = in_processes(partial(_planned, grid, joint), _drawn(tuple(counts), joint_sample), workers)
    return GridResult(
        title=grid.title,
        cluster=grid.cluster,
        layers=sum(counts[spec] for spec in chosen),
        distinct=len(chosen),
        baseline=grid.baseline,
        gains=_gains(grid, seconds, [counts[spec] for spec in chosen]),
        sampled=len(planned),
        joint=_joint_gains(planned),
    )


def _drawn(specs: Sequence[LayerSpec], size: int) -> list[LayerSpec]:
    return random.Random(SEED).sample(specs, min(size, len(specs)))


def _measured(grid: Grid, spec: LayerSpec) -> LayerSeconds:
    return grid.measure(grid.problem(spec, grid.cluster))


def _planned(grid: Grid, joint: JointPlanner, spec: LayerSpec) -> LayerSeconds:
    problem = grid.problem(spec, grid.cluster)
    published = {name: simulated_s(problem, plan(problem)) for name, plan in PUBLISHED.items()}
    return {**published, JOINT: joint(problem)}


Spec = TypeVar("Spec")


def in_processes(
    run: Callable[[Spec], LayerSeconds], specs: Sequence[Spec], workers: int
) -> list[LayerSeconds]:
    """Return what `run` says of every layer, in their order; however it ends, no process goes on."""
    if workers == 1 or len(specs) < 2:
        return _told(map(run, specs), len(specs))
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, initializer=_leave_signals) as pool:
        try:
            return _told(pool.map(run, specs, chunksize=8), len(specs))
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()  # leaving the pool waits for layers that are being planned
            raise


def _leave_signals() -> None:
    """Leave them to the process that shares the work out: Ctrl-C reaches all of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


def _told(found: Iterable[LayerSeconds], number: int) -> list[LayerSeconds]:
    """Return all of them, and tell each one."""
    rows: list[LayerSeconds] = []
    for row in found:
        rows.append(row)
        PROGRESS.say(f"layer {len(rows)} of {number}")
    return rows


def _gains(grid: Grid, seconds: Sequence[LayerSeconds], counts: Sequence[int]) -> tuple[Gain, ...]:
    """Return gains over the baseline, every layer as often as it stands in the grid."""
    rows = [row for row, count in zip(seconds, counts, strict=True) for _ in range(count)]
    names = [name for name in rows[0] if name != grid.baseline]
    return tuple(
        Gain.of(name, [row[grid.baseline] / row[name] for row in rows], grid.published.get(name))
        for name in names
    )


def _joint_gains(planned: Sequence[LayerSeconds]) -> tuple[Gain, ...]:
    """Return gains of the joint plan over the best planner of each layer, then over each planner."""
    if not planned:
        return ()
    best = [min(row[name] for name in PUBLISHED) / row[JOINT] for row in planned]
    gains = [Gain.of(name, [row[name] / row[JOINT] for row in planned]) for name in PUBLISHED]
    return (Gain.of("best of them", best), *gains)
