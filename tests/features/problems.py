"""Problems of both kinds: samples with experts spread evenly, and loads of experts, even to extreme."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from penstock.features.expert_replicas.problem import ExpertCosts, ExpertProblem
from penstock.features.sample_placement.assign import Nearness, SampleProblem, sample_problem
from penstock.placement import ExpertPlacement, Replication
from penstock.routing.links import Links
from penstock.routing.sizes import Ints


def even_problem(
    counts: Ints, homes: Ints, nodes: Ints, following: Ints | None = None, moved_rows: int = 0
) -> SampleProblem:
    """With the even placement in both layers. counts, following: [I, E], rows. nodes: by device."""
    replication = Replication.none(ExpertPlacement.even(counts.shape[1], len(nodes)), 0)
    return sample_problem(
        counts=counts,
        homes=homes,
        moved_rows=np.full(len(homes), moved_rows),
        node_of_device=nodes,
        predictions=following,
        following=None if following is None else Nearness.of(replication, nodes),
    )


def costs_of(
    nodes: tuple[int, ...], byte_s: float = 1e-9, row_s: float = 1e-5, expert_bytes: float = 1e6
) -> ExpertCosts:
    """Rows of 4 kB; links inside nodes twice as fast as a node's card."""
    return ExpertCosts(
        links=Links(nodes=nodes, across_s_per_byte=byte_s, inside_s_per_byte=byte_s / 2),
        row_s=row_s,
        row_bytes=4096,
        parameter_bytes=expert_bytes,
        gradient_bytes=expert_bytes,
        other_s=1e-3,
    )


def skewed_loads(
    rng: np.random.Generator, ranks: int, experts: int, *, hot: int = 3, share: float = 0.55, rows: int = 4096
) -> Ints:
    """[P, E]: on every rank about the same few experts have `share` of the rows."""
    weights = rng.dirichlet(np.full(experts, 2.0)) * (1 - share)
    weights[rng.choice(experts, hot, replace=False)] += rng.dirichlet(np.full(hot, 8.0)) * share
    return np.stack([rng.multinomial(rows, rng.dirichlet(weights * 60 + 1e-6)) for _ in range(ranks)])


@st.composite
def expert_problems(draw: st.DrawFn) -> ExpertProblem:
    """Up to 3 nodes of up to 4 ranks, several experts each, all kinds of loads, links from fast to slow."""
    nodes = np.repeat(np.arange(draw(st.integers(1, 3))), draw(st.integers(1, 4)))
    ranks, held = len(nodes), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    loads = {
        "even": np.full((ranks, ranks * held), 7),
        "none": np.zeros((ranks, ranks * held), np.int64),
        "one expert": 900 * np.eye(1, ranks * held, dtype=np.int64).repeat(ranks, axis=0),
        "random": rng.integers(0, 50, (ranks, ranks * held)),
        "skewed": skewed_loads(rng, ranks, ranks * held, hot=1, rows=500),
    }
    shuffled = rng.permutation(ranks * held).reshape(ranks, held).tolist()
    return ExpertProblem(
        placement=ExpertPlacement.of(shuffled),
        replica_slots=draw(st.integers(1, 3)),
        loads=loads[draw(st.sampled_from(list(loads)))],
        costs=costs_of(
            tuple(nodes.tolist()),
            byte_s=draw(st.sampled_from((1e-12, 1e-9, 1e-7))),
            expert_bytes=draw(st.sampled_from((1e3, 1e6))),
        ),
    )
