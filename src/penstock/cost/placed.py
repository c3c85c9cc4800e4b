"""What is known of a step's routing, and the rows that ranks then get. No torch.

Shapes: D groups of ranks with the same samples, B samples of such a group, Y MoE layers, E experts, P ranks
of the world, R microbatches, C slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.apportion import Counts
from penstock.cost.workload import Workload
from penstock.mesh import Group
from penstock.placement import Replication
from penstock.routing.replicas import rows_by_position
from penstock.routing.rows import Placed, by_source_and_target
from penstock.step import StepShape


@dataclass(frozen=True, eq=False)
class Evidence:
    """Routing of two consecutive steps: token copies [D, B, Y, E] of samples for experts.

    A sample of a large step has fewer layers, and fewer groups of ranks: whole expert groups and nodes that
    stand for all others.

    Attributes:
        before_DBYE: The routing of the step from whose loads replicas are planned.
        now_DBYE: The routing of the step that is priced.
        columns: The layer of the arrays that stands for each MoE layer of the step; () = each has its own.
    """

    before_DBYE: Counts
    now_DBYE: Counts
    columns: tuple[int, ...] = ()

    @property
    def known_layers(self) -> int:
        """MoE layers that are known."""
        return int(self.now_DBYE.shape[2])

    def by_layer(self, by_column: Counts) -> Counts:
        """Return what is known of some layers for every MoE layer of the step, along the first axis."""
        return by_column[list(self.columns)] if self.columns else by_column

    def of_layers(self, moe_layers: Sequence[int]) -> Evidence:
        """Return the evidence of some of the MoE layers."""
        kept = [self.columns[layer] for layer in moe_layers] if self.columns else list(moe_layers)
        return Evidence(self.before_DBYE[:, :, kept], self.now_DBYE[:, :, kept])

    def part_of(self, work: Workload) -> Workload:
        """Return the workload with the ranks alone that are known."""
        return work.part(len(self.now_DBYE))


def rank_loads(counts_DBYE: Counts, shape: StepShape, work: Workload) -> Counts:
    """Return rows by place in an expert group, the mean of all such groups, [Y, ranks of such a group, E]."""
    rows_PYE = work.cut(shape).rows_in_all(counts_DBYE)
    places = [work.mesh.place(rank, Group.EXPERT) for rank in range(work.world_size)]
    by_place = np.zeros((work.ep_size, *rows_PYE.shape[1:]), np.int64)
    np.add.at(by_place, places, rows_PYE)
    mean = by_place / work.mesh.size(Group.EXPERT_DATA)
    return np.rint(mean).astype(np.int64).transpose(1, 0, 2)


def received_rows(counts_DBYE: Counts, placed: Placed | None, shape: StepShape, work: Workload) -> Counts:
    """Return the rows that every rank's experts and replicas receive in a step, by MoE layer, [Y, P].

    Args:
        placed: The places of samples and replicas; None = nothing moves.
    """
    leaving = counts_DBYE if placed is None else placed.leaving(counts_DBYE)
    replications = () if placed is None else placed.replications
    if replications:
        rows_PRCYE = work.cut(shape).rows(leaving)
    else:  # pieces need not be told apart
        rows_PRCYE = work.cut(shape).rows_in_all(leaving)[:, None, None]
    received = []
    for layer in range(leaving.shape[2]):
        replication = replications[layer] if replications else None
        pieces = rows_PRCYE[..., layer, :].reshape(len(rows_PRCYE), -1, work.num_experts)
        tables = [by_target(pieces[:, n], replication, work) for n in range(pieces.shape[1])]
        received.append(received_of(np.sum(tables, axis=0), work))
    return np.stack(received)


def by_target(rows_PE: Counts, replication: Replication | None, work: Workload) -> Counts:
    """Return rows of one piece by who brings them and who computes them, [G, S, H, T, N]: see
    `by_source_and_target`.

    Args:
        replication: The replicas, which share every piece by itself; None = every expert has one home.
    """
    if replication is None:
        return by_source_and_target(rows_PE, work.placement, work.etp_size)
    rows_PH, ranks = rows_by_position(rows_PE, replication, work.mesh), replication.placement.ranks
    return rows_PH.reshape(-1, ranks, work.etp_size, ranks, replication.slots)


def received_of(table_GSHTN: Counts, work: Workload) -> Counts:
    """Return rows that every rank's experts get, [P]: those of all shards, whichever rank brings them."""
    return np.repeat(table_GSHTN.sum(axis=(1, 2, 4)).reshape(-1), work.etp_size)
