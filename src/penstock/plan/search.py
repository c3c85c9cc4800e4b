"""The joint plan: the fastest choice that simulation finds, with lower bounds as the stopping rule.

1. A few good plans that need no planner are simulated in full: there is an answer at once.
2. From the best of them, one decision after another is changed while that helps.
3. Every published planner's choice is simulated in full, so the plan is never worse than any of them, and
   step 2 is repeated from the best of these.
4. The best cuts of `fsmoe` get its gradient partition, too. The best of `penstock` are ordered by short local
   searches, and the best of these by a full one (its priority `search`), which is slower and better.
5. All other cuts follow in the order of their lower bounds, until no bound is below the best time found; at
   intervals, the best of them go through step 4.

A long model of layers that repeat is represented by a short one in steps 2 and 5; the best cuts found there
are simulated in full. All of this is one fixed sequence, and a budget of simulated tasks decides where it
ends: the same problem has the same plan on every machine, and a larger budget never gives a worse plan.
A caller may end it by the clock as well, so that it has an end on a busy machine, too.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from penstock.config import ConfigError
from penstock.decision import Decision, Partition
from penstock.decision.record import FIELDS
from penstock.plan.bound import QuickBounds
from penstock.plan.candidate import Candidate, NothingFitsError, Room, check_prices, evaluate, least_memory
from penstock.plan.effort import Effort, Meter, OutOfBudgetError, Searched
from penstock.plan.memory import ACTIVATIONS, BUFFERS, STATE
from penstock.plan.problem import QUICK, Problem
from penstock.plan.published import fsmoe_choice, idle_only, planners
from penstock.plan.space import CUTS, neighbours, settled, space, usual_chunk_bytes, valid
from penstock.plan.successive_halving import SuccessiveHalving
from penstock.schedule.flowmoe import FlowMoE
from penstock.schedule.moe_pipeline import MoEPipeline
from penstock.schedule.penstock import Penstock
from penstock.words import gib

CHECKPOINT = 20_000
"""After this number of placements in step 5 its best cuts are simulated in full."""

FINALISTS = 4
"""The number of cuts of a long model that are simulated in full."""

SEARCHED = {"low": 0, "quick": 0, "usual": 1}
"""The number of plans ordered by a full local search, each time orders are searched."""

SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a search.

    Attributes:
        stage: What the search is doing, as text.
        done: The work done so far, in the unit of `total`.
        total: The most work it may do.
        best_s: The seconds of the best plan, if any.
    """

    stage: str
    done: int
    total: int
    best_s: float | None


@dataclass(frozen=True, kw_only=True)
class FoundPlan:
    """The best plan found, and its alternatives.

    Attributes:
        others: The next best plans of other schedules or cuts, best first.
        lower_bound_s: The least bound over all cuts, or the best prediction, if that is shorter.
        searched: How much was examined to find it.
        effort: What a budget of 1 was.
    """

    best: Candidate
    others: tuple[Candidate, ...]
    lower_bound_s: float
    searched: Searched
    effort: Effort = "usual"


def find_plan(
    problem: Problem,
    *,
    memory_bytes: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    budget: float = 1.0,
    effort: Effort = "usual",
    ends: Callable[[], bool] = lambda: False,
    starts: Sequence[Decision] = (),
    basis: Basis | None = None,
) -> FoundPlan:
    """Find the fastest plan that fits the memory of a rank.

    Args:
        memory_bytes: The memory of a rank; None = not known, and every plan fits.
        progress: Is called with the progress of the search.
        budget: How many times as much as usual is examined, in simulated tasks; below 1 even published
            planners may be left out.
        effort: `low` for thousands of small problems, a few dozen simulations each; `quick` for plans that
            are only compared: nothing but what lies on the way is looked at.
        ends: Tells whether the time is over; the best plan found by then is returned.
        starts: The choices with which the search begins, besides its own.
        basis: What another search for this problem in this memory has worked out.

    Raises:
        ConfigError: If no plan fits, or if costs are not finite.
    """
    assert basis is None or (basis.given is problem and basis.memory_bytes == memory_bytes), (
        "it is of another step"
    )
    with _without_collector():
        basis = basis or Basis(problem, memory_bytes)
        search = _Search(basis, progress or (lambda _: None), budget, effort, ends)
        return search.run(starts)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Suspend garbage collection: graphs have no cycles; looking for them is a seventh of a search's time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass
