"""A replication under construction: homes are added, experts' rows shared among them, and its time computed.

Rows of an expert that has several homes may go to any of them. `near` sends them to the nearest home, which
is best for links; `level` shares them so that ranks compute alike. The number of rows per home decides which
rows a home gets: its own first, then those of its node.

Shapes: P ranks of the expert group, E experts, H homes of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain

import numpy as np

from penstock.apportion import apportion
from penstock.features.expert_replicas.problem import (
    ExpertProblem,
    LayerLoad,
    LayerSeconds,
    copies_to,
    seconds_of,
)
from penstock.placement import EMPTY, SPLIT, Part, Replication
from penstock.routing.replicas import ExactSplit, filled, matched, tiers
from penstock.routing.sizes import Ints

PASSES = 6
"""Rounds in which the rows of all shared experts are levelled, one expert after the other."""

MOST_FLOWS = 1 << 20
"""Numbers of rows from rank to rank that are computed at once; those of many ranks and experts would fill the
memory."""


class ReplicationBuilder:
    """The homes of every expert and the rows that each of them computes.

    Attributes:
        homes: The ranks of every expert, in ascending order.
        rows: The rows of every expert, by home.
        computed: The rows of every rank.
    """

    def __init__(self, problem: ExpertProblem) -> None:
        self.problem = problem
        self.replicas: list[list[int]] = [[] for _ in range(problem.ranks)]
        self.homes = [[owner] for owner in problem.placement.owners]
        self.rows: list[list[int]] = [[] for _ in self.homes]
        self.computed = [0] * problem.ranks
        self.near()

    def copy(self) -> ReplicationBuilder:
        """Return an independent copy of this builder."""
        other = copy(self)
        other.replicas, other.homes, other.rows = (
            [list(each) for each in of] for of in (self.replicas, self.homes, self.rows)
        )
        other.computed = list(self.computed)
        return other

    @property
    def shared(self) -> list[int]:
        """Experts with several homes, the largest first."""
        sizes = self.problem.expert_rows
        return sorted((e for e, homes in enumerate(self.homes) if len(homes) > 1), key=lambda e: -sizes[e])

    def has_room(self, rank: int) -> bool:
        """Return whether a rank has a free replica slot."""
        return len(self.replicas[rank]) < self.problem.replica_slots

    def add(self, expert: int, rank: int) -> None:
        """Make an expert a replica of a rank, without any rows at first."""
        assert self.has_room(rank) and rank not in self.homes[expert]
        self.replicas[rank].append(expert)
        place = sum(home < rank for home in self.homes[expert])
        self.homes[expert].insert(place, rank)
        self.rows[expert].insert(place, 0)

    def put(self, expert: int, rows: Sequence[int]) -> None:
        """Share the rows of an expert among its homes as given."""
        before = self.rows[expert] or [0] * len(rows)
        for home, old, new in zip(self.homes[expert], before, rows, strict=True):
            self.computed[home] += new - old
        self.rows[expert] = list(rows)

    def near(self) -> None:
        """Send every row to its own rank if that is a home, else to its node's homes, else to the owner."""
        for expert in self.shared if self.rows[0] else range(len(self.homes)):
            self.put(expert, self._nearest(expert))

    def level(self) -> None:
        """Share the rows of experts with several homes so that homes compute alike, as far as possible."""
        shared = self.shared
        for _ in range(PASSES):
            before = list(self.computed)
            for expert in shared:
                # Homes compute alike: those with the least other work fill up first.
                pairs = zip(self.homes[expert], self.rows[expert], strict=True)
                others = [self.computed[home] - rows for home, rows in pairs]
                self.put(expert, filled(others, int(self.problem.expert_rows[expert])))
            if self.computed == before:
                return

    def blend(self, others: Sequence[Sequence[int]]) -> None:
        """Move the rows of shared experts halfway to the given rows by expert and home."""
        for expert in self.shared:
            total = sum(self.rows[expert])
            half = [(a + b) // 2 for a, b in zip(self.rows[expert], others[expert], strict=True)]
            half[0] += total - sum(half)
            self.put(expert, half)

    def load(self) -> LayerLoad:
        """Return the builder's load on ranks and links."""
        problem = self.problem
        alone = [expert for expert, homes in enumerate(self.homes) if len(homes) == 1]
        alone.sort(key=lambda expert: self.homes[expert][0])
        ranks, firsts = np.unique([self.homes[expert][0] for expert in alone], return_index=True)
        traffic = np.zeros((problem.ranks, problem.ranks))
        if alone:
            traffic[:, ranks] = np.add.reduceat(problem.loads[:, alone], firsts, axis=1)
        for flows_PP in self.flows(self.shared):
            traffic += flows_PP
        return LayerLoad(traffic=traffic, copies=copies_to(self.replicas, problem.placement))

    def seconds(self) -> LayerSeconds:
        """Return the time of the layer, by rank and link."""
        return seconds_of(self.problem.costs, self.load())

    def flows(self, experts: Sequence[int]) -> Iterator[Ints]:
        """Yield the rows of some experts from every rank to every rank, [P, P] by expert."""
        links = self.problem.costs.links
        near, together = tiers(links.nodes), max(1, MOST_FLOWS // links.across.size)
        for first in range(0, len(experts), together):
            some = experts[first : first + together]
            room_JP = np.zeros((len(some), self.problem.ranks), np.int64)
            for room_P, expert in zip(room_JP, some, strict=True):
                room_P[self.homes[expert]] = self.rows[expert]
            yield from matched(self.problem.loads.T[None, some], room_JP[None], near)[0]

    def limit(self, wanted: int | None = None) -> int | None:
        """Return the most a rank computes, in SPLITths of the mean: `wanted`, or the builder's maximum.

        The result is None where rows are not split by the loads of the step that runs, or where no expert is
        shared.
        """
        if not (self.problem.exact and self.shared):
            return None
        here = -(-max(self.computed) * SPLIT * len(self.computed) // max(1, sum(self.computed)))
        return wanted or max(SPLIT, here)

    def split_seconds(self, limit: int | None) -> LayerSeconds:
        """Return the time of the layer with rows split under a limit; None: with the builder's own rows."""
        problem, empty = self.problem, [EMPTY] * self.problem.replica_slots
        if limit is None:
            return self.seconds()
        held = [
            (*problem.placement.held(rank), *(replicas + empty)[: problem.replica_slots])
            for rank, replicas in enumerate(self.replicas)
        ]
        split = ExactSplit(tuple(chain(*held)), problem.costs.links.nodes, limit)
        traffic = split.table(problem.loads[:, None]).sum(axis=(2, 3)).astype(np.float64)
        load = LayerLoad(traffic=traffic, copies=copies_to(self.replicas, problem.placement))
        return seconds_of(problem.costs, load)

    def replication(self, limit: int | None = None) -> Replication:
        """Return the finished record.

        Args:
            limit: The limit of a replication that is split by the loads of the step that runs; None = rows
                are split as the builder has them.
        """
        problem = self.problem
        slots = problem.replica_slots
        replicas = [g + [EMPTY] * (slots - len(g)) for g in self.replicas]
        plain = Replication.local(problem.placement, replicas, limit)
        if limit is not None:  # rows are split by the loads of a later step
            return plain
        splits = [list(of_rank) for of_rank in plain.splits]
        shared = self.shared
        for expert, flows_PP in zip(shared, self.flows(shared), strict=True):
            positions = [plain.by_position.index(expert, home * plain.slots) for home in self.homes[expert]]
            flows_PH = flows_PP[:, self.homes[expert]]
            sends_P = flows_PH.sum(axis=1) > 0
            flows_PH[~sends_P] = self.rows[expert]
            flows_PH[flows_PH.sum(axis=1) == 0, 0] = 1  # no rows anywhere: the first home gets all
            for rank, parts in enumerate(apportion(flows_PH, SPLIT).tolist()):
                if rank in self.homes[expert] and not sends_P[rank]:
                    continue  # any later row is computed where it starts
                splits[rank][expert] = tuple(
                    Part(position, share) for position, share in zip(positions, parts, strict=True) if share
                )
        by_rank = tuple(tuple(each) for each in splits)
        return Replication(problem.placement, slots, plain.replicas, by_rank)

    def _nearest(self, expert: int) -> list[int]:
        problem, homes = self.problem, self.homes[expert]
        column, owner = problem.loads[:, expert], problem.placement.owners[expert]
        if len(homes) == 1:
            return [int(problem.expert_rows[expert])]
        nodes = problem.costs.links.nodes
        rows = dict.fromkeys(homes, 0)
        for rank, count in enumerate(column.tolist()):
            close = [home for home in homes if nodes[home] == nodes[rank]]
            rows[
                rank if rank in rows else min(close, key=lambda home: (rows[home], home), default=owner)
            ] += count
        return [rows[home] for home in homes]
