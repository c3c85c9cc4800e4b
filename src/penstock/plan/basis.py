"""What all searches for one step have in common, whatever their effort, so that it is worked out once."""

from __future__ import annotations

from functools import cached_property

from penstock.decision import Decision
from penstock.plan.bound import QuickBounds
from penstock.plan.candidate import Candidate, evaluate
from penstock.plan.memory import MemoryBudget
from penstock.plan.prices import check_prices
from penstock.plan.problem import Problem
from penstock.plan.room import Room
from penstock.plan.starts import first_choices

FEW_LAYERS = 4
"""A repeating model is searched through this number of its middle layers, or a multiple of its period."""


class Evaluated:
    """The evaluated choices of a problem: each is ordered, simulated and bounded once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: dict[Decision, Candidate] = {}

    def of(self, choice: Decision) -> Candidate:
        """Return the choice after evaluation."""
        if choice not in self._known:
            self._known[choice] = evaluate(self.problem, choice)
        return self._known[choice]


class Basis:
    """A step for which plans are sought, in full and as a short model that stands for it.

    Raises ConfigError if the costs of the step are not sensible.
    """

    def __init__(self, given: Problem, memory: MemoryBudget | None) -> None:
        check_prices(given)
        self.given, self.memory = given, memory
        self.room = Room(given, memory)
        self.problem = self.room.needed
        self.full = Evaluated(self.problem)
        short = sketch(self.problem)
        self.short = self.full if short is self.problem else Evaluated(short)
        self.bounds = QuickBounds(short)

    @cached_property
    def firsts(self) -> list[Decision]:
        """The choices with which every search begins."""
        return first_choices(self.problem)


def sketch(problem: Problem) -> Problem:
    """Return a model with few of the repeating layers, the first and the last; without repeats, `problem`."""
    kinds = problem.layer_kinds
    middle = kinds[1:-1]
    for period in range(1, FEW_LAYERS + 1):
        keep = -(-FEW_LAYERS // period) * period
        if len(middle) > keep and all(a == b for a, b in zip(middle, middle[period:], strict=False)):
            return problem.only((0, *range(1, 1 + keep), len(kinds) - 1))
    return problem
