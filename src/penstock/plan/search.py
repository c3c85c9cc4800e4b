"""The joint plan: the fastest choice that simulation finds, with lower bounds as stopping rule.

1. Every published planner's choice is simulated in full, so the plan is never worse than any of them.
2. From the best of them, one decision after another is changed while that helps.
3. All other cuts follow in the order of their lower bounds, until no bound is below the best time found.
4. The best cuts of `fsmoe` get its gradient partition, too, and the best of `penstock` an order from local
   search (its priority `search`), which is slow and better.

A long model of layers that repeat is looked at through a short one in steps 2 and 3; what is best there is
simulated in full. How many cuts are simulated is limited by the size of their graphs, not by a clock, so that
the same problem has the same plan on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.config import ConfigError
from penstock.plan.bound import QuickBounds
from penstock.plan.choice import Choice
from penstock.plan.dimensions import neighbours, space, valid
from penstock.plan.memory import ACTIVATIONS, BUFFERS, STATE, MemoryBudget, estimate_memory
from penstock.plan.predict import alone, predict_s
from penstock.plan.problem import Problem
from penstock.plan.published import PUBLISHED
from penstock.plan.words import gib
from penstock.schedule import FSMoE, Penstock, StepPlan
from penstock.simulate import LowerBound

Effort = Literal["low", "usual"]

PLACEMENTS = {"low": 10_000, "usual": 150_000}
"""Tasks that are placed on a simulated timeline in steps 2 and 3, over all cuts."""

EVALUATIONS = {"low": 40, "usual": 400}
"""Cuts that are simulated in steps 2 and 3."""

FINALISTS = 4
"""Cuts of a long model that are simulated in full."""

SEARCHED = {"low": 0, "usual": 2}
"""Plans that are ordered by local search."""

SHOWN = 5
FEW_LAYERS = 4
"""A repeating model is looked at through so many of its middle layers, or the next multiple of its period."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A choice, worked out. memory_bytes: estimated, per rank. quick_bound_s: of QuickBounds, 0 = unknown."""

    choice: Choice
    plan: StepPlan
    predicted_s: float
    bound: LowerBound
    memory_bytes: int
    quick_bound_s: float = 0.0

    @property
    def bound_s(self) -> float:
        """What no order of the same tasks beats: the sharper of two bounds."""
        return max(self.bound.seconds, self.quick_bound_s)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a search has come. total: at most so many; best_s: seconds of the best plan so far, if any."""

    stage: str
    done: int
    total: int
    best_s: float | None


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """The best plan, and what else there is.

    others: the next best of other schedules or cuts, best first. tried: choices that were simulated; pruned:
    those that their bounds ruled out. lower_bound_s: the least bound over all cuts.
    complete: every choice was simulated or ruled out.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    tried: int
    pruned: int
    lower_bound_s: float
    complete: bool


def evaluate(problem: Problem, choice: Choice) -> Candidate:
    """Order, simulate and bound one choice."""
    plan = problem.plan(choice)
    bound = alone(problem).bound(choice, plan)
    return Candidate(
        choice=choice,
        plan=plan,
        predicted_s=max(bound.seconds, predict_s(problem, choice, plan)),  # scatter may shorten, too
        bound=bound,
        memory_bytes=estimate_memory(problem, choice).total_bytes,
    )


def find_plan(
    problem: Problem,
    *,
    memory: MemoryBudget | None = None,
    progress: Callable[[Progress], None] | None = None,
    budget_s: float = 20.0,
    effort: Effort = "usual",
) -> FoundPlan:
    """The fastest plan that fits `memory`. Raises ConfigError if none does.

    budget_s: when it runs out, the best so far is the answer; only then does the result depend on the
    machine. effort: `low` for thousands of small problems, a few dozen simulations each.
    """
    return _Search(problem, memory, progress or (lambda _: None), budget_s, effort).run()


@dataclass
class _Screen:
    """Simulated seconds of choices on the problem itself or on a short model that stands for it."""

    problem: Problem
    seconds: dict[Choice, float] = field(default_factory=dict)
    candidates: dict[Choice, Candidate] = field(default_factory=dict)
    placements: int = 0

    def look(self, choice: Choice) -> float:
        if choice not in self.seconds:
            found = evaluate(self.problem, choice)
            self.placements += len(found.plan.graph.tasks)
            self.seconds[choice], self.candidates[choice] = found.predicted_s, found
        return self.seconds[choice]

    def ranked(self) -> list[Choice]:
        """Best first; of equal ones the one looked at first."""
        return sorted(self.seconds, key=lambda choice: self.seconds[choice])

    @property
    def best_s(self) -> float:
        return min(self.seconds.values())


