"""Planners of replica experts on drifting skewed loads, by simulation: how even they make loads, and how fast
a layer.

Every plan is made from one step and serves the next, as in training, unless it would be slower than none
there. The layer's time is that of the busiest link of every transfer and of the slowest rank's experts.
Forced balance sends every rank as many rows as if all experts were equally liked, which no planner may do; it
is what they are held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any, Final

import numpy as np

from benchmarks.command import parser_of, run_alone
from benchmarks.progress import in_rows
from benchmarks.skewed import DRIFT, ROWS, costs, drifting_loads, expert_problem
from penstock.features.expert_replicas.planners import PLANNERS, overlap, pays
from penstock.features.expert_replicas.problem import ExpertProblem, LayerLoad, LayerSeconds, seconds_of
from penstock.placement import Replication
from penstock.words import markdown_table

RANKS: Final = 16
STEPS: Final = 12
SLOTS: Final = (1, 2)
RATIO: Final = 0.5
"""Transfers of evenly routed rows over the experts' computation, where nothing else is said."""
RATIOS: Final = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
DRIFTS: Final = (0.0, 0.02, 0.1, 0.3, 1.0)
NONE: Final = "none"
EXACT: Final = ", exact"
"""What is behind a planner's name where rows are split by the loads of the step that runs."""
PLANNED: Final = "planned"
CONTENDERS: Final = (*PLANNERS, "least_loaded" + EXACT, PLANNED + EXACT)
AIM: Final = 0.94
"""Share of forced balance's throughput that newer systems with fast links reach."""
PAYS: Final = 1.05
"""Speed-up from which on moving experts is worth its trouble."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One planner on all steps; figures but `dropped` are means over steps.

    Attributes:
        planner: `none`, or its name, with EXACT where rows are split exactly.
        ratio: Time of transfers over time of computation, of evenly routed rows.
        drift: Share of the rows that follow another distribution one step later.
        overlap: Share of a step's rows in common with those of the step before.
        deviation: Standard deviation of the ranks' loads over their mean.
        imbalance: The largest of the ranks' loads over their mean.
        layer_ms: Milliseconds of the layer.
        speedup: The layer's time without replicas over its time.
        of_even: Throughput over that of forced balance.
        dropped: Share of steps in which the plan of the step before would have been slower than none.
    """

    planner: str
    replica_slots: int
    ratio: float
    drift: float
    overlap: float
    deviation: float
    imbalance: float
    layer_ms: float
    speedup: float
    of_even: float
    dropped: float

    @property
    def label(self) -> str:
        """The planner, with its slots where they are more than one."""
        return (
            self.planner if self.replica_slots == SLOTS[0] else f"{self.planner}, {self.replica_slots} slots"
        )


