"""How long placement takes on the host: NetMoE's assignment by both solvers, and every planner of replicas.

The assignments are those of NetMoE's solver table (MoE-GPT-S on 2 nodes of 8 devices), beside the time of
dispatch and experts that the paper measured there and that has to hide the solver, and one far larger. Counts
of samples are drawn from Dirichlet distributions; what solving takes hardly depends on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.command import parser_of, run_alone
from benchmarks.layer.measure import Band, in_turns, quiet_process
from benchmarks.progress import in_rows
from benchmarks.skewed import expert_problem
from penstock.features.expert_replicas.planners import PLANNERS
from penstock.features.sample_placement.assign import (
    SOLVERS,
    Nearness,
    SampleProblem,
    assign,
    prepare,
    sample_problem,
)
from penstock.placement import ExpertPlacement, Replication
from penstock.words import counted, markdown_table

TOKENS: Final = 2048
"""Of a sample, each of which goes to two experts."""
CONCENTRATION: Final = 0.3
"""Of a sample's Dirichlet distribution over experts."""
HIDDEN: Final = 20
"""The dispatch and the experts that hide the solver shall take this many times as long."""
SHARE_OF_ROUNDS: Final = 10
"""Rounds that small problems have for each of the largest."""
ROUNDS: Final = 5
MOST_MATCHED: Final = 512
"""Samples up to which Kuhn-Munkres is timed; its time grows with their third power."""
PLANNED: Final = ((16, 1), (16, 2), (64, 1))
"""Ranks, one expert each, and replica slots."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of NetMoE's solver table: samples per device, and milliseconds."""

    samples: int
    solver_ms: float
    hiding_ms: float


NETMOE: Final = (
    Published(samples=2, solver_ms=0.08, hiding_ms=3.69),
    Published(samples=4, solver_ms=0.48, hiding_ms=7.13),
    Published(samples=8, solver_ms=1.48, hiding_ms=13.5),
    Published(samples=16, solver_ms=10.8, hiding_ms=27.3),
    Published(samples=24, solver_ms=31.1, hiding_ms=41.7),
)


@dataclass(frozen=True, kw_only=True)
class Solved:
    """One size.

    Attributes:
        solver_s: Seconds of the assignment, costs included, by solver.
        published: The paper's row, if it has one.
    """

    nodes: int
    devices_per_node: int
    samples: int
    solver_s: Mapping[str, Band]
    published: Published | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedIn:
    """Time of every planner of replicas, for one layer.

    Attributes:
        seconds: Seconds by planner.
    """

    ranks: int
    replica_slots: int
    seconds: Mapping[str, Band]


