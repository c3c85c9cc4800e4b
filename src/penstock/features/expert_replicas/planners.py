"""Planners that others have published: Pro-Prophet's greedy search, and FasterMoE's shadowing.

Both give replicas only the rows of the replicas' own ranks. Both assume an unlimited number of replicas; here
a rank has `replica_slots` of them, and a rank without a free slot is no home.

Shapes: P ranks of the expert group, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from penstock.features.expert_replicas.builder import ReplicationBuilder
from penstock.features.expert_replicas.problem import (
    ExpertProblem,
    LayerLoad,
    copies_to,
    exposed_s,
    layer_seconds,
    paper_seconds,
)
from penstock.placement import EMPTY, SPLIT, Replication
from penstock.routing.links import Links
from penstock.routing.sizes import Floats, Ints

BALANCED = 0.5
"""Alpha of Eq 7: loads are balanced if they differ by less than this share of an expert's mean rows."""

EXCLUDED = (0.0, 0.25, 0.5, 0.75)
"""Shares of all ranks that do not get an expert; the paper leaves the number open."""


def pro_prophet(problem: ExpertProblem) -> Replication:
    """Return Pro-Prophet's plan, with the number of excluded ranks for which Eq 8 promises most."""
    plans = [greedy(problem, excluded) for excluded in sorted({int(n * problem.ranks) for n in EXCLUDED})]
    _, best = min(plans, key=lambda plan: plan[0])
    return best.replication()


def greedy(problem: ExpertProblem, excluded: int) -> tuple[float, Replicas]:
    """Return the best prefix of copies of the heaviest ranks' experts: Algorithm 1 of Pro-Prophet.

    A rank with several experts gives its largest one that is not yet copied. The seconds are those of Eq 8.

    Args:
        excluded: The number n of ranks with the fewest rows of an expert, which do not get it; ties by rank.
    """
    replicas = Replicas(problem)
    load = replicas.load()
    best_s, best = paper_seconds(problem.costs, load.received, load.computed, 0, 0), replicas.taken()
    while not balanced(problem, load.computed):
        held = problem.placement.held(int(load.computed.argmax()))
        left = [expert for expert in held if expert not in replicas.copied]
        expert = max(left, key=lambda expert: (problem.expert_rows[expert], -expert), default=None)
        if expert is None:
            break
        owner = problem.placement.owners[expert]
        fewest = [
            rank for rank in np.argsort(problem.loads[:, expert], kind="stable").tolist() if rank != owner
        ]
        replicas.copy(expert, sorted(fewest[excluded:]))
        load = replicas.load()
        copied = len(replicas.copied)
        seconds = paper_seconds(problem.costs, load.received, load.computed, copied, excluded)
        if seconds < best_s:
            best_s, best = seconds, replicas.taken()
    return best_s, best


def balanced(problem: ExpertProblem, computed: Floats) -> bool:
    """Return whether loads of ranks differ by less than BALANCED times an expert's mean rows (Eq 7).

    Args:
        computed: The rows that every rank computes, [P].
    """
    mean = problem.loads.sum() / problem.placement.num_experts
    return bool(computed.max() - computed.min() < BALANCED * mean)


def shadowing(problem: ExpertProblem) -> Replication:
    """Return FasterMoE's plan: the most loaded experts go to all ranks, while its model promises a gain.

    Experts are copied one by one. The model (SYSTEMS 6.9) takes the largest expert for the load of a rank,
    and ignores what shadows add to that load.
    """
    costs, replicas = problem.costs, Replicas(problem)
    order = np.argsort(-problem.expert_rows, kind="stable").tolist()
    byte_s = costs.links.mean_s_per_byte
    per_row_s = 3 * costs.row_s + 4 * costs.row_bytes * byte_s
    best_s = per_row_s * float(problem.expert_rows[order[0]])
    for copies, (expert, following) in enumerate(pairwise(order), start=1):
        seconds = per_row_s * float(problem.expert_rows[following]) + copies * costs.parameter_bytes * byte_s
        if seconds >= best_s:
            break
        best_s = seconds
        replicas.copy(expert, range(problem.ranks))
    return replicas.replication()


class Replicas:
    """Experts that ranks have as replicas so far, for rows of their own.

    Attributes:
        copied: The experts that were given away, in that order.
        held: The replicas of every rank.
        targets: The rank to which rows go that start on rank p for expert e, [P, E].
    """

    def __init__(self, problem: ExpertProblem) -> None:
        self.problem = problem
        self.copied: list[int] = []
        self.held: list[list[int]] = [[] for _ in range(problem.ranks)]
        self.targets = np.tile(problem.placement.owners, (problem.ranks, 1))

    def copy(self, expert: int, ranks: Sequence[int]) -> None:
        """Make an expert a replica of those of some ranks that do not hold it and have a free slot."""
        self.copied.append(expert)
        for rank in ranks:
            if self.targets[rank, expert] != rank and len(self.held[rank]) < self.problem.replica_slots:
                self.held[rank].append(expert)
                self.targets[rank, expert] = rank

    def taken(self) -> Replicas:
        """Return a copy, to be kept while more experts are given away."""
        other = copy(self)
        other.copied, other.held = list(self.copied), [list(held) for held in self.held]
        other.targets = self.targets.copy()
        return other

    def load(self) -> LayerLoad:
        """Return the load on ranks and links."""
        ranks = self.problem.ranks
        cells = np.arange(ranks)[:, None] * ranks + self.targets
        traffic = np.bincount(cells.ravel(), self.problem.loads.ravel(), ranks * ranks).astype(np.float64)
        copies = copies_to(self.held, self.problem.placement)
        return LayerLoad(traffic=traffic.reshape(ranks, ranks), copies=copies)

    def replication(self) -> Replication:
        """Return the finished record."""
        slots = self.problem.replica_slots
        filled = [held + [EMPTY] * (slots - len(held)) for held in self.held]
        return Replication.local(self.problem.placement, filled)


