"""The reasons for a plan, and what would make it faster, in five lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.cost import StepCost
from penstock.decision import Decision
from penstock.graph import Lane
from penstock.plan.candidate import Candidate, recompute_words
from penstock.plan.memory import MemoryEstimate, estimate_memory
from penstock.plan.predict import alone, predict_s, step_ratio
from penstock.plan.problem import Problem
from penstock.plan.search import FoundPlan, find_plan
from penstock.schedule import StepPlan
from penstock.timing import lane_work
from penstock.words import change, gib, lane_words, mib, milliseconds

FASTER = 2

INFINITELY = 1e12
"""A factor on bandwidth so large that only start-up times remain."""

MOSTLY = 0.5
"""If start-ups take a larger share of the communication time than this, more bandwidth helps little."""

Replan = Callable[[Problem], FoundPlan]
"""Plans again in the same way, for the same step on a changed cluster."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A plan and the reasons for it.

    Attributes:
        busy: The work of every lane over the step time.
        binds: What limits the step, as text.
        budget_bytes: The memory of a rank; None = not known.
        lower_bound_s: The seconds that no plan beats.
        rows: What rounded rows save, as text.
        again: What recomputation saves and takes, as text.
        nodes: Whether the cluster has several nodes.
        inside: Whether transfers between nodes mostly wait for links inside nodes.
        faster: The predicted step time over that now, by the resource made twice as fast. It is that of the
            better of two plans: the shown one and the one that is found then. Empty where nothing was planned
            again.
        late: Resources for which the clock ended the search, so that there is nothing to compare.
    """

    best: Candidate
    next_best: Candidate | None
    busy: dict[str, float]
    binds: str
    memory: MemoryEstimate
    budget_bytes: int | None
    lower_bound_s: float
    faster: dict[str, float] = field(default_factory=dict)
    late: tuple[str, ...] = ()
    rows: str = ""
    again: str = ""
    nodes: bool = False
    inside: bool = False

    @property
    def lines(self) -> tuple[str, ...]:
        """Exactly five lines of text."""
        best = self.best
        reached = 100 * best.bound_s / best.predicted_s
        of = "forward and backward" if best.plan.shape.updating is None else "the step, updates included"
        shares = []
        for lane, share in self.busy.items():
            if share > 0:
                inside = " (mostly limited by links inside nodes)" if self.inside and lane == "inter" else ""
                shares.append(f"{lane_words(lane, nodes=self.nodes)}{inside} {100 * share:.0f} %")
        budget = "" if self.budget_bytes is None else f" of {gib(self.budget_bytes)}"
        part, size = next(iter(self.memory.parts.items()))
        following, next_best = "no other plan was compared", self.next_best
        if next_best is not None:
            longer = change(next_best.predicted_s, best.predicted_s)
            following = f"{next_best.choice.words}; {next_best.predicted} ({longer})"
        changes = [f"{FASTER}x {what} {change(ratio, 1.0)}" for what, ratio in self.faster.items()]
        late = [f"{FASTER}x {what}" for what in self.late]
        what_if = [f"predicted change of the step time: {', '.join(changes)}"] if changes else []
        what_if += [f"not planned in the time there is: {', '.join(late)}"] if late else []
        unknown = "`penstock plan` predicts it for faster links and devices, by a file of `penstock profile`"
        return (
            f"Plan     {best.choice.words}{self.rows}",
            f"Time     {best.predicted} predicted for {of}; lower bounds: "
            f"{milliseconds(best.bound_s)} for any order of these tasks ({reached:.0f} % efficiency), "
            f"{milliseconds(self.lower_bound_s)} for any plan",
            f"Limit    {self.binds}; busy share of the step: {', '.join(shares)}; memory: "
            f"{gib(self.memory.total_bytes)}{budget} per rank (estimated), of which {gib(size)} {part}"
            f"{self.again}",
            f"Next     {following}",
            f"What if  {'; '.join(what_if) or unknown}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        following = self.next_best
        return {
            "lines": list(self.lines),
            "predicted_s": self.best.predicted_s,
            "interval_s": self.best.interval_s,
            "bound_of_this_cut_s": self.best.bound_s,
            "bound_of_all_cuts_s": self.lower_bound_s,
            "binds": self.binds,
            "busy": self.busy,
            "next_best": None if following is None else following.choice.words,
            "next_best_s": None if following is None else following.predicted_s,
            "next_best_interval_s": None if following is None else following.interval_s,
            "faster": self.faster,
            "faster_not_planned": list(self.late),
            "memory_bytes": self.memory.total_bytes,
            "memory_parts_bytes": self.memory.parts,
        }


def explain(
    problem: Problem, found: FoundPlan, memory_bytes: int | None = None, replan: Replan | None = None
) -> Explanation:
    """Explain a plan, and plan the same step again on clusters in which one resource is twice as fast.

    This takes up to three more searches.

    Args:
        memory_bytes: The memory of a rank; None = not known.
        replan: How the plan was found; None = by a search with this memory and the budget and effort of
            `found`.
    """

    def searched(changed: Problem) -> FoundPlan:
        return find_plan(
            changed, memory_bytes=memory_bytes, budget=found.searched.budget, effort=found.effort
        )

    faster: dict[str, float] = {}
    # On one node, or where nodes are not known, all links are between ranks.
    work = problem.workload
    resources: dict[str, dict[str, float]] = {}
    if work.world_nodes > 1:
        resources["inter-node bandwidth"] = {"inter": FASTER}
        if work.world_nodes < work.world_size:
            resources["intra-node bandwidth"] = {"intra": FASTER}
    elif work.world_size > 1:
        resources["bandwidth between ranks"] = {"inter": FASTER, "intra": FASTER}
    resources["faster devices"] = {"compute": FASTER}
    for what, how in resources.items() if not found.searched.late else ():
        changed = replace(problem, cluster=problem.cluster.faster(**how))
        then = (replan or searched)(changed)
        if not then.searched.late:
            # On either cluster the better of both plans counts, each in its order: a search may find
            # later what it missed before, and that is no gain of the change.
            now, later = found.best, then.best
            now_s = min(now.predicted_s, predict_s(problem, later.choice, later.plan))
            faster[what] = min(later.predicted_s, predict_s(changed, now.choice, now.plan)) / now_s
    late = tuple(what for what in resources if what not in faster)
    return replace(reasons(problem, found, memory_bytes), faster=faster, late=late)


def reasons(problem: Problem, found: FoundPlan, memory_bytes: int | None = None) -> Explanation:
    """Explain a plan without planning again: for a caller with ranks that wait for the plan.

    Args:
        memory_bytes: The memory of a rank; None = not known.
    """
    best = found.best
    apart = alone(problem)
    cost = apart.cost(best.choice, best.plan.shape)
    work = lane_work({task: cost(task) for task in best.plan.graph.tasks})
    step_s = best.predicted_s / step_ratio(problem)
    busy = {str(lane): work[lane] / step_s for lane in Lane if lane in work}
    bound = best.bound
    busiest = lane_words(bound.busiest_lane, nodes=problem.has_nodes)
    binds = f"{busiest} limits the step"
    if bound.critical_path_s > bound.busiest_lane_s:
        binds = f"the longest chain of tasks that wait for each other limits the step; busiest: {busiest}"

    def left_s(**faster: float) -> dict[Lane, float]:
        """Return the seconds that transfers have left, by lane, with links that take none."""
        endless = replace(apart, cluster=apart.cluster.faster(**faster))
        left = endless.cost(best.choice, best.plan.shape)
        return lane_work({task: left(task) for task in best.plan.graph.tasks if task.lane.is_network})

    networks = [lane for lane in (Lane.INTER, Lane.INTRA) if work.get(lane)]
    start_up_share = 0.0
    if networks:
        start_ups = left_s(inter=INFINITELY, intra=INFINITELY)
        start_up_share = sum(start_ups[lane] for lane in networks) / sum(work[lane] for lane in networks)
    # Whether transfers between nodes take most of their time on links inside nodes.
    between_s = near_s = work.get(Lane.INTER, 0.0)
    if problem.has_nodes:
        near_s = left_s(intra=INFINITELY).get(Lane.INTER, 0.0)
    inside = near_s < (1 - MOSTLY) * between_s
    if start_up_share > MOSTLY and not bound.busiest_lane.computes:
        share = f"{100 * start_up_share:.0f} % of communication time is start-ups"
        binds = f"latency limits the step: {share}; {binds}"
    return Explanation(
        best=best,
        next_best=found.others[0] if found.others else None,
        busy=busy,
        binds=binds,
        memory=estimate_memory(problem, best.choice),
        budget_bytes=memory_bytes,
        lower_bound_s=found.lower_bound_s,
        rows=row_words(problem, best.choice, best.plan),
        again=recompute_words(problem, best),
        nodes=problem.has_nodes,
        inside=inside,
    )


def row_words(problem: Problem, choice: Decision, plan: StepPlan) -> str:
    """Return text on the bytes that rows take, and would take unrounded; "" where they are not rounded."""
    if choice.comm_dtype == "none":
        return ""
    sizes_bytes = []  # that a rank hands to the transfers of rows, with even routing
    for way in (choice, replace(choice, comm_dtype="none")):
        cost = StepCost(plan.shape, problem.workload_of(way), problem.cluster)
        works = (cost.work(task) for task in plan.graph.tasks)
        sizes_bytes.append(round(sum(work.sent_bytes for work in works if work.collective == "leg")))
    taken, plain = sizes_bytes
    return f" ({mib(taken)} of rows per rank and step instead of {mib(plain)}, rounded: plan.comm_dtype)"