class _Search:
    def __init__(
        self,
        problem: Problem,
        memory: MemoryBudget | None,
        progress: Callable[[Progress], None],
        budget_s: float,
        effort: Effort,
    ) -> None:
        self._problem, self._memory, self._progress, self._effort = problem, memory, progress, effort
        self._end = time.monotonic() + budget_s
        self._full = _Screen(problem)
        short = sketch(problem)
        self._screen = self._full if short is problem else _Screen(short)
        self._bounds = QuickBounds(self._screen.problem)
        self._complete, self._pruned = effort != "low", 0
        self._before = 0  # cuts that were looked at before the search began

    def run(self) -> FoundPlan:
        published = [choice for choice in self._published() if self._fits(choice)]
        everything = self._everything()
        if not published and not everything:
            raise self._too_big()
        for number, choice in enumerate(published or everything[:1]):
            self._full.look(choice)
            self._report("published plans", number + 1, len(published), self._full)
        starts = [replace(choice, partition=None) for choice in self._full.ranked()]
        self._descend(self._usual_starts(starts))
        self._walk(everything)
        self._finish()
        return self._found(everything)

    def _published(self) -> list[Choice]:
        """What each published planner would run; some take longer than a search."""
        choices: dict[Choice, None] = {}
        for number, planner in enumerate(PUBLISHED.values()):
            choices[planner(self._problem)] = None
            self._progress(
                Progress(stage="published planners", done=number, total=len(PUBLISHED), best_s=None)
            )
        return list(choices)

    def _everything(self) -> list[Choice]:
        """All that may be chosen. With low effort only what lies on the way is looked at."""
        if self._effort == "low" and self._memory is None:
            return []
        return [choice for choice in dict.fromkeys(space(self._problem)) if self._fits(choice)]

    def _usual_starts(self, published: list[Choice]) -> list[Choice]:
        """The best published choice, and what Penstock does unless told otherwise."""
        own = Choice(schedule=Penstock.name, microbatches=2, dispatch=self._problem.dispatches[0])
        return [valid(self._problem, choice) for choice in (*published[:1], own)]

    def _descend(self, starts: list[Choice]) -> None:
        """Change one decision at a time, for as long as that is an improvement."""
        screen = self._screen
        self._before = len(screen.seconds)
        fitting = list(dict.fromkeys(filter(self._fits, starts)))
        for start in sorted(fitting, key=screen.look):
            best, best_s = start, screen.look(start)
            improved = True
            while improved:
                improved = False
                for choice in filter(self._fits, neighbours(self._problem, best)):
                    if self._spent():
                        return
                    if self._bound_s(choice) >= screen.best_s:
                        continue
                    if screen.look(choice) < best_s:
                        best, best_s, improved = choice, screen.look(choice), True
                    self._report("better cuts", len(screen.seconds), EVALUATIONS[self._effort], screen)

    def _walk(self, choices: list[Choice]) -> None:
        """The rest in the order of their bounds, until none is below the best time."""
        if self._effort == "low":
            return
        screen = self._screen
        bounds = sorted((self._bound_s(choice), number) for number, choice in enumerate(choices))
        for bound_s, number in bounds:
            if bound_s >= screen.best_s:
                break
            if self._spent():
                self._complete = False
                break
            screen.look(choices[number])
            self._report("all cuts by their bounds", len(screen.seconds), EVALUATIONS[self._effort], screen)
        beaten = (choices[number] for bound_s, number in bounds if bound_s >= screen.best_s)
        self._pruned = sum(choice not in screen.seconds for choice in beaten)

    def _finish(self) -> None:
        """The best in full, then with the best order that local search finds."""
        finalists = self._screen.ranked()[:FINALISTS]
        gapped = [choice for choice in self._screen.ranked() if choice.schedule == FSMoE.name][:1]
        whole = finalists if self._screen is not self._full else []
        looks = [*whole, *map(self._with_partition, [*finalists, *gapped])]
        for number, choice in enumerate(looks):
            self._look_in_time(choice)
            self._report("the best in full", number + 1, len(looks), self._full)
        own = [choice for choice in self._full.ranked() if choice.schedule == Penstock.name]
        best = list(dict.fromkeys(replace(choice, priority="search") for choice in own))
        for number, choice in enumerate(best[: SEARCHED[self._effort]]):
            self._look_in_time(choice)
            self._report("better orders", number + 1, SEARCHED[self._effort], self._full)

    def _look_in_time(self, choice: Choice) -> None:
        """What has been looked at in full so far is an answer already."""
        if time.monotonic() < self._end:
            self._full.look(choice)
        else:
            self._complete = False

    def _with_partition(self, choice: Choice) -> Choice:
        """The same with the gradients in the gaps that FSMoE's planner has chosen for this model."""
        if choice.schedule != FSMoE.name:
            return choice
        planned = (other.partition for other in self._full.seconds if other.schedule == FSMoE.name)
        return replace(choice, partition=next((each for each in planned if each is not None), None))

    def _found(self, everything: list[Choice]) -> FoundPlan:
        full = self._full
        best, *rest = (full.candidates[choice] for choice in full.ranked())
        looked = set(self._screen.seconds) | set(full.seconds)
        bounds = QuickBounds(self._problem)
        return FoundPlan(
            best=_bounded(best, bounds),
            others=tuple(_bounded(each, bounds) for each in _others(best, rest)),
            tried=len(looked),
            pruned=self._pruned,
            lower_bound_s=min(bounds.seconds(choice) for choice in {*looked, *everything}),
            complete=self._complete,
        )

    def _bound_s(self, choice: Choice) -> float:
        return self._bounds.seconds(choice)

    def _fits(self, choice: Choice) -> bool:
        if self._memory is None:
            return True
        return estimate_memory(self._problem, choice).total_bytes <= self._memory.bytes

    def _spent(self) -> bool:
        screen, effort = self._screen, self._effort
        evaluations = len(screen.seconds) - self._before
        used_up = screen.placements >= PLACEMENTS[effort] or evaluations >= EVALUATIONS[effort]
        return used_up or time.monotonic() > self._end

    def _report(self, stage: str, done: int, total: int, screen: _Screen) -> None:
        self._progress(Progress(stage=stage, done=done, total=total, best_s=screen.best_s))

    def _too_big(self) -> ConfigError:
        assert self._memory is not None
        leanest = min(
            (estimate_memory(self._problem, choice) for choice in space(self._problem)),
            key=lambda estimate: estimate.total_bytes,
        )
        name, size = next(iter(leanest.parts.items()))
        why = (
            f"no plan fits: the leanest needs an estimated {gib(leanest.total_bytes)} per rank, "
            f"most of it {name} ({gib(size)})"
        )
        return ConfigError("memory per rank", gib(self._memory.bytes), why, WAYS_OUT[name])


