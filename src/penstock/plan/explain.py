"""Why a plan was chosen, and what would make it faster: five lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from penstock.cost import ProfiledCluster
from penstock.decision import Decision
from penstock.graph import Lane
from penstock.plan.memory import MemoryBudget, MemoryEstimate, estimate_memory
from penstock.plan.predict import alone
from penstock.plan.problem import Problem
from penstock.plan.search import Candidate, FoundPlan, evaluate
from penstock.simulate import lane_work
from penstock.words import change, gib, milliseconds

FASTER = 2
INFINITELY = 1e12
"""So many times the bandwidth leaves start-ups alone."""

MOSTLY = 0.5
"""Where start-ups take a larger share of what communication takes, no bandwidth helps much."""

RIVALS = 2
"""So many of the next best plans are tried on a faster cluster, too: another may be the best there."""
MOST_TASKS = 20_000
"""Of all plans that are tried there; the best one is, however many it has."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What was chosen and why. busy: by lane, its work over the iteration. faster: by what is twice as
    fast, the iteration over the present one, both ordered by the same rules."""

    best: Candidate
    next_best: Candidate | None
    busy: dict[str, float]
    binds: str
    faster: dict[str, float]
    memory: MemoryEstimate
    budget: MemoryBudget | None
    lower_bound_s: float

    @property
    def lines(self) -> tuple[str, ...]:
        """Exactly five."""
        return (
            f"Plan     {self.best.choice.words}",
            f"Time     {self._time()}",
            f"Binding  {self._binding()}",
            f"Next     {self._next()}",
            f"Change   {self._faster()}; memory {self._memory()}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        following = self.next_best
        return {
            "lines": list(self.lines),
            "predicted_s": self.best.predicted_s,
            "bound_of_this_cut_s": self.best.bound_s,
            "bound_of_all_cuts_s": self.lower_bound_s,
            "binds": self.binds,
            "busy": self.busy,
            "next_best": None if following is None else following.choice.words,
            "next_best_s": None if following is None else following.predicted_s,
            "faster": self.faster,
            "memory_bytes": self.memory.total_bytes,
            "memory_parts_bytes": self.memory.parts,
        }

    def _time(self) -> str:
        best = self.best
        reached = 100 * best.bound_s / best.predicted_s
        return (
            f"{milliseconds(best.predicted_s)} forward and backward predicted; no order of these tasks takes "
            f"less than {milliseconds(best.bound_s)} ({reached:.0f} % reached), no cut less than "
            f"{milliseconds(self.lower_bound_s)}"
        )

    def _binding(self) -> str:
        shares = ", ".join(f"{lane} {100 * share:.0f} %" for lane, share in self.busy.items())
        return f"{self.binds}; busy: {shares} of the step"

    def _next(self) -> str:
        if self.next_best is None:
            return "there is no other plan"
        return (
            f"{self.next_best.choice.words}; {milliseconds(self.next_best.predicted_s)}, "
            f"{change(self.next_best.predicted_s, self.best.predicted_s)}"
        )

    def _faster(self) -> str:
        changes = (f"with {FASTER}x {what}: {change(ratio, 1.0)}" for what, ratio in self.faster.items())
        return ", ".join(changes)

    def _memory(self) -> str:
        of = "" if self.budget is None else f" of {gib(self.budget.bytes)}"
        part, size = next(iter(self.memory.parts.items()))
        return f"{gib(self.memory.total_bytes)}{of} per rank, {gib(size)} of it {part} (estimated)"


def explain(problem: Problem, found: FoundPlan, memory: MemoryBudget | None = None) -> Explanation:
    """Simulates the best few plans again on clusters of which one part is twice as fast."""
    best = found.best
    apart = alone(problem)
    cost = apart.cost(best.choice, best.plan.shape)
    work = lane_work({task: cost(task) for task in best.plan.graph.tasks})
    busy = {str(lane): work[lane] / best.predicted_s for lane in Lane if lane in work}
    return Explanation(
        best=best,
        next_best=found.others[0] if found.others else None,
        busy=busy,
        binds=_binds(best, _start_up_share(apart, best, work)),
        faster=_faster(problem, found, intra=Lane.INTRA in work),
        memory=estimate_memory(problem, best.choice),
        budget=memory,
        lower_bound_s=found.lower_bound_s,
    )


def _start_up_share(apart: Problem, best: Candidate, work: Mapping[Lane, float]) -> float:
    """Which part of what communication takes are start-ups; 0 without communication."""
    lanes = [lane for lane in (Lane.INTER, Lane.INTRA) if work.get(lane)]
    if not lanes:
        return 0.0
    endless = replace(apart, cluster=apart.cluster.faster(inter=INFINITELY, intra=INFINITELY))
    cost = endless.cost(best.choice, best.plan.shape)
    start_ups = lane_work({task: cost(task) for task in best.plan.graph.tasks if task.lane in lanes})
    return sum(start_ups.values()) / sum(work[lane] for lane in lanes)


def _binds(best: Candidate, start_up_share: float) -> str:
    bound = best.bound
    chain, lane = bound.critical_path_s > bound.busiest_lane_s, bound.busiest_lane
    text = (
        f"the longest chain of dependencies binds, lane {lane} is busiest" if chain else f"lane {lane} binds"
    )
    if start_up_share <= MOSTLY or lane.computes:
        return text
    return f"latency binds: {100 * start_up_share:.0f} % of communication is start-ups; {text}"


def _faster(problem: Problem, found: FoundPlan, *, intra: bool) -> dict[str, float]:
    """By what is twice as fast: the best time of a few plans over their best time now."""
    near = (found.best, *found.others[:RIVALS])
    tasks = accumulate(len(candidate.plan.graph.tasks) for candidate in near)
    fits = [so_far <= MOST_TASKS for so_far in tasks]
    tried = [found.best, *(each for each, fit in zip(near[1:], fits[1:], strict=True) if fit)]
    choices = [_by_rule(candidate.choice) for candidate in tried]
    cluster = problem.cluster
    nodes = cluster.file.nodes if isinstance(cluster, ProfiledCluster) else problem.workload.nodes
    link = "inter-node bandwidth" if nodes > 1 else "bandwidth between ranks"
    parts: dict[str, dict[str, float]] = {link: {"inter": FASTER}}
    if intra:
        parts["intra-node bandwidth"] = {"intra": FASTER}
    parts["faster devices"] = {"compute": FASTER}
    now_s = _best_s(problem, choices)
    # A rule may order worse where tasks are shorter; the order of now would still do, and take no longer.
    return {
        what: min(1.0, _best_s(replace(problem, cluster=problem.cluster.faster(**how)), choices) / now_s)
        for what, how in parts.items()
    }


def _by_rule(choice: Decision) -> Decision:
    """With a quick rule where the order was searched for: like is compared with like."""
    searched = choice.reads("priority") and choice.priority == "search"
    return replace(choice, priority="critical_path") if searched else choice


def _best_s(problem: Problem, choices: list[Decision]) -> float:
    return min(evaluate(problem, choice).predicted_s for choice in choices)