class _Screen:
    """Simulated seconds of choices on the problem itself or on a short model that stands for it.

    memory_bytes: What a choice must fit into; else its seconds are infinite. None = no limit.
    """

    evaluated: Evaluated
    meter: Meter
    memory_bytes: int | None = None
    seconds: dict[Decision, float] = field(default_factory=dict)
    candidates: dict[Decision, Candidate] = field(default_factory=dict)

    def look(self, choice: Decision, *, always: bool = False) -> float:
        """Return a choice's seconds. Raises OutOfBudgetError if new with no budget left, unless `always`."""
        if choice not in self.seconds:
            if not always:
                self.meter.check()
            candidate = self.evaluated.of(choice)
            self.meter.note(self.evaluated.problem, choice, len(candidate.plan.graph.tasks))
            fits = self.memory_bytes is None or candidate.memory_bytes <= self.memory_bytes
            self.seconds[choice] = candidate.predicted_s if fits else math.inf
            if fits:
                self.candidates[choice] = candidate
        return self.seconds[choice]

    def ranked(self) -> list[Decision]:
        """Return the choices that fit, best first; of equal ones the one examined first."""
        return sorted(self.candidates, key=lambda choice: self.seconds[choice])

    @property
    def best_s(self) -> float:
        return min(self.seconds.values(), default=math.inf)


