"""Planners that others have published: Pro-Prophet's greedy search, and FasterMoE's shadowing.

Both give guests the rows of their own ranks only. Both know as many guests as they like; here a rank has
`guest_slots` of them, and one without a free slot is no host.

Shapes: P ranks of the expert group, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from penstock.placement import EMPTY, Hosting
from penstock.placing.integers import Floats
from penstock.placing.model import Equation, LayerLoad, paper_seconds
from penstock.placing.problem import ExpertProblem

BALANCED = 0.5
"""Alpha of Eq 7: loads are balanced if they differ by less than this share of an expert's mean rows."""

EXCLUDED = (0.0, 0.25, 0.5, 0.75)
"""Shares of all ranks that do not get an expert; the paper leaves the number open."""


def pro_prophet(problem: ExpertProblem) -> Hosting:
    """Pro-Prophet's plan, with as many ranks excluded as Eq 8 promises most from."""
    plans = [greedy(problem, excluded) for excluded in sorted({int(n * problem.ranks) for n in EXCLUDED})]
    return min(plans, key=lambda plan: plan.seconds).hosting


@dataclass(frozen=True)
class Plan:
    """A hosting and the time that its planner's equation promises."""

    hosting: Hosting
    seconds: float


def greedy(problem: ExpertProblem, excluded: int, alpha: float = BALANCED, equation: Equation = 8) -> Plan:
    """Algorithm 1 of Pro-Prophet: the best prefix of copies of the heaviest ranks' experts.

    excluded: n, ranks with the fewest rows of an expert that do not get it; ties by rank. A rank with several
    experts gives its largest that is not yet copied.
    """
    guests = Guests(problem)
    plain = guests.hosting()
    load = LayerLoad.of(problem.loads, plain)
    best = Plan(plain, paper_seconds(problem.costs, load.received, load.computed, 0, 0, equation))
    while not balanced(problem, load.computed, alpha):
        expert = _heaviest_expert(problem, load.computed, guests.copied)
        if expert is None:
            break
        guests.copy(expert, _receivers(problem, expert, excluded))
        hosting = guests.hosting()
        load = LayerLoad.of(problem.loads, hosting)
        copied = len(guests.copied)
        seconds = paper_seconds(problem.costs, load.received, load.computed, copied, excluded, equation)
        if seconds < best.seconds:
            best = Plan(hosting, seconds)
    return best


def balanced(problem: ExpertProblem, computed: Floats, alpha: float = BALANCED) -> bool:
    """Eq 7: whether loads of ranks differ by less than alpha times an expert's mean rows."""
    mean = problem.loads.sum() / problem.placement.num_experts
    return bool(computed.max() - computed.min() < alpha * mean)


def shadowing(problem: ExpertProblem) -> Hosting:
    """FasterMoE's plan: the most loaded experts go to all ranks, one by one while its model promises a gain.

    The model (SYSTEMS 6.9) takes the largest expert for the load of a rank, and ignores what shadows add to
    it.
    """
    costs, guests = problem.costs, Guests(problem)
    order = np.argsort(-problem.expert_rows, kind="stable").tolist()
    byte_s = costs.links.mean_s_per_byte
    per_row_s = 3 * costs.row_s + 4 * costs.row_bytes * byte_s
    best_s = per_row_s * float(problem.expert_rows[order[0]])
    for copies, (expert, following) in enumerate(pairwise(order), start=1):
        seconds = per_row_s * float(problem.expert_rows[following]) + copies * costs.parameter_bytes * byte_s
        if seconds >= best_s:
            break
        best_s = seconds
        guests.copy(expert, range(problem.ranks))
    return guests.hosting()


@dataclass
class Guests:
    """Experts that ranks have as guests so far. copied: experts, in the order in which they were given
    away."""

    problem: ExpertProblem
    copied: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held: list[list[int]] = [[] for _ in range(self.problem.ranks)]

    def copy(self, expert: int, ranks: Sequence[int]) -> None:
        """Make an expert a guest of those of some ranks that do not hold it and have a free slot."""
        hosts = {host.rank for host in self.problem.placement.hosts[expert]}
        self.copied.append(expert)
        for rank in ranks:
            if rank not in hosts and len(self.held[rank]) < self.problem.guest_slots:
                self.held[rank].append(expert)

    def hosting(self) -> Hosting:
        """In which guests compute the rows of their own ranks."""
        slots = self.problem.guest_slots
        filled = [held + [EMPTY] * (slots - len(held)) for held in self.held]
        return Hosting.local(self.problem.placement, filled)


def _heaviest_expert(problem: ExpertProblem, computed: Floats, copied: Sequence[int]) -> int | None:
    """The largest expert of the heaviest rank that is not copied yet."""
    held = problem.placement.held(int(computed.argmax()))
    left = [expert for expert in held if expert not in copied]
    return max(left, key=lambda expert: (problem.expert_rows[expert], -expert), default=None)


def _receivers(problem: ExpertProblem, expert: int, excluded: int) -> list[int]:
    """All ranks but the `excluded` ones that have the fewest rows of an expert; the owner does not count."""
    owner = problem.placement.owners[expert]
    fewest = [rank for rank in np.argsort(problem.loads[:, expert], kind="stable").tolist() if rank != owner]
    return sorted(fewest[excluded:])
