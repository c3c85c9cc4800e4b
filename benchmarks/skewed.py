"""Skewed loads that drift slowly, as studies of hot experts have them, and the cluster on which they are
priced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from penstock.features.expert_replicas.problem import ExpertCosts, ExpertProblem
from penstock.placement import ExpertPlacement
from penstock.routing.links import Links
from penstock.routing.sizes import Floats, Ints

HOT: Final = 3
"""Experts that have more than half of the rows."""
HOT_SHARE: Final = 0.55
ROWS: Final = 8192
"""Of every rank: 4,096 tokens, two experts each."""
DRIFT: Final = 0.02
"""Share of the rows that follow another distribution one step later."""
ALIKE: Final = 100
"""How much alike ranks are: the concentration of their Dirichlet distributions around common weights."""
HIDDEN_SIZE: Final = 1024
FFN_SIZE: Final = 4096
BYTES: Final = 4
RANKS_PER_NODE: Final = 4


def drifting_loads(ranks: int, steps: int, drift: float = DRIFT) -> Iterator[Ints]:
    """Yield loads [P, E] for every step, one expert for each rank.

    A few experts are hot, on all ranks about the same ones, and change slowly.
    """
    rng = np.random.default_rng(0)
    shares_PE = _shares(rng, ranks)
    for _ in range(steps):
        hot_E = np.isin(np.arange(ranks), np.argsort(-shares_PE.sum(axis=0))[:HOT])
        for experts, share in ((hot_E, HOT_SHARE), (~hot_E, 1 - HOT_SHARE)):
            shares_PE[:, experts] *= share / shares_PE[:, experts].sum(axis=1, keepdims=True)
        yield rng.multinomial(ROWS, shares_PE)
        shares_PE = (1 - drift) * shares_PE + drift * _shares(rng, ranks)


def _shares(rng: np.random.Generator, experts: int) -> Floats:
    """Return shares of every rank's rows by expert, [P, E]: a few hot ones have HOT_SHARE."""
    weights = rng.dirichlet(np.full(experts, 2.0)) * (1 - HOT_SHARE)
    weights[rng.choice(experts, HOT, replace=False)] += rng.dirichlet(np.full(HOT, 8.0)) * HOT_SHARE
    return rng.dirichlet(ALIKE * weights + 1e-3, experts)


def costs(ranks: int, ratio: float) -> ExpertCosts:
    """Return the costs of one layer on nodes of 4 ranks, links inside nodes twice as fast as a node's card.

    Args:
        ranks: How many ranks there are.
        ratio: Time of the four transfers of evenly routed rows over that of the experts' computation, forward
            and backward.
    """
    nodes = tuple(np.repeat(np.arange(-(-ranks // RANKS_PER_NODE)), RANKS_PER_NODE)[:ranks].tolist())
    row_s, row_bytes = 1e-6, HIDDEN_SIZE * BYTES
    even = Links(nodes=nodes, across_s_per_byte=1.0, inside_s_per_byte=0.5)
    even_s = 4 * row_bytes * even.seconds(np.full((ranks, ranks), ROWS / ranks))
    byte_s = ratio * 3 * row_s * ROWS / even_s
    expert_bytes = 2 * HIDDEN_SIZE * FFN_SIZE * BYTES
    return ExpertCosts(
        links=Links(nodes=nodes, across_s_per_byte=byte_s, inside_s_per_byte=byte_s / 2),
        row_s=row_s,
        row_bytes=row_bytes,
        parameter_bytes=expert_bytes,
        gradient_bytes=expert_bytes,
        other_s=0.5 * row_s * ROWS,
    )


def expert_problem(
    ranks: int, replica_slots: int, ratio: float = 0.5, loads: Ints | None = None, *, exact: bool = True
) -> ExpertProblem:
    """Return one layer of one step.

    Args:
        ranks: How many ranks there are.
        replica_slots: Replicas that a rank can hold.
        ratio: See `costs`.
        loads: Rows of every rank for every expert, [P, E]; None = those of the first step.
        exact: Whether rows are split by their own loads.
    """
    return ExpertProblem(
        placement=ExpertPlacement.even(ranks, ranks),
        replica_slots=replica_slots,
        loads=next(drifting_loads(ranks, 1)) if loads is None else loads,
        costs=costs(ranks, ratio),
        exact=exact,
    )
