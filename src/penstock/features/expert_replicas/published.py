"""Planners that others have published: Pro-Prophet's greedy search, and FasterMoE's shadowing.

Both give replicas only the rows of the replicas' own ranks. Both assume an unlimited number of replicas; here
a rank has `replica_slots` of them, and a rank without a free slot is no home.

Shapes: P ranks of the expert group, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.features.expert_replicas.model import Equation, LayerLoad, copies_to, paper_seconds
from penstock.features.expert_replicas.problem import ExpertProblem
from penstock.placement import EMPTY, Replication
from penstock.routing.integers import Floats

BALANCED = 0.5
"""Alpha of Eq 7: loads are balanced if they differ by less than this share of an expert's mean rows."""

EXCLUDED = (0.0, 0.25, 0.5, 0.75)
"""Shares of all ranks that do not get an expert; the paper leaves the number open."""


def pro_prophet(problem: ExpertProblem) -> Replication:
    """Return Pro-Prophet's plan, with the number of excluded ranks for which Eq 8 promises most."""
    plans = [greedy(problem, excluded) for excluded in sorted({int(n * problem.ranks) for n in EXCLUDED})]
    return min(plans, key=lambda plan: plan.seconds).replicas.replication()


@dataclass(frozen=True)
class Plan:
    """Replicas, and the time that their planner's equation promises."""

    replicas: Replicas
    seconds: float


def greedy(problem: ExpertProblem, excluded: int, alpha: float = BALANCED, equation: Equation = 8) -> Plan:
    """Return the best prefix of copies of the heaviest ranks' experts: Algorithm 1 of Pro-Prophet.

    excluded: n, ranks with the fewest rows of an expert that do not get it; ties by rank. A rank with several
    experts gives its largest one that is not yet copied.
    """
    replicas = Replicas(problem)
    load = replicas.load()
    best = Plan(replicas.taken(), paper_seconds(problem.costs, load.received, load.computed, 0, 0, equation))
    while not balanced(problem, load.computed, alpha):
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
        seconds = paper_seconds(problem.costs, load.received, load.computed, copied, excluded, equation)
        if seconds < best.seconds:
            best = Plan(replicas.taken(), seconds)
    return best


def balanced(problem: ExpertProblem, computed: Floats, alpha: float = BALANCED) -> bool:
    """Return whether loads of ranks differ by less than alpha times an expert's mean rows (Eq 7)."""
    mean = problem.loads.sum() / problem.placement.num_experts
    return bool(computed.max() - computed.min() < alpha * mean)


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

    copied: experts, in the order in which they were given away. held: by rank. targets: [P, E], the rank to
    which rows go that start on rank p for expert e.
    """

    def __init__(self, problem: ExpertProblem) -> None:
        self.problem = problem
        self.copied: list[int] = []
        self.held: list[list[int]] = [[] for _ in range(problem.ranks)]
        self.targets = np.tile(problem.placement.owners, (problem.ranks, 1))
        for expert, homes in enumerate(problem.placement.homes):
            for home in homes:
                self.targets[home.rank, expert] = home.rank

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
