"""What placement costs the host: the sizes that are timed, and the text."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.layer.measure import Band
from benchmarks.solvers import (
    NETMOE,
    PlannedIn,
    Solved,
    SolversResult,
    measure_solvers,
    render_solvers,
    sample_assignment,
)
from penstock.features.expert_replicas.planners import PLANNERS
from penstock.features.sample_placement.assign import SOLVERS, assign


def band(median: float) -> Band:
    return Band(median=median, low=0.9 * median, high=1.1 * median)


RESULT = SolversResult(
    solved=(
        Solved(
            nodes=2,
            devices_per_node=8,
            samples=384,
            solver_s={name: band(0.0005) for name in SOLVERS},
            published=NETMOE[-1],
        ),
        Solved(nodes=128, devices_per_node=1, samples=4096, solver_s={"network_simplex": band(0.06)}),
    ),
    planned=(PlannedIn(ranks=16, replica_slots=1, seconds={name: band(0.004) for name in PLANNERS}),),
)


def test_a_result_becomes_tables() -> None:
    lines = [" ".join(line.split()) for line in render_solvers(RESULT).splitlines()]
    assert lines[5] == "| 2 x 8 | 384 | 0.5 [0.45, 0.55] | 0.5 [0.45, 0.55] | 31.1 | 41.7 | 1/83 |"
    assert lines[6] == "| 128 x 1 | 4096 | 60 [54, 66] | | | | |"
    assert lines[-1].startswith("| 16 | 1 | 4 [3.6, 4.4] |")


@pytest.mark.slow
def test_samples_of_the_table_find_better_homes() -> None:
    problem = sample_assignment(2, 8, 4)
    homes = assign(problem)
    assert np.bincount(homes).tolist() == [4] * 16
    assert problem.rows(homes)[0] < problem.rows(problem.homes)[0]


@pytest.mark.soak
@pytest.mark.slow
def test_all_sizes_are_timed() -> None:
    found = measure_solvers(rounds=1)
    assert [row.published for row in found.solved] == [*NETMOE, None]
    assert all(set(row.seconds) == set(PLANNERS) for row in found.planned)
