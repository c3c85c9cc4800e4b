"""A hosting under construction: hosts are added, experts' rows shared among them, and its time computed.

Rows of an expert that has several hosts may go to any of them. `near` sends them to the nearest host, which
is best for links; `level` shares them so that ranks compute alike. The number of rows per host decides which
rows a host gets: its own first, then those of its node.

Shapes: P ranks of the expert group, E experts, H hosts of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain

import numpy as np

from penstock.placement import EMPTY, SPLIT, Hosting, Part
from penstock.placing.exact import ExactSplit, filled, matched, tiers
from penstock.placing.integers import Ints
from penstock.placing.model import LayerLoad, LayerSeconds, copies_to, seconds_of
from penstock.placing.problem import ExpertProblem

PASSES = 6
"""Rounds in which the rows of all shared experts are levelled, one expert after the other."""

MOST_FLOWS = 1 << 20
"""Numbers of rows from rank to rank that are computed at once; those of many ranks and experts would fill the
memory."""


class Draft:
    """Hosts of every expert and the rows that each of them computes.

    hosts: by expert, ranks in ascending order. rows: by expert and host. computed: rows by rank.
    """

    def __init__(self, problem: ExpertProblem) -> None:
        self.problem = problem
        self.guests: list[list[int]] = [[] for _ in range(problem.ranks)]
        self.hosts = [sorted(host.rank for host in hosts) for hosts in problem.placement.hosts]
        self.rows: list[list[int]] = [[] for _ in self.hosts]
        self.computed = [0] * problem.ranks
        self.near()

    def copy(self) -> Draft:
        """Return an independent copy of this draft."""
        other = copy(self)
        other.guests, other.hosts, other.rows = (
            [list(each) for each in of] for of in (self.guests, self.hosts, self.rows)
        )
        other.computed = list(self.computed)
        return other

    @property
    def shared(self) -> list[int]:
        """Experts with several hosts, the largest first."""
        sizes = self.problem.expert_rows
        return sorted((e for e, hosts in enumerate(self.hosts) if len(hosts) > 1), key=lambda e: -sizes[e])

    def has_room(self, rank: int) -> bool:
        """Return whether a rank has a free guest slot."""
        return len(self.guests[rank]) < self.problem.replica_slots

    def add(self, expert: int, rank: int) -> None:
        """Make an expert a guest of a rank, without any rows at first."""
        assert self.has_room(rank) and rank not in self.hosts[expert]
        self.guests[rank].append(expert)
        place = sum(host < rank for host in self.hosts[expert])
        self.hosts[expert].insert(place, rank)
        self.rows[expert].insert(place, 0)

    def put(self, expert: int, rows: Sequence[int]) -> None:
        """Share the rows of an expert among its hosts as given."""
        before = self.rows[expert] or [0] * len(rows)
        for host, old, new in zip(self.hosts[expert], before, rows, strict=True):
            self.computed[host] += new - old
        self.rows[expert] = list(rows)

    def near(self) -> None:
        """Send every row to its own rank if that is a host, else to its node's hosts, else to the owner."""
        for expert in self.shared if self.rows[0] else range(len(self.hosts)):
            self.put(expert, self._nearest(expert))

    def level(self) -> None:
        """Share the rows of experts with several hosts so that hosts compute alike, as far as possible."""
        shared = self.shared
        for _ in range(PASSES):
            before = list(self.computed)
            for expert in shared:
                self.put(expert, self._levelled(expert))
            if self.computed == before:
                return

    def blend(self, others: Sequence[Sequence[int]]) -> None:
        """Move the rows of shared experts halfway to the given rows by expert and host."""
        for expert in self.shared:
            total = sum(self.rows[expert])
            half = [(a + b) // 2 for a, b in zip(self.rows[expert], others[expert], strict=True)]
            half[0] += total - sum(half)
            self.put(expert, half)

    def load(self) -> LayerLoad:
        """Return the draft's load on ranks and links."""
        problem = self.problem
        alone = [expert for expert, hosts in enumerate(self.hosts) if len(hosts) == 1]
        host_EP = np.eye(problem.ranks)[[self.hosts[expert][0] for expert in alone]]
        traffic = problem.loads[:, alone] @ host_EP
        for flows_PP in self.flows(self.shared):
            traffic += flows_PP
        return LayerLoad(traffic=traffic, copies=copies_to(self.guests, problem.placement))

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
                room_P[self.hosts[expert]] = self.rows[expert]
            yield from matched(self.problem.loads.T[None, some], room_JP[None], near)[0]

    def limit(self, wanted: int | None = None) -> int | None:
        """Return the most a rank computes, in SPLITths of the mean: `wanted`, or the draft's maximum.

        None where rows are not split by the loads of the step that runs, or where no expert is shared.
        """
        if not (self.problem.exact and self.shared):
            return None
        here = -(-max(self.computed) * SPLIT * len(self.computed) // max(1, sum(self.computed)))
        return wanted or max(SPLIT, here)

    def split_seconds(self, limit: int | None) -> LayerSeconds:
        """Return the time of the layer with rows split under a limit; None: with the draft's own rows."""
        problem, empty = self.problem, [EMPTY] * self.problem.replica_slots
        if limit is None:
            return self.seconds()
        held = [
            (*problem.placement.held(rank), *(guests + empty)[: problem.replica_slots])
            for rank, guests in enumerate(self.guests)
        ]
        split = ExactSplit(tuple(chain(*held)), problem.costs.links.nodes, limit)
        traffic = split.table(problem.loads[:, None]).sum(axis=(2, 3)).astype(np.float64)
        load = LayerLoad(traffic=traffic, copies=copies_to(self.guests, problem.placement))
        return seconds_of(problem.costs, load)

    def hosting(self, limit: int | None = None) -> Hosting:
        """Return the finished record. limit: of a hosting split by the loads of the step that runs."""
        problem = self.problem
        slots = problem.replica_slots
        guests = [g + [EMPTY] * (slots - len(g)) for g in self.guests]
        plain = Hosting.local(problem.placement, guests, limit)
        if limit is not None:  # rows are split by the loads of a later step
            return plain
        splits = [list(of_rank) for of_rank in plain.splits]
        shared = self.shared
        for expert, flows_PP in zip(shared, self.flows(shared), strict=True):
            positions = [_position(plain, host, expert) for host in self.hosts[expert]]
            for rank, flows in enumerate(flows_PP[:, self.hosts[expert]].tolist()):
                if rank in self.hosts[expert] and not sum(flows):
                    continue  # any later row is computed where it starts
                parts = apportioned(flows if sum(flows) else self.rows[expert])
                splits[rank][expert] = tuple(
                    Part(position, share) for position, share in zip(positions, parts, strict=True) if share
                )
        found = tuple(tuple(each) for each in splits)
        return Hosting(problem.placement, slots, plain.guests, found)

    def _nearest(self, expert: int) -> list[int]:
        problem, hosts = self.problem, self.hosts[expert]
        column, owner = problem.loads[:, expert], problem.placement.owners[expert]
        if len(hosts) == 1:
            return [int(problem.expert_rows[expert])]
        nodes = problem.costs.links.nodes
        rows = dict.fromkeys(hosts, 0)
        for rank, count in enumerate(column.tolist()):
            close = [host for host in hosts if nodes[host] == nodes[rank]]
            rows[
                rank if rank in rows else min(close, key=lambda host: (rows[host], host), default=owner)
            ] += count
        return [rows[host] for host in hosts]

    def _levelled(self, expert: int) -> list[int]:
        """Return rows by host so that hosts compute alike: those with the least other work fill up first."""
        pairs = zip(self.hosts[expert], self.rows[expert], strict=True)
        return filled(
            [self.computed[host] - rows for host, rows in pairs], int(self.problem.expert_rows[expert])
        )


def apportioned(rows: Sequence[int]) -> list[int]:
    """Return SPLIT parts in proportion to `rows`: whole parts, the largest remainders rounded up; all to the
    first place if there are no rows."""
    total = sum(rows)
    if not total:
        return [SPLIT, *[0] * (len(rows) - 1)]
    parts = [count * SPLIT // total for count in rows]
    by_remainder = sorted(range(len(rows)), key=lambda i: (-(rows[i] * SPLIT % total), i))
    for place in by_remainder[: SPLIT - sum(parts)]:
        parts[place] += 1
    return parts


def _position(hosting: Hosting, rank: int, expert: int) -> int:
    """Return the position at which a rank holds an expert that it hosts."""
    return hosting.by_position.index(expert, rank * hosting.slots)