# ---- planners that share an expert's rows among several homes: by load alone, and by load, links and price


class Ways:
    """The load of links by copies of experts on their way to homes: one more is priced without a recount.

    Args:
        copies: The copies from every owner to every home, [P, P].
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
    """Return the plan in which the most loaded rank's largest expert went, again and again, to the least
    loaded rank with room."""
    builder, mean = ReplicationBuilder(problem), problem.mean_rows
    while True:
        ranks = sorted(range(len(builder.computed)), key=builder.computed.__getitem__)
        heaviest = ranks[-1]
        if builder.computed[heaviest] <= (1 + NEGLIGIBLE) * mean:
            return builder
        held = [e for e, homes in enumerate(builder.homes) if heaviest in homes]
        for rank in ranks:
            free = [expert for expert in held if rank not in builder.homes[expert]]
            if builder.computed[rank] < mean and builder.has_room(rank) and free:
                rows = {e: builder.rows[e][builder.homes[e].index(heaviest)] for e in free}
                builder.add(max(free, key=lambda expert: (rows[expert], -expert)), rank)
                builder.level()
                break
        else:
            return builder


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
    # Free slots are filled as far as the schedule hides it, the least busy ranks first: a replica without
    # work in this step takes its share where its expert is hot in the next one.
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
    holds = builder.split_seconds(limit).total_s <= HARMLESS * time.total_s
    return (builder if holds else best).replication(limit)


def _between(builder: ReplicationBuilder) -> ReplicationBuilder:
    """Return the plan with its rows halfway between near and levelled."""
    half = builder.copy()
    half.near()
    near = [list(rows) for rows in half.rows]
    half.level()
    half.blend(near)
    return half


def _promising(builder: ReplicationBuilder, exposed: bool) -> tuple[int, int] | None:
    """Return the expert and rank whose replica saves most; `exposed`: weights take longer than is hidden."""
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
    for number, homes in enumerate(builder.homes):
        scores[number, homes] = -np.inf
    scores[:, [not builder.has_room(rank) for rank in range(problem.ranks)]] = -np.inf
    best, rank = np.unravel_index(int(scores.argmax()), scores.shape)
    return (int(best), int(rank)) if scores[best, rank] > 0 else None


# ---- planners of replicas by name, and whether a plan still pays ------------------------------------------
#
# A planner makes, from the loads of one step, the replication of the next. All ranks run it on the same
# integers and compare a hash of its result.


Planner = Callable[[ExpertProblem], Replication]

PLANNERS: Final[dict[str, Planner]] = {
    "pro_prophet": pro_prophet,
    "shadowing": shadowing,
    "least_loaded": least_loaded,
    "planned": planned,
}


class PlanningCost(NamedTuple):
    """Seconds of a host thread for one layer: a fixed part, a part per rank, a part per load of a rank."""

    fixed_s: float
    rank_s: float
    load_s: float


PLANNING: Final[dict[str, PlanningCost]] = {
    "pro_prophet": PlanningCost(5e-4, 4e-5, 1.5e-6),
    "shadowing": PlanningCost(1.5e-4, 2e-5, 1e-6),
    "least_loaded": PlanningCost(2e-4, 1e-4, 2e-6),
    "planned": PlanningCost(2e-3, 7e-4, 2e-6),
}
"""Times of a 2 GHz core where loads are uneven, to a factor of two. They are constants, since measured ones
would make predictions of one and the same step differ. Replica slots change a planner's time less than its
loads do."""


def planning_s(name: str, ranks: int, experts: int) -> float:
    """Return the seconds that a planner is assumed to need for one layer of an expert group.

    Args:
        name: The name of the planner.
        ranks, experts: The ranks and the experts of the group.
    """
    cost = PLANNING[name]
    return cost.fixed_s + ranks * (cost.rank_s + experts * cost.load_s)


def pays(problem: ExpertProblem, replication: Replication) -> bool:
    """Return whether a replication makes the layer faster than none, by rank and link, with the problem's
    loads.

    A plan from stale loads may not: ask again once the loads of the step are known, and drop it if so.
    """
    if replication.is_empty:
        return False
    none = Replication.none(replication.placement, replication.replica_slots)
    return layer_seconds(problem, replication).total_s < layer_seconds(problem, none).total_s


def overlap(before: Ints, after: Ints) -> float:
    """Return the share of rows that two steps have in common, by rank and expert: 1 = the same distribution,
    0 = no row in common.

    Pro-Prophet's locality: a plan from one step serves the next as far as their loads resemble each other.
    """
    totals = before.sum() or 1, after.sum() or 1
    difference = abs(before / totals[0] - after / totals[1]).sum()
    return float(1 - difference / 2)
