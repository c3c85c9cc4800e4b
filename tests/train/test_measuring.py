"""How even a step's loads are: what all ranks find together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.mesh import Mesh
from penstock.train.measuring import RowsOfReplicas, load_figures, max_over_mean
from tests.runtime.features.expert_replicas.test_moving import small
from tests.support.cases import ROUTINGS, hosting_case
from tests.support.parity import Case, own_batch
from tests.support.ranks import Pools
from tests.support.replicas import RandomReplicas, stack_with_replicas


def measured(rank: int, case: Case) -> tuple[Any, ...]:
    """Of the second step: its loads, what this rank's group hosted, and two metrics."""
    stack = stack_with_replicas(rank, case, RandomReplicas(moving=small(2, "least_loaded")))
    for _ in range(2):
        stack(*own_batch(rank, case)).backward()
    found = load_figures(stack)
    figures = found["rank_rows_max_over_mean"], found["rows_crossing_nodes"]
    return stack.loads[-1], stack.loads.replications, figures


def test_replicas_of_all_expert_groups_count(ranks: Pools) -> None:
    """Two groups of two ranks; the second has more rows, and other replicas."""
    case = replace(hosting_case(4, ROUTINGS[0], "flowmoe"), ep_size=2, node_size=1, batches=(2, 1, 4, 5))
    found, mesh = ranks(4).run(measured, case), Mesh(world_size=4, ep_size=2)
    loads, replications, figures = found[0]
    assert all(each[2] == figures for each in found)
    assert replications != found[2][1]
    groups = [RowsOfReplicas.of_group(loads, found[first][1], mesh, 1, first) for first in (0, 2)]
    assert all((group.rows_PY.sum(axis=1) > 0).sum() == 2 for group in groups), "each knows its own"
    together = RowsOfReplicas.joined([groups[rank // 2].share(mesh, rank) for rank in range(4)])
    assert together.rows_PY.sum() == loads.sum()
    crossing = together.away_Y / loads.sum(axis=(0, 2))
    assert figures == (tuple(max_over_mean(together.rows_PY.T)), tuple(crossing))