@dataclass(frozen=True, kw_only=True)
class PlannersResult:
    """The planners under every condition.

    Attributes:
        planners: All of them at one ratio and drift.
        by_ratio: At several ratios, with one replica slot.
        by_drift: At several drifts, with one replica slot; our best planner with more, too.
    """

    ranks: int
    steps: int
    planners: tuple[Planned, ...]
    by_ratio: tuple[Planned, ...]
    by_drift: tuple[Planned, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the key `planners` tells it from other results."""
        return asdict(self)


@dataclass(frozen=True)
class _Step:
    """A layer in one step under some plan."""

    load: LayerLoad
    time: LayerSeconds
    dropped: bool = False


def simulate_planners(
    steps: int = STEPS, ratios: Sequence[float] = RATIOS, drifts: Sequence[float] = DRIFTS
) -> PlannersResult:
    """Simulate every planner on the same loads. A minute."""
    all_slots = [(NONE, SLOTS[0]), *((name, slots) for slots in SLOTS for name in CONTENDERS)]
    one_slot = [(NONE, SLOTS[0]), *product(CONTENDERS, SLOTS[:1])]
    ours_too = [*one_slot[1:], *product([PLANNED + EXACT], SLOTS[1:])]
    groups = [
        ("planners", "every planner", all_slots, RATIO, DRIFT),
        *(("by_ratio", f"link / device {ratio:g}", one_slot, ratio, DRIFT) for ratio in ratios),
        *(("by_drift", f"drift {drift:g}", ours_too, RATIO, drift) for drift in drifts),
    ]

    def simulate(table: str, who: Sequence[tuple[str, int]], ratio: float, drift: float) -> _Group:
        return table, tuple(_simulated(name, slots, ratio, drift, steps) for name, slots in who)

    def result(found: Sequence[_Group]) -> PlannersResult:
        tables = {
            name: tuple(row for table, rows in found if table == name for row in rows)
            for name in ("planners", "by_ratio", "by_drift")
        }
        return PlannersResult(ranks=RANKS, steps=steps, **tables)

    rows = [(what, partial(simulate, table, who, ratio, drift)) for table, what, who, ratio, drift in groups]
    return result(in_rows(rows, result))


_Group = tuple[str, tuple[Planned, ...]]
"""Of which table, and its rows."""


def _simulated(planner: str, slots: int, ratio: float, drift: float, steps: int) -> Planned:
    """Simulate each step but the first under the plan of the one before."""
    loads = list(drifting_loads(RANKS, steps + 1, drift))
    name, exact = planner.removesuffix(EXACT), planner.endswith(EXACT)
    problems = [expert_problem(RANKS, slots, ratio, each, exact=exact) for each in loads]
    none = [_step(problem, Replication.none(problem.placement, slots)) for problem in problems[1:]]
    served = none if planner == NONE else [_served(name, *pair) for pair in pairwise(problems)]
    total_s = float(np.mean([step.time.total_s for step in served]))
    return Planned(
        planner=planner,
        replica_slots=slots,
        ratio=ratio,
        drift=drift,
        overlap=float(np.mean([overlap(before, after) for before, after in pairwise(loads)])),
        deviation=float(np.mean([step.load.computed.std() / step.load.computed.mean() for step in served])),
        imbalance=float(np.mean([step.load.computed.max() / step.load.computed.mean() for step in served])),
        layer_ms=1e3 * total_s,
        speedup=float(np.mean([step.time.total_s for step in none])) / total_s,
        of_even=seconds_of(costs(RANKS, ratio), _even()).total_s / total_s,
        dropped=float(np.mean([step.dropped for step in served])),
    )


def _served(name: str, before: ExpertProblem, problem: ExpertProblem) -> _Step:
    """Return a step with the plan of the step before, dropped where it does not pay."""
    replication = PLANNERS[name](before)
    if replication.is_empty or pays(problem, replication):
        return _step(problem, replication)
    none = _step(problem, Replication.none(problem.placement, problem.replica_slots))
    return _Step(none.load, none.time, dropped=True)


def _step(problem: ExpertProblem, replication: Replication) -> _Step:
    load = LayerLoad.of(problem.loads, replication, problem.costs.links.nodes)
    return _Step(load, seconds_of(problem.costs, load))


def _even() -> LayerLoad:
    rows = np.full((RANKS, RANKS), ROWS / RANKS)
    return LayerLoad(traffic=rows, copies=np.zeros((RANKS, RANKS), np.int64))


def render_planners(result: PlannersResult) -> str:
    """Return three tables, in Markdown."""
    first = result.planners[0]
    return "\n".join(
        [
            f"{result.ranks} ranks with one expert each, nodes of 4; means of {result.steps} steps",
            "link / device: four transfers of evenly routed rows over the experts' computation",
            "drift: share of the rows that follow another distribution one step later",
            "max / mean: of the loads of ranks; std: their standard deviation over the mean",
            "dropped: steps in which the plan of the step before would have been slower than none",
            "exact: rows of experts with several homes are split by the loads of the step that runs",
            "",
            f"link / device {first.ratio:g}, drift {first.drift:g}, "
            f"which leaves {100 * first.overlap:.0f} % of the rows where they were:",
            "",
            *markdown_table(_planner_rows(result.planners)),
            "",
            "Speed-up over no replicas by link / device, one replica slot:",
            "",
            *markdown_table(_ratio_rows(result.by_ratio)),
            "",
            *_where_it_pays([row for row in result.by_ratio if row.planner == _best(result.by_ratio)]),
            "",
            "Speed-up, and max / mean, by drift, one replica slot if not said; of the plans those dropped:",
            "",
            *markdown_table(_drift_rows(result.by_drift)),
        ]
    )


def _planner_rows(planners: Sequence[Planned]) -> list[list[str]]:
    head = [
        "planner",
        "replica slots",
        "std",
        "max / mean",
        "layer ms",
        "speed-up",
        "of forced balance",
        "dropped",
    ]
    rows = [
        [
            row.planner,
            "" if row.planner == NONE else str(row.replica_slots),
            f"{row.deviation:.2f}",
            f"{row.imbalance:.2f}",
            f"{row.layer_ms:.1f}",
            f"{row.speedup:.2f}x",
            f"{100 * row.of_even:.0f} %",
            f"{100 * row.dropped:.0f} %",
        ]
        for row in planners
    ]
    return [head, *rows]


def _ratio_rows(rows: Sequence[Planned]) -> list[list[str]]:
    by_ratio, names, last = _grouped(rows, lambda row: row.ratio), _names(rows), _best(rows)
    head = ["link / device", "none ms", *names, f"{last}: max / mean", f"{last}: of forced balance"]
    lines = []
    for ratio, by_planner in by_ratio.items():
        best = by_planner[last]
        ends = [f"{best.imbalance:.2f}", f"{100 * best.of_even:.0f} %"]
        speedups = [f"{by_planner[name].speedup:.2f}x" for name in names]
        lines.append([f"{ratio:g}", f"{by_planner[NONE].layer_ms:.1f}", *speedups, *ends])
    return [head, *lines]


def _names(rows: Sequence[Planned]) -> list[str]:
    """Return the planners that were simulated: a result may be older than some."""
    return [name for name in dict.fromkeys(row.label for row in rows) if name != NONE]


def _best(rows: Sequence[Planned]) -> str:
    """Return the planner of ours that was simulated."""
    return PLANNED + EXACT if PLANNED + EXACT in _names(rows) else PLANNED


def _where_it_pays(rows: Sequence[Planned]) -> list[str]:
    """Say up to which ratio a planner does what it aims at, and from which one it gains next to nothing."""
    reached = [row.ratio for row in rows if row.of_even >= AIM]
    idle = [row.ratio for row in rows if row.speedup < PAYS]
    lines = (
        [f"{rows[0].planner} has {100 * AIM:.0f} % of forced balance up to link / device {max(reached):g}"]
        if reached
        else []
    )
    return lines + (
        [f"it gains less than {100 * (PAYS - 1):.0f} % from link / device {min(idle):g} on"] if idle else []
    )


def _drift_rows(rows: Sequence[Planned]) -> list[list[str]]:
    names = _names(rows)
    head = ["drift", "rows in common", *names]
    lines = []
    for drift, by_planner in _grouped(rows, lambda row: row.drift).items():
        common = f"{100 * by_planner[PLANNED].overlap:.0f} %"
        lines.append([f"{drift:g}", common, *(_kept(by_planner[name]) for name in names)])
    return [head, *lines]


def _kept(row: Planned) -> str:
    return f"{row.speedup:.2f}x {row.imbalance:.2f} ({100 * row.dropped:.0f} %)"


def _grouped(rows: Sequence[Planned], key: Callable[[Planned], float]) -> dict[float, dict[str, Planned]]:
    """Return rows by a number, then by planner."""
    groups: dict[float, dict[str, Planned]] = {}
    for row in rows:
        groups.setdefault(key(row), {})[row.label] = row
    return groups


if __name__ == "__main__":
    about = "Simulates planners of replica experts on drifting skewed loads: a minute."
    run_alone(parser_of("planners", about), lambda _: simulate_planners(), render_planners)
