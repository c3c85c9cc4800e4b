"""Planners that share an expert's rows among several hosts: by load alone, and by load, links and price."""

from __future__ import annotations

import numpy as np

from penstock.placement import SPLIT, Hosting
from penstock.placing.draft import Draft
from penstock.placing.integers import Floats, Ints
from penstock.placing.model import LayerSeconds, copies_to, exposed_s, layer_seconds
from penstock.placing.problem import ExpertProblem
from penstock.placing.ways import Ways

NEGLIGIBLE = 0.005
"""Share of the mean rows of a rank that is not worth a guest."""

EVEN = round(SPLIT * (1 + NEGLIGIBLE))
"""The limit of a hosting whose ranks are to compute alike."""

HARMLESS = 1.001
"""How much longer the present loads may take with guests in reserve: more hosts change the ways of rows."""

PATIENCE = 4
"""Guests that may be added in a row without making the plan faster."""


def least_loaded(problem: ExpertProblem) -> Hosting:
    """Return a hosting that moves surplus rows of the most loaded rank, with weights, to the least loaded
    one, whatever the price."""
    evened = _evened_out(problem)
    return evened.hosting(evened.limit(EVEN))


def _evened_out(problem: ExpertProblem) -> Draft:
    draft = Draft(problem)
    while (pair := _surplus(draft)) is not None:
        draft.add(*pair)
        draft.level()
    return draft


def _surplus(draft: Draft) -> tuple[int, int] | None:
    """Return the largest expert of the most loaded rank that the least loaded rank with room can take, and
    that rank; None if loads are even."""
    mean = draft.problem.mean_rows
    ranks = sorted(range(len(draft.computed)), key=lambda rank: draft.computed[rank])
    heaviest = ranks[-1]
    if draft.computed[heaviest] <= (1 + NEGLIGIBLE) * mean:
        return None
    held = [e for e, hosts in enumerate(draft.hosts) if heaviest in hosts]
    for rank in ranks:
        free = [expert for expert in held if rank not in draft.hosts[expert]]
        if draft.computed[rank] < mean and draft.has_room(rank) and free:
            return max(free, key=lambda expert: (_rows_at(draft, expert, heaviest), -expert)), rank
    return None


def _rows_at(draft: Draft, expert: int, rank: int) -> int:
    return draft.rows[expert][draft.hosts[expert].index(rank)]


def planned(problem: ExpertProblem) -> Hosting:
    """Return the fastest plan, by rank and link, of those met while guests are added where most promising.

    A guest is worth the computation that it evens out, and the rows that it keeps in a rank or a node, less
    the weights that cross links beyond what the schedule hides. Each plan is tried with its rows near and
    levelled, the best one also halfway between: tokens travel or weights travel, whichever costs less.
    """
    draft = Draft(problem)
    time = draft.seconds()
    best, best_s, waited = draft.copy(), time.total_s, 0
    while waited < PATIENCE and (pair := _promising(draft, exposed=time.weights_s > 0)) is not None:
        draft.add(*pair)
        waited += 1
        for share in (draft.near, draft.level):
            share()
            time = draft.seconds()
            if time.total_s < best_s:
                best, best_s, waited = draft.copy(), time.total_s, 0
    evened = _evened_out(problem)  # for loads where no guest pays before many have been added
    plans = (best, _between(best), evened, _between(evened))
    if not problem.exact:
        return min(plans, key=lambda plan: plan.seconds().total_s).hosting()
    tried = [*((plan, plan.limit()) for plan in plans), (evened, evened.limit(EVEN))]
    best, limit = min(tried, key=lambda each: each[0].split_seconds(each[1]).total_s)
    none = Hosting.none(problem.placement, problem.replica_slots)
    time = best.split_seconds(limit)
    if layer_seconds(problem, none).total_s <= time.total_s:
        return none
    reserved = _reserved(best, time)
    holds = reserved.split_seconds(limit).total_s <= HARMLESS * time.total_s
    return (reserved if holds else best).hosting(limit)