class _Search:
    def __init__(
        self,
        basis: Basis,
        progress: Callable[[Progress], None],
        budget: float,
        effort: Effort,
        ends: Callable[[], bool],
    ) -> None:
        self._basis, self._room, self._problem = basis, basis.room, basis.problem
        self._memory_bytes, self._progress = basis.memory_bytes, progress
        self._budget, self._effort = budget, effort
        self._meter = Meter(effort, budget, ends)
        self._full = _Screen(basis.full, self._meter, basis.memory_bytes)
        self._screen = self._full if basis.short is basis.full else _Screen(basis.short, self._meter)
        self._bounds = basis.bounds
        self._halving = SuccessiveHalving(basis.short.problem, self._meter)
        self._planners = planners(basis.problem)
        self._stage, self._unplanned = "", list(self._planners)
        self._partition: Partition | None = None

    def run(self, starts: Sequence[Decision]) -> FoundPlan:
        wanted = dict.fromkeys((*starts, *self._basis.firsts))
        least = map(self._room.with_least_recompute, wanted)
        firsts = [choice for choice in least if choice is not None]
        firsts = firsts or self._room.first_held
        if self._effort == "quick":
            # Look at the first plans and go down from the best, on the short model; simulate one in full.
            self._stage, screen = "quick plans", self._screen
            rule = dict(self._problem.forced).get("priority", QUICK)
            for choice in firsts:
                screen.look(replace(choice, partition=None, priority=rule), always=True)
            if not screen.candidates:
                raise self._too_big()
            try:
                self._descend([screen.ranked()[0]])
            except OutOfBudgetError:  # the best so far is taken
                self._stage = "quick plans"
            self._full.look(screen.ranked()[0], always=True)
            if not self._full.candidates:  # the short model is smaller than what has to fit
                raise self._too_big()
            return self._found([], "quick plans", late=self._meter.late)
        everything, stopped, late = list[Decision](), None, False
        # Else only choices on the way are examined.
        if self._effort != "low" or self._memory_bytes is not None:
            everything = [
                choice for choice in dict.fromkeys(space(self._problem)) if self._room.holds(choice)
            ]
        for stage in (
            lambda: self._begin(firsts),
            lambda: self._descend(self._best_of(firsts)),
            self._compare_published,
            lambda: self._finish(orders=True),
            lambda: self._walk(everything),
            self._try_as_the_best,
        ):
            try:
                stage()
            except OutOfBudgetError:  # later stages still run the choices that must not be left out
                if stopped is None:
                    stopped, late = self._stage, self._meter.late
        if not self._full.candidates:
            raise self._too_big()
        return self._found(everything, stopped, late=late)

    def _begin(self, firsts: list[Decision]) -> None:
        """Simulate the first plans whatever the budget, so that there is an answer."""
        self._stage = "first plans"
        for choice in firsts:
            self._full.look(choice, always=True)
            self._report(len(self._full.seconds), len(firsts))

    def _compare_published(self) -> None:
        """Simulate each published planner's choice; with at least the usual budget none is left out."""
        self._stage, choices = "published planners", []
        always = self._budget >= 1
        for number, (name, planner) in enumerate(self._planners.items()):
            if self._meter.late or (self._meter.used_up and not always):
                raise OutOfBudgetError
            made = planner(self._problem)
            self._meter.note_planner()
            self._partition = made.partition or self._partition
            choice = self._room.with_least_recompute(made)
            if choice is not None:
                self._full.look(choice, always=always)
                choices.append(choice)
            self._unplanned.remove(name)
            self._report(number + 1, len(self._planners))
        self._descend(self._best_of(choices)[:1])

    def _best_of(self, choices: list[Decision]) -> list[Decision]:
        """Return the two best choices of different schedules, without partitions."""
        firsts: dict[str, Decision] = {}
        for choice in sorted(choices, key=lambda choice: self._full.seconds[choice]):
            firsts.setdefault(choice.schedule, replace(choice, partition=None))
        return [choice for choice in firsts.values() if self._room.holds(choice)][:2]

    def _descend(self, starts: list[Decision]) -> None:
        """Change one decision at a time, as long as that is an improvement."""
        self._stage, screen = "better cuts", self._screen
        for start in starts:
            best, best_s = start, screen.look(start)
            improved = True
            while improved:
                improved = False
                for choice in filter(self._room.holds, neighbours(self._problem, best)):
                    if self._bounds.seconds(choice) >= screen.best_s:
                        continue
                    if screen.look(choice) < best_s:
                        best, best_s, improved = choice, screen.look(choice), True
                    self._report_work()

    def _walk(self, choices: list[Decision]) -> None:
        """Examine the remaining choices in the order of their bounds, until none is below the best time."""
        self._stage = "all cuts by their bounds"
        screen, meter = self._screen, self._meter
        if self._effort != "usual" or meter.used_up:
            raise OutOfBudgetError
        begin = checked = meter.spent
        doubled = CHECKPOINT
        # A choice's own bound is worked out when its looser one, which costs less, is the least.
        bounds = [(self._bounds.loose(choice), number, False) for number, choice in enumerate(choices)]
        heapify(bounds)
        while bounds:
            bound_s, number, own = heappop(bounds)
            if not own:
                heappush(bounds, (self._bounds.seconds(choices[number]), number, True))
                continue
            if bound_s >= screen.best_s:
                break
            self._stage = "all cuts by their bounds"
            screen.look(choices[number])
            self._report_work()
            if meter.spent - checked >= CHECKPOINT:
                orders = meter.spent - begin >= doubled
                doubled *= 2 if orders else 1
                self._finish(orders=orders)
                checked = meter.spent
        self._finish(orders=True)

    def _try_as_the_best(self) -> None:
        """Simulate every other schedule with what the best plan decides beside the cut, dispatch above all.

        A search that ends early knows some schedules with another dispatch only, and a table of its plans
        would show that as a difference of schedules. One simulation for each, whatever the budget.
        """
        self._stage = "other schedules as the best"
        ranked = self._full.ranked()
        if self._effort != "usual" or self._meter.late or not ranked:
            return
        shared = [name for name, field in FIELDS.items() if not field.cuts and name not in CUTS]
        firsts = {choice.schedule: choice for choice in reversed(ranked)}
        for first in firsts.values():
            choice = first
            for name in shared:
                choice = choice.deciding(name, ranked[0].value(name))
            fitting = self._room.with_least_recompute(settled(self._problem, choice))
            if fitting is not None:
                self._full.look(fitting, always=True)

    def _finish(self, *, orders: bool) -> None:
        """Simulate the best cuts in full, if wanted also in the best orders that local search finds."""
        self._stage = "the best in full"
        ranked = self._screen.ranked()
        finalists = ranked[:FINALISTS]
        gapped = [choice for choice in ranked if choice.reads("partition")][:1]
        whole = finalists if self._screen is not self._full else []
        # With the gradients in the gaps that FSMoE's planner chose for this model.
        parted = [
            replace(choice, partition=self._partition) if choice.reads("partition") else choice
            for choice in (*finalists, *gapped)
        ]
        self._look_in_full([*whole, *parted])
        if orders and SEARCHED[self._effort]:
            self._stage = "better orders"
            self._look_in_full(self._halving.ranked(self._screen.candidates)[: SEARCHED[self._effort]])

    def _look_in_full(self, choices: list[Decision]) -> None:
        for number, choice in enumerate(choices):
            self._full.look(choice)
            self._report(number + 1, len(choices))

    def _found(self, everything: list[Decision], stopped: str | None, *, late: bool) -> FoundPlan:
        full = self._full
        self._progress(
            Progress(stage="lower bounds of the remaining plans", done=0, total=1, best_s=full.best_s)
        )
        best, *rest = (full.candidates[choice] for choice in full.ranked())
        looked = {*self._screen.seconds, *full.seconds}
        bounds = self._bounds.of(self._problem)
        left = [self._bounds.loose(choice) for choice in everything if choice not in looked]
        ruled_out = sum(bound_s >= self._screen.best_s for bound_s in left)
        return FoundPlan(
            best=_bounded(best, bounds),
            others=tuple(_bounded(each, bounds) for each in _others(best, rest)),
            # Bounds are of tasks' means; scatter may make a prediction shorter.
            lower_bound_s=min(best.predicted_s, *(bounds.loose(each) for each in {*looked, *everything})),
            searched=Searched(
                simulated=len(looked),
                ruled_out=ruled_out,
                left_out=len(left) - ruled_out,
                placements=self._meter.spent,
                allowed=self._meter.allowed,
                budget=self._budget,
                stopped=stopped,
                late=late,
                skipped=tuple(self._unplanned),
                impossible=_left_out(self._problem),
            ),
            effort=self._effort,
        )

    def _report_work(self) -> None:
        allowed = self._meter.allowed  # the first plans are simulated whatever the budget
        self._report(min(self._meter.spent, allowed), allowed)

    def _report(self, done: int, total: int) -> None:
        best_s = self._full.best_s  # never the best of a short model, whose steps are shorter, too
        best = best_s if self._full.candidates else None
        self._progress(Progress(stage=self._stage, done=done, total=total, best_s=best))

    def _too_big(self) -> ConfigError:
        assert self._memory_bytes is not None
        leanest = least_memory(self._problem)
        name, size = next(iter(leanest.parts.items()))
        why = (
            f"no plan fits: the plan with the least memory needs an estimated {gib(leanest.total_bytes)} "
            f"per rank, most of it for {name} ({gib(size)})"
        )
        return NothingFitsError("memory per rank", gib(self._memory_bytes), why, WAYS_OUT[name])


