"""Planners that share an expert's rows among several homes: by load alone, and by load, links and price."""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.features.expert_replicas.builder import ReplicationBuilder
from penstock.features.expert_replicas.model import copies_to, exposed_s, layer_seconds
from penstock.features.expert_replicas.problem import ExpertProblem
from penstock.placement import SPLIT, Replication
from penstock.routing.integers import Floats, Ints
from penstock.routing.links import Links


class Ways:
    """The load of links by copies of experts on their way to homes: one more is priced without a recount.

    copies: by owner and home, [P, P].
    """

    def __init__(self, links: Links, copies: Ints) -> None:
        self._links, self._busiest_s = links, links.seconds(copies)
        self._carried: Counter[tuple[str, bool, int]] = Counter()
        for owner, home in zip(*map(list, copies.nonzero()), strict=True):
            for end in self._ends(int(owner), int(home)):
                self._carried[end] += int(copies[owner, home])

    def with_one_more(self, owner: int, home: int) -> float:
        """Return the seconds of the busiest link, per byte of an expert, if one more copy were in transit."""
        links, ends = self._links, self._ends(owner, home)
        _, across, _ = ends[0]
        copy_s = links.across_s_per_byte if across else links.inside_s_per_byte
        return max(self._busiest_s, *(copy_s * (self._carried[end] + 1) for end in ends))

    def add(self, owner: int, home: int) -> None:
        """Add one more copy in transit."""
        self._busiest_s = self.with_one_more(owner, home)
        self._carried.update(self._ends(owner, home))

    def _ends(self, owner: int, home: int) -> tuple[tuple[str, bool, int], tuple[str, bool, int]]:
        """Return, by end of a way, whether it leaves the node, and whose link it uses: rank or node."""
        nodes = self._links.nodes
        across = nodes[owner] != nodes[home]
        if across and not self._links.card_per_rank:
            owner, home = nodes[owner], nodes[home]
        return ("out", across, owner), ("in", across, home)


NEGLIGIBLE = 0.005
"""Share of the mean rows of a rank that is not worth a replica."""

EVEN = round(SPLIT * (1 + NEGLIGIBLE))
"""The limit of a replication whose ranks are to compute alike."""

HARMLESS = 1.001
"""How much longer the present loads may take with replicas in reserve: more homes change the ways of rows."""

PATIENCE = 4
"""Replicas that may be added in a row without making the plan faster."""


def least_loaded(problem: ExpertProblem) -> Replication:
    """Return a replication that moves surplus rows of the most loaded rank, with weights, to the least loaded
    one, whatever the price."""
    evened = _evened_out(problem)
    return evened.replication(evened.limit(EVEN))


def _evened_out(problem: ExpertProblem) -> ReplicationBuilder:
    builder = ReplicationBuilder(problem)
    while (pair := _surplus(builder)) is not None:
        builder.add(*pair)
        builder.level()
    return builder


def _surplus(builder: ReplicationBuilder) -> tuple[int, int] | None:
    """Return the largest expert of the most loaded rank that the least loaded rank with room can take, and
    that rank; None if loads are even."""
    mean = builder.problem.mean_rows
    ranks = sorted(range(len(builder.computed)), key=lambda rank: builder.computed[rank])
    heaviest = ranks[-1]
    if builder.computed[heaviest] <= (1 + NEGLIGIBLE) * mean:
        return None
    held = [e for e, homes in enumerate(builder.homes) if heaviest in homes]
    for rank in ranks:
        free = [expert for expert in held if rank not in builder.homes[expert]]
        if builder.computed[rank] < mean and builder.has_room(rank) and free:
            there = {expert: builder.homes[expert].index(heaviest) for expert in free}
            return max(free, key=lambda expert: (builder.rows[expert][there[expert]], -expert)), rank
    return None


