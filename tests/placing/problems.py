"""Assignment problems with experts spread evenly."""

from __future__ import annotations

import numpy as np

from penstock.placement import ExpertPlacement, Hosting
from penstock.placing import Nearness, SampleProblem, sample_problem
from penstock.placing.integers import Ints


def even_problem(
    counts: Ints, homes: Ints, nodes: Ints, following: Ints | None = None, moved_rows: int = 0
) -> SampleProblem:
    """With the even placement in both layers. counts, following: [I, E], rows. nodes: by device."""
    hosting = Hosting.none(ExpertPlacement.even(counts.shape[1], len(nodes)), 0)
    return sample_problem(
        counts=counts,
        homes=homes,
        moved_rows=np.full(len(homes), moved_rows),
        node_of_device=nodes,
        predictions=following,
        following=Nearness.of(hosting, nodes),
    )