WAYS_OUT = {
    STATE: "Spread the experts over more nodes, use fewer layers or smaller experts.",
    ACTIVATIONS: "Use a smaller batch per rank or shorter samples, or more shards per node, or let blocks be "
    "recomputed (plan.recompute=auto).",
    BUFFERS: "Use a smaller batch per rank or shorter samples.",
}


def _others(best: Candidate, ranked: list[Candidate]) -> list[Candidate]:
    """Return the best of every other cut, best first: of the other schedules, and more up to SHOWN."""
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


def _cut(candidate: Candidate) -> Decision:
    """Return the decision without sizes and orders."""
    usual = Decision()
    return replace(
        candidate.choice,
        all_reduce_chunk_bytes=usual.all_reduce_chunk_bytes,
        priority=usual.priority,
        partition=None,
    )


# ---- the start of a search: good plans that need no planner, for an answer after a few simulations --------


def first_choices(problem: Problem) -> list[Decision]:
    """Return plain expert parallelism, and every idea on its own with few pieces: microbatches, chunks, gaps.

    The gaps are FSMoE's by its closed formulas, filled with what fits into them and no more.
    """
    dispatch, size = problem.dispatches[0], usual_chunk_bytes(problem)
    choices = [
        Decision(dispatch=dispatch),
        Decision(schedule=MoEPipeline.name, chunks=2, backward_chunks=2, dispatch=dispatch),
        Decision(schedule=FlowMoE.name, microbatches=2, all_reduce_chunk_bytes=size, dispatch=dispatch),
    ]
    for microbatches, chunks in ((2, 1), (1, 2)):
        choices.append(
            Decision(
                schedule=Penstock.name,
                microbatches=microbatches,
                chunks=chunks,
                backward_chunks=chunks,
                all_reduce_chunk_bytes=size,
                priority="critical_path",
                dispatch=dispatch,
            )
        )
    gaps = settled(problem, fsmoe_choice(problem, idle_only))
    return list(dict.fromkeys([*(valid(problem, choice) for choice in choices), gaps]))


# ---- what all searches for one step have in common, whatever their effort, so that it is worked out once --


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

    Raises:
        ConfigError: If the costs of the step are not sensible.
    """

    def __init__(self, given: Problem, memory_bytes: int | None) -> None:
        check_prices(given)
        self.given, self.memory_bytes = given, memory_bytes
        self.room = Room(given, memory_bytes)
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


def _left_out(problem: Problem) -> tuple[str, ...]:
    """Return the schedules that cannot cut the step, or not with every dispatch, and why."""
    lines = (
        f"{name}: {why}" if (why := problem.refusal(name)) else f"{name} with dispatch {way}: {each}"
        for (name, way), each in problem.impossible.items()
    )
    return tuple(dict.fromkeys(lines))
