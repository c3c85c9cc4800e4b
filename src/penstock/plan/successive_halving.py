"""Selection of the cuts that deserve a full search for their order: those that a short search orders best.

A rule orders some cuts almost optimally and others badly, so the best cut by rules is often not the best one
once every cut is ordered well. A full search for the order of every cut would take too long. Rules therefore
only select the cuts that get a very short search; its results select those that get a longer one, and these
in turn those that get a full one (successive halving: Jamieson and Talwalkar, Non-stochastic Best Arm
Identification, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.decision import Decision
from penstock.plan.candidate import Candidate
from penstock.plan.effort import Meter
from penstock.plan.predict import predict_s
from penstock.plan.problem import Problem
from penstock.schedule import SCHEDULES

ROUNDS = ((20, 80), (5, 20))
"""For each round: the number of cuts searched, the best of the round before, and the divisor of a full
search's length that each of them gets."""


@dataclass
class SuccessiveHalving:
    """Seconds of cuts in the orders found by short searches: for each, by its longest search."""

    problem: Problem
    meter: Meter
    seconds: dict[Decision, float] = field(default_factory=dict)
    parts: dict[Decision, int] = field(default_factory=dict)

    def ranked(self, candidates: Mapping[Decision, Candidate]) -> list[Decision]:
        """Return the most promising cuts, best first, with priority `search`; charge the meter.

        Cuts whose lower bound is not below the time of the best candidate are left out.

        Args:
            candidates: Evaluated choices, ordered by rules or by full searches.
        """
        ordered = sorted(candidates.values(), key=lambda each: each.predicted_s)
        best_s = min((each.predicted_s for each in ordered), default=math.inf)
        ruled: dict[Decision, Candidate] = {}
        if "priority" in dict(self.problem.forced):
            return []
        for each in ordered:
            by_rule = each.choice.reads("priority") and each.choice.priority != "search"
            if by_rule and each.bound.seconds < best_s:
                ruled.setdefault(replace(each.choice, priority="search"), each)
        kept = list(ruled)
        for cuts, part in ROUNDS:
            for choice in kept[:cuts]:
                if self.parts.get(choice, math.inf) > part:
                    self.meter.check()
                    plan, problem = ruled[choice].plan, self.problem
                    schedule = SCHEDULES[choice.schedule]
                    order = schedule.quick_order(plan.graph, problem.cost(choice, plan.shape), choice, part)
                    self.meter.note_round(problem, len(plan.graph.tasks), part)
                    self.seconds[choice] = predict_s(problem, choice, replace(plan, schedule=order))
                    self.parts[choice] = part
            kept = sorted((each for each in kept if each in self.seconds), key=self.seconds.__getitem__)
        return kept