WAYS_OUT = {
    STATE: "Spread the experts over more nodes, use fewer layers or smaller experts.",
    ACTIVATIONS: "Use a smaller batch per rank or shorter samples, or more shards per node.",
    BUFFERS: "Use a smaller batch per rank or shorter samples.",
}


def _others(best: Candidate, ranked: list[Candidate]) -> list[Candidate]:
    """The best of every other cut, best first: of the other schedules, and of as many more as are shown."""
    cuts: dict[object, Candidate] = {}
    for candidate in ranked:
        if _cut(candidate) != _cut(best):
            cuts.setdefault(_cut(candidate), candidate)
    schedules: dict[str, Candidate] = {}
    for candidate in cuts.values():
        if candidate.choice.schedule != best.choice.schedule:
            schedules.setdefault(candidate.choice.schedule, candidate)
    rest = [candidate for candidate in cuts.values() if candidate not in schedules.values()]
    shown = [*schedules.values(), *rest[: max(1, SHOWN - len(schedules))]]
    return sorted(shown, key=lambda candidate: candidate.predicted_s)


def _bounded(candidate: Candidate, bounds: QuickBounds) -> Candidate:
    return replace(candidate, quick_bound_s=bounds.seconds(candidate.choice))


def _cut(candidate: Candidate) -> tuple[object, ...]:
    choice = candidate.choice
    return (
        choice.schedule,
        choice.microbatches,
        choice.chunks,
        choice.backward_chunks,
        choice.dispatch,
        choice.more,
    )


def sketch(problem: Problem) -> Problem:
    """A model with few of the layers that repeat, the first and the last; the problem itself if none do."""
    work = problem.workload
    kinds = list(
        zip(problem.shape.moe_layers, work.all_reduce_bytes, work.expert_all_reduce_bytes, strict=True)
    )
    middle = kinds[1:-1]
    for period in range(1, FEW_LAYERS + 1):
        keep = -(-FEW_LAYERS // period) * period
        if len(middle) > keep and all(a == b for a, b in zip(middle, middle[period:], strict=False)):
            return problem.only((0, *range(1, 1 + keep), len(kinds) - 1))
    return problem