def planned(problem: ExpertProblem) -> Replication:
    """Return the fastest plan, by rank and link, of those met while replicas are added where most promising.

    A replica is worth the computation that it evens out, and the rows that it keeps in a rank or a node, less
    the weights that cross links beyond what the schedule hides. Each plan is tried with its rows near and
    levelled, the best one also halfway between: tokens travel or weights travel, whichever costs less.
    """
    builder = ReplicationBuilder(problem)
    time = builder.seconds()
    best, best_s, waited = builder.copy(), time.total_s, 0
    while waited < PATIENCE and (pair := _promising(builder, exposed=time.weights_s > 0)) is not None:
        builder.add(*pair)
        waited += 1
        for share in (builder.near, builder.level):
            share()
            time = builder.seconds()
            if time.total_s < best_s:
                best, best_s, waited = builder.copy(), time.total_s, 0
    evened = _evened_out(problem)  # for loads where no replica pays before many have been added
    plans = (best, _between(best), evened, _between(evened))
    if not problem.exact:
        return min(plans, key=lambda plan: plan.seconds().total_s).replication()
    tried = [*((plan, plan.limit()) for plan in plans), (evened, evened.limit(EVEN))]
    best, limit = min(tried, key=lambda each: each[0].split_seconds(each[1]).total_s)
    none = Replication.none(problem.placement, problem.replica_slots)
    time = best.split_seconds(limit)
    if layer_seconds(problem, none).total_s <= time.total_s:
        return none
    # The plan with free slots filled as far as the schedule hides it, the least busy ranks
    # first.
    builder = best.copy()
    problem, costs, placement = builder.problem, builder.problem.costs, builder.problem.placement
    ways, experts_s = Ways(costs.links, copies_to(builder.replicas, placement)), time.experts_s / 3
    for _ in range(problem.replica_slots):
        for rank in sorted(filter(builder.has_room, range(problem.ranks)), key=builder.computed.__getitem__):
            # The expert whose homes one more home would relieve most, if it got a mean expert's rows more.
            rows_E, held = problem.expert_rows, [*placement.held(rank), *builder.replicas[rank]]
            homes_E = np.array([len(homes) for homes in builder.homes])
            urgency_E = (rows_E + rows_E.mean()) / homes_E**2
            urgency_E[held] = -np.inf
            if len(held) == len(homes_E):
                continue
            expert = int(urgency_E.argmax())
            way = placement.owners[expert], rank
            if exposed_s(costs, ways.with_one_more(*way), experts_s) <= time.weights_s:
                builder.add(expert, rank)
                ways.add(*way)
    reserved = builder
    holds = reserved.split_seconds(limit).total_s <= HARMLESS * time.total_s
    return (reserved if holds else best).replication(limit)


def _between(builder: ReplicationBuilder) -> ReplicationBuilder:
    """Return the plan with its rows halfway between near and levelled."""
    half = builder.copy()
    half.near()
    near = [list(rows) for rows in half.rows]
    half.level()
    half.blend(near)
    return half


def _promising(builder: ReplicationBuilder, exposed: bool) -> tuple[int, int] | None:
    """Return the expert and rank whose replica promises to save most seconds; None if none promises any.

    exposed: whether Trans or Agg take longer than the schedule hides, so that weights have a price.
    """
    problem, costs = builder.problem, builder.problem.costs
    owners = list(problem.placement.owners)
    to_rank_s = costs.links.pair_s_per_byte[owners]
    # The rows above the mean of an expert's homes that fit below the mean of a rank, [E, P].
    mean = problem.mean_rows
    above = [max(0.0, computed - mean) for computed in builder.computed]
    surplus = [
        sum(min(count, above[home]) for home, count in zip(homes, rows, strict=True))
        for homes, rows in zip(builder.homes, builder.rows, strict=True)
    ]
    below = np.maximum(0, mean - np.array(builder.computed))
    evened: Floats = np.minimum(np.array(surplus)[:, None], below)
    heaviest = max(builder.computed)
    room = np.maximum(evened, heaviest - np.array(builder.computed))
    # The rows that a replica would keep from crossing to the owner, [E, P]: all of its node where the node
    # has no home, else the rank's own.
    nodes = np.array(costs.links.nodes)
    held_EN = np.zeros(problem.node_loads.T.shape, bool)
    for expert, homes in enumerate(builder.homes):
        held_EN[expert, nodes[homes]] = True
    kept = np.where(held_EN[:, nodes], problem.loads.T, problem.node_loads.T[:, nodes])
    kept_s = 4 * costs.row_bytes * np.minimum(kept, room) * to_rank_s
    weights_s = (costs.parameter_bytes + costs.gradient_bytes) * to_rank_s * exposed
    scores: Floats = 3 * costs.row_s * evened + kept_s - weights_s
    for each, homes in enumerate(builder.homes):
        scores[each, homes] = -np.inf
    scores[:, [not builder.has_room(rank) for rank in range(problem.ranks)]] = -np.inf
    best, rank = np.unravel_index(int(scores.argmax()), scores.shape)
    return (int(best), int(rank)) if scores[best, rank] > 0 else None