def _reserved(best: Draft, time: LayerSeconds) -> Draft:
    """Return the plan with free slots filled as far as the schedule hides it, the least busy ranks first.

    Rows are split by the loads of the step that runs, so a guest without present work takes its share if its
    expert is hot in the next step.
    """
    draft = best.copy()
    problem, costs, placement = draft.problem, draft.problem.costs, draft.problem.placement
    ways, experts_s = Ways(costs.links, copies_to(draft.guests, placement)), time.experts_s / 3
    for _ in range(problem.replica_slots):
        for rank in sorted(filter(draft.has_room, range(problem.ranks)), key=draft.computed.__getitem__):
            expert = _most_urgent(draft, rank)
            if expert is None:
                continue
            way = placement.owners[expert], rank
            if exposed_s(costs, ways.with_one_more(*way), experts_s) <= time.weights_s:
                draft.add(expert, rank)
                ways.add(*way)
    return draft


def _most_urgent(draft: Draft, rank: int) -> int | None:
    """Return the expert whose hosts one more host would relieve most, if the expert got a mean expert's rows
    more; None if the rank hosts all."""
    rows_E, held = draft.problem.expert_rows, [*draft.problem.placement.held(rank), *draft.guests[rank]]
    hosts_E = np.array([len(hosts) for hosts in draft.hosts])
    urgency_E = (rows_E + rows_E.mean()) / hosts_E**2
    urgency_E[held] = -np.inf
    return None if len(held) == len(hosts_E) else int(urgency_E.argmax())


def _between(draft: Draft) -> Draft:
    """Return the plan with its rows halfway between near and levelled."""
    half = draft.copy()
    half.near()
    near = [list(rows) for rows in half.rows]
    half.level()
    half.blend(near)
    return half


def _promising(draft: Draft, exposed: bool) -> tuple[int, int] | None:
    """Return the expert and rank that promise most; None if no guest promises a gain."""
    scores = _scores(draft, exposed)
    expert, rank = np.unravel_index(int(scores.argmax()), scores.shape)
    return (int(expert), int(rank)) if scores[expert, rank] > 0 else None


def _scores(draft: Draft, exposed: bool) -> Floats:
    """Return the seconds that a guest promises, for every expert and rank, [E, P]; -inf where impossible.

    exposed: whether Trans or Agg take longer than the schedule hides, so that weights have a price.
    """
    problem, costs = draft.problem, draft.problem.costs
    owners = list(problem.placement.owners)
    to_rank_s = costs.links.pair_s_per_byte[owners]
    evened = _evened(draft)
    heaviest = max(draft.computed)
    room = np.maximum(evened, heaviest - np.array(draft.computed))
    kept_s = 4 * costs.row_bytes * np.minimum(_kept(draft), room) * to_rank_s
    weights_s = (costs.parameter_bytes + costs.gradient_bytes) * to_rank_s * exposed
    scores: Floats = 3 * costs.row_s * evened + kept_s - weights_s
    for expert, hosts in enumerate(draft.hosts):
        scores[expert, hosts] = -np.inf
    scores[:, [not draft.has_room(rank) for rank in range(problem.ranks)]] = -np.inf
    return scores


def _evened(draft: Draft) -> Floats:
    """Return the rows above the mean of an expert's hosts that fit below the mean of a rank, [E, P]."""
    mean = draft.problem.mean_rows
    above = [max(0.0, computed - mean) for computed in draft.computed]
    surplus = [
        sum(min(count, above[host]) for host, count in zip(hosts, rows, strict=True))
        for hosts, rows in zip(draft.hosts, draft.rows, strict=True)
    ]
    room = np.maximum(0, mean - np.array(draft.computed))
    evened: Floats = np.minimum(np.array(surplus)[:, None], room)
    return evened


def _kept(draft: Draft) -> Ints:
    """Return the rows that a guest would keep from crossing to the owner, [E, P].

    All rows of its node where the node has no host, else the rank's own.
    """
    problem = draft.problem
    nodes = np.array(problem.costs.links.nodes)
    hosted_EN = np.zeros(problem.node_loads.T.shape, bool)
    for expert, hosts in enumerate(draft.hosts):
        hosted_EN[expert, nodes[hosts]] = True
    return np.where(hosted_EN[:, nodes], problem.loads.T, problem.node_loads.T[:, nodes])
