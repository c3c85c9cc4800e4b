"""Participants of a comparison."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.autotune.problem import run_problem
from penstock.autotune.profile.measure import profile_run, profile_schedules
from penstock.autotune.profile.sample import ignore
from penstock.cost import ProfiledCluster
from penstock.cost.measured import listed
from penstock.decision import ScheduleConfig
from penstock.lab.bench import checkout
from penstock.lab.bench.config import AUTO, BenchConfig, Named, variants
from penstock.lab.bench.contender import Entry, first_of_every_work, timed
from penstock.lab.bench.scheduled import Stacks
from penstock.plan import Candidate, FoundPlan, Problem, evaluate, find_plan, reasons
from penstock.plan.candidate import whole_s
from penstock.plan.effort import time_limit
from penstock.plan.predict import interval_s
from penstock.plan.published import planners
from penstock.topology import Control, Layout

COMPUTE_S: Final = 20.0
"""Seconds for which compute tasks are measured before schedules are compared."""

BESIDE: Final = ("sequential", "pipemoe", "flowmoe", "fsmoe")
"""Published planners whose plans are measured, too; the first is the base of all ratios."""

PLANNED: Final = "planned"
SEARCHING: Final = "searching for a plan"


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """A plan, and its problem, which says how the iteration ends."""

    problem: Problem
    candidate: Candidate

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the whole iteration, clipping and update included."""
        return whole_s(self.problem, self.candidate)


class Field(Protocol):
    """All contenders of one comparison on this rank."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Entries in the order in which they take turns; the first is the base of all ratios."""
        ...

    @property
    def control(self) -> Control: ...

    @property
    def label(self) -> str | None:
        """Label of virtual devices in every output; None for real ones."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Last lines of the table."""
        ...

    @property
    def traffic(self) -> Counter[int]:
        """Bytes that the entries on Penstock's transport have sent from here, by receiving rank."""
        ...

    @property
    def layout(self) -> str:
        """Which ranks share what, see `layout_words`."""
        ...

    def compute_solo_s(self, entry: Entry, number: int) -> float:
        """Return seconds of an entry's step `number` without a network, on all ranks at once."""
        ...

    def close(self) -> None: ...


class RealField:
    """Real computation: plans of one model by their predictions, and other systems with the same weights."""

    def __init__(
        self,
        stacks: Stacks,
        candidates: Mapping[str, Iteration],
        *,
        notes: tuple[str, ...] = (),
        peers: Sequence[str] = (),
    ) -> None:
        """Prepare the entries.

        Where peers take part, `sequential` also runs on Gloo's own all-to-all: every rival has both columns.

        Args:
            candidates: Plans by the name of the entry.
            notes: Last lines of the table.
            peers: Names of other systems.
        """
        self.label: str | None = None
        self.layout = layout_words(stacks.layout)
        self.notes, self._stacks, self.control = notes, stacks, stacks.machinery.control
        entries = [_entry(stacks, *item) for item in candidates.items()]
        self._alone = {
            work: stacks.scheduled(entry.plan, sends=False)
            for work, entry in first_of_every_work(entries).items()
            if entry.plan is not None
        }
        self._others: list[Entry] = []
        if peers:
            others = checkout.peers(",".join(peers))
            self._others = others.peer_entries(stacks, entries)
            self.notes += others.peer_notes(peers)
        self.entries = (*entries, *self._others)

    @property
    def traffic(self) -> Counter[int]:
        return self._stacks.machinery.transports.traffic

    def compute_solo_s(self, entry: Entry, number: int) -> float:
        alone = self._alone[entry.work]
        alone.prepare(number)
        self.control.barrier("starting computation alone")
        return timed(alone.step, number)

    def close(self) -> None:
        for entry in self._others:
            entry.contender.close()
        self._stacks.close()


def _entry(stacks: Stacks, name: str, iteration: Iteration) -> Entry:
    contender = stacks.scheduled(iteration.candidate.plan)
    return Entry(
        name=name,
        transport="penstock",
        contender=contender,
        plan=contender.plan,
        simulated_s=iteration.predicted_s,
        interval_s=interval_s(iteration.problem, iteration.predicted_s),
    )


def layout_words(layout: Layout) -> str:
    """Return `dp 2 x tp 2, edp 1 x ep 2 x etp 2`; "" where every rank has its own attention and experts."""
    if layout.tp_size == layout.etp_size == 1:
        return ""
    dense = f"dp {layout.dp_size} x tp {layout.tp_size}"
    return f"{dense}, edp {layout.edp_size} x ep {layout.ep_size} x etp {layout.etp_size}"