@dataclass(frozen=True, kw_only=True)
class SolversResult:
    """All sizes of both kinds."""

    solved: tuple[Solved, ...]
    planned: tuple[PlannedIn, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the key `solved` tells it from other results."""
        return asdict(self)


def measure_solvers(rounds: int = ROUNDS) -> SolversResult:
    """Measure all sizes, solvers in turns. 60 s.

    Args:
        rounds: Rounds of the largest problems; small ones have more.
    """
    for name in SOLVERS:
        prepare(name)
    with quiet_process():
        rows: list[tuple[str, Callable[[], Solved | PlannedIn]]] = [
            (
                f"assigning samples, {row.samples} on each of 2 x 8 devices",
                partial(_solve, 2, 8, row.samples, SHARE_OF_ROUNDS * rounds, row),
            )
            for row in NETMOE
        ]
        rows.append(("assigning samples, 32 on each of 128 x 1 devices", partial(_solve, 128, 1, 32, rounds)))
        for ranks, slots in PLANNED:
            what = f"planning replicas of {ranks} ranks, {counted(slots, 'slot')} each"
            rows.append((what, partial(_plan, ranks, slots, rounds)))
        return _result(in_rows(rows, _result))


def _result(found: tuple[Solved | PlannedIn, ...]) -> SolversResult:
    return SolversResult(
        solved=tuple(row for row in found if isinstance(row, Solved)),
        planned=tuple(row for row in found if isinstance(row, PlannedIn)),
    )


def _solve(
    nodes: int, per_node: int, samples: int, rounds: int, published: Published | None = None
) -> Solved:
    """Solve one size, with `samples` on every device."""
    problem = sample_assignment(nodes, per_node, samples)
    total = len(problem.homes)
    names = [name for name in SOLVERS if name == "network_simplex" or total <= MOST_MATCHED]
    return Solved(
        nodes=nodes,
        devices_per_node=per_node,
        samples=total,
        solver_s=_timed_in_turns({name: partial(assign, problem, name) for name in names}, rounds),
        published=published,
    )


def sample_assignment(nodes: int, per_node: int, samples: int) -> SampleProblem:
    """Return samples that prefer experts of their own and follow them in the next layer.

    Every device has one expert.
    """
    devices = nodes * per_node
    node_of_device = np.repeat(np.arange(nodes), per_node)
    rng = np.random.default_rng(0)
    homes = np.repeat(np.arange(devices), samples)
    shares = rng.dirichlet(np.full(devices, CONCENTRATION), len(homes))
    replication = Replication.none(ExpertPlacement.even(devices, devices), 0)
    return sample_problem(
        counts=rng.multinomial(2 * TOKENS, shares),
        homes=homes,
        moved_rows=np.full(len(homes), TOKENS),
        node_of_device=node_of_device,
        predictions=rng.multinomial(2 * TOKENS, shares),
        following=Nearness.of(replication, node_of_device),
    )


def _plan(ranks: int, replica_slots: int, rounds: int) -> PlannedIn:
    problem = expert_problem(ranks, replica_slots)
    ways = {name: partial(planner, problem) for name, planner in PLANNERS.items()}
    return PlannedIn(ranks=ranks, replica_slots=replica_slots, seconds=_timed_in_turns(ways, rounds))


def _timed_in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Band]:
    times_s = in_turns({name: partial(_processor_s, way) for name, way in ways.items()}, rounds)
    return {name: Band.of(each) for name, each in times_s.items()}


def _processor_s(call: Callable[[], object]) -> float:
    """Return the seconds of one call, which runs on this thread alone, on a core of its own."""
    start_s = time.thread_time()
    call()
    return time.thread_time() - start_s


def render_solvers(result: SolversResult) -> str:
    """Return both tables, in Markdown."""
    return "\n".join(
        [
            "assignment of samples, costs and both stages: processor time, median [10 %, 90 %] of rounds",
            "share of the time that hides it: the median over dispatch + experts of the paper; aim: "
            f"1/{HIDDEN}",
            "",
            *markdown_table(_solved_rows(result.solved)),
            "",
            "planners of replicas for one layer, one expert on each rank; the same",
            "",
            *markdown_table(_planned_rows(result.planned)),
        ]
    )


def _solved_rows(solved: tuple[Solved, ...]) -> list[list[str]]:
    head = ["nodes x devices", "samples", *(f"{name} ms" for name in SOLVERS)]
    rows = [[*head, "paper's solver ms", "dispatch + experts ms", "share of the time that hides it"]]
    for row in solved:
        times = [row.solver_s[name].text(1e3, ".3g") if name in row.solver_s else "" for name in SOLVERS]
        published = ["", "", ""]
        if row.published is not None:
            share = 1e3 * row.solver_s["network_simplex"].median / row.published.hiding_ms
            published = [f"{row.published.solver_ms:g}", f"{row.published.hiding_ms:g}", f"1/{1 / share:.0f}"]
        rows.append([f"{row.nodes} x {row.devices_per_node}", str(row.samples), *times, *published])
    return rows


def _planned_rows(planned: tuple[PlannedIn, ...]) -> list[list[str]]:
    rows = [["ranks", "replica slots", *(f"{name} ms" for name in PLANNERS)]]
    for row in planned:
        times = [row.seconds[name].text(1e3, ".3g") for name in PLANNERS]
        rows.append([str(row.ranks), str(row.replica_slots), *times])
    return rows


if __name__ == "__main__":
    about = "Measures how long assignments of samples and plans of replica experts take on the host."
    run_alone(parser_of("solvers", about), lambda _: measure_solvers(), render_solvers)
