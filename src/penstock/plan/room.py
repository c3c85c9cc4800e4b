"""Which plans fit into the memory of a rank, and what has to be recomputed for that."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.config import ConfigError
from penstock.decision import Decision
from penstock.plan.candidate import Candidate, evaluate
from penstock.plan.memory import MemoryBudget, MemoryEstimate, estimate_memory, memory_kind
from penstock.plan.problem import Problem, beside_pieces
from penstock.plan.space import space
from penstock.words import change, gib, milliseconds


class NothingFitsError(ConfigError):
    """Raised where no plan fits into the memory of a rank."""


@dataclass(frozen=True)
class Room:
    """The memory of a rank for the plans of one problem; memory: None = not known."""

    problem: Problem
    memory: MemoryBudget | None
    _known: dict[Decision, bool] = field(default_factory=dict)
    _kinds: dict[object, bool] = field(default_factory=dict)

    def holds(self, choice: Decision) -> bool:
        """Return whether a plan fits, by the estimate for whole microbatches.

        Replicas of a known routing are planned with the slack of an order. So where experts move, the pieces
        of a microbatch change a little which rank has them, and a search compares an evaluated plan's own
        estimate.
        """
        if self.memory is None:
            return True
        whole = beside_pieces(self.problem, choice)
        if whole not in self._known:
            kind = memory_kind(self.problem, whole)
            if kind not in self._kinds:
                self._kinds[kind] = estimate_memory(self.problem, whole).total_bytes <= self.memory.bytes
            self._known[whole] = self._kinds[kind]
        return self._known[whole]

    def with_least_recompute(self, choice: Decision) -> Decision | None:
        """Return the choice with the least recomputation that fits; None if nothing does."""
        tried = (replace(choice, recompute=what) for what in self.problem.recompute)
        return next((each for each in tried if self.holds(each)), None)

    @property
    def needed(self) -> Problem:
        """The problem with recomputation left open where some plan does not fit without it. Otherwise nothing
        is recomputed, since that takes time."""
        if len(self.problem.recompute) == 1:
            return self.problem
        least = replace(self.problem, recompute=self.problem.recompute[:1])
        return least if self.memory is None or all(map(self.holds, space(least, "memory"))) else self.problem


def least_memory(problem: Problem) -> MemoryEstimate:
    """Return the memory of the plan that needs least."""
    whole = dict.fromkeys(beside_pieces(problem, choice) for choice in space(problem, "memory"))
    kinds = {memory_kind(problem, choice): choice for choice in whole}
    estimates = (estimate_memory(problem, choice) for choice in kinds.values())
    return min(estimates, key=lambda estimate: estimate.total_bytes)


def recompute_words(problem: Problem, best: Candidate) -> str:
    """Return the memory that recomputation saves and the time that it takes, against the same plan without
    it, ordered in the same way; "" where nothing is recomputed."""
    if best.choice.recompute == "none":
        return ""
    once = evaluate(problem, replace(best.choice, recompute="none"))
    longer_s = best.predicted_s - once.predicted_s
    longer = f"takes {milliseconds(longer_s)} ({change(best.predicted_s, once.predicted_s)})"
    took = longer if longer_s > 0 else "takes no time: it runs under transfers"
    return (
        f"; recomputing {best.choice.recompute} saves {gib(once.memory_bytes - best.memory_bytes)} and {took}"
    )