def schedules_field(config: BenchConfig, layout: Layout, say: Callable[[str], None] = ignore) -> RealField:
    """Return the compared schedules, each in its variant of the best prediction, and the peers.

    Args:
        say: Called with what is done before the first step is compared.
    """
    stacks = Stacks(config, layout)
    if AUTO in config.compare.schedules:
        # All predicted from one profile: the schedules, and the plan that the joint search chooses.
        problem = _profiled(stacks)
        say(SEARCHING)
        result = chosen(problem, stacks.machinery.control)
        tried = predicted(stacks, problem)
        best = {
            name: fastest(tried[name]) if name in tried else Iteration(problem=problem, candidate=result.best)
            for name in stacks.config.compare.schedules
        }
        notes = (*reasons(problem, result).lines, *_doubts(problem))
        return RealField(stacks, best, notes=notes, peers=stacks.config.compare.peers)
    say("measuring the cluster for the predictions")
    problem = profiled_for(stacks)
    best = {name: fastest(several) for name, several in predicted(stacks, problem).items()}
    return RealField(stacks, best, notes=_doubts(problem), peers=config.compare.peers)


def _profiled(stacks: Stacks) -> Problem:
    """Return the problem of the step on links and tasks as measured now."""
    budget_s = stacks.config.compare.profile_s
    file = profile_run(stacks.run_config, stacks.machinery, budget_s=budget_s)
    return run_problem(stacks.run_config, stacks.layout, file)


def chosen(problem: Problem, control: Control) -> FoundPlan:
    """Return the result of the joint search on rank 0, on all ranks, which must call this together."""

    def search() -> FoundPlan:
        return find_plan(problem, ends=time_limit(time.monotonic))

    return control.decided(search, "choosing a plan", slowly=True)


def _doubts(problem: Problem) -> tuple[str, ...]:
    """Return what the profile could not tell."""
    assert isinstance(problem.cluster, ProfiledCluster), "it was profiled"
    return listed(problem.cluster.file.doubts)


def _variants(stacks: Stacks) -> dict[str, tuple[ScheduleConfig, ...]]:
    """Return the variants of every schedule that is compared by name."""
    names = [name for name in stacks.config.compare.schedules if name != AUTO]
    return {name: variants(stacks.config, name) for name in names}


def profiled_for(stacks: Stacks) -> Problem:
    """Return the problem of the step on links and tasks, measured as far as the compared schedules need."""
    schedules = [variant for several in _variants(stacks).values() for variant in several]
    budget_s = min(COMPUTE_S, stacks.config.compare.profile_s)
    file = profile_schedules(stacks.run_config, stacks.machinery, schedules, budget_s)
    return run_problem(stacks.run_config, stacks.layout, file)


def predicted(stacks: Stacks, problem: Problem) -> dict[str, list[Iteration]]:
    """Predict every variant of every compared schedule from one profile of what they need."""
    return {
        name: [_predicted(_problem_of(stacks, problem, name), variant) for variant in several]
        for name, several in _variants(stacks).items()
    }


def _predicted(problem: Problem, variant: ScheduleConfig) -> Iteration:
    candidate = evaluate(problem, variant.decision(problem.workload.dispatch))
    return Iteration(problem=problem, candidate=candidate)


def _problem_of(stacks: Stacks, problem: Problem, name: str) -> Problem:
    """Return the problem with the optimiser of this entry."""
    assert isinstance(problem.cluster, ProfiledCluster), "it was profiled"
    if not Named.of(name).shares:
        return problem
    return run_problem(stacks.run_of(name), stacks.layout, problem.cluster.file)


def fastest(iterations: Sequence[Iteration]) -> Iteration:
    """Return the iteration with the least prediction."""
    return min(iterations, key=lambda iteration: iteration.predicted_s)


def planned_field(config: BenchConfig, layout: Layout, say: Callable[[str], None] = ignore) -> RealField:
    """Return the plan that the joint search chooses, and four published ones, all predicted from one profile.

    The runs that are predicted are unknown: the profile is measured before them, task by task.
    """
    stacks = Stacks(config, layout)
    problem = _profiled(stacks)
    say(SEARCHING)
    result = chosen(problem, stacks.machinery.control)
    published = planners(problem)
    plans = {name: evaluate(problem, published[name](problem)) for name in BESIDE} | {PLANNED: result.best}
    iterations = {name: Iteration(problem=problem, candidate=plan) for name, plan in plans.items()}
    notes = (*reasons(problem, result).lines, *_doubts(problem))
    return RealField(stacks, iterations, notes=notes)
