"""Which plan a run starts with: section [schedule]'s, one that is measured and searched for, or a file's.

Rank 0 searches, and the others hear of it: measured costs differ from rank to rank, and one search takes less
of a machine than one on every core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.config import ConfigError
from penstock.cost import ClusterFile
from penstock.cost.clusters import find_cluster
from penstock.cost.match import mismatch
from penstock.moe.config import DispatchName
from penstock.plan import (
    Candidate,
    Choice,
    MemoryBudget,
    PlanFile,
    Problem,
    estimate_memory,
    explain,
    find_plan,
    predict_s,
)
from penstock.plan.effort import Searched
from penstock.plan.predict import alone
from penstock.plan.search import FoundPlan
from penstock.runtime import Machinery
from penstock.schedule import Schedule, ScheduleConfig, StepPlan
from penstock.step import StepShape, build_graph
from penstock.topology import Layout
from penstock.train.assemble import base_shape, gradient_bytes, workload
from penstock.train.config import RunConfig
from penstock.train.deciding import Beat, decided, decided_slowly
from penstock.train.dispatch import NAMES, candidates, choose_dispatch, with_dispatch
from penstock.train.plan_config import AUTO, GIVEN
from penstock.train.problem import run_problem
from penstock.train.profile import profile_run
from penstock.train.profiling.machine import here

WORTH_TRYING = 1.3
"""A plan that is predicted to take longer than so many times the best is not tried."""

UNUSED = (
    "warning: section [schedule] (name {name}) is not used, since plan.source = {source} decides; "
    "plan.source=given uses it"
)

CLUSTER_FILE, PLAN_FILE = "cluster.json", "plan.json"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A plan that was not chosen."""

    choice: Choice
    plan: StepPlan
    predicted_s: float


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan in use, and what it is the answer to. The same on all ranks.

    file: of the cluster, if a file describes it. lines: what people are told of the choice. rivals: others
    that may turn out to be faster, the most promising first. misses: by schedule that has been tried, how
    many times as long a step has taken as it promised to.
    """

    problem: Problem
    choice: Choice
    plan: StepPlan
    file: ClusterFile | None = None
    lines: tuple[str, ...] = ()
    rivals: tuple[Rival, ...] = ()
    misses: Mapping[str, float] = field(default_factory=dict)
    searched: Searched | None = None

    def expected_s(self, candidate: Candidate) -> float:
        """What is predicted, as far off as with its schedule before; as with all on average if it is new."""
        misses = self.misses.values()
        usual = sum(misses) / len(misses) if misses else 1.0
        return candidate.predicted_s * self.misses.get(candidate.choice.schedule, usual)

    @property
    def predicted_s(self) -> float:
        return predict_s(self.problem, self.choice, self.plan)

    def noting(self, line: str) -> Planned:
        """The same with one more line on how it came about."""
        return replace(self, lines=tuple(dict.fromkeys((*self.lines, line))))

    def save(self, folder: Path, model: str) -> None:
        """Leave the cluster and the plan in the run's folder; for one rank."""
        if self.file is not None:
            self.file.save(folder / CLUSTER_FILE)
        candidate = Candidate(
            choice=self.choice,
            plan=self.plan,
            predicted_s=self.predicted_s,
            bound=alone(self.problem).bound(self.choice, self.plan),
            memory_bytes=estimate_memory(self.problem, self.choice).total_bytes,
        )
        cluster = self.file.name if self.file is not None else "section [cluster]"
        paper = PlanFile.of(
            self.problem, candidate, model=model, cluster=cluster, why=self.lines, search=self.searched
        )
        paper.save(folder / PLAN_FILE)


@dataclass(frozen=True, kw_only=True)
class Order:
    """A step plan as it travels between ranks: small, and the graph is built where it arrives."""

    shape: StepShape
    text: str

    @staticmethod
    def of(plan: StepPlan) -> Order:
        return Order(shape=plan.shape, text=plan.schedule.text())

    @property
    def plan(self) -> StepPlan:
        graph = build_graph(self.shape)
        return StepPlan(graph, Schedule.parse(self.text, graph), self.shape)


# ---- the plan at the start ---------------------------------------------------------------------------------


def start(config: RunConfig, machinery: Machinery, say: Say) -> Planned:
    """The first plan of a resolved configuration. All ranks call it; it may measure the cluster.

    say: told what goes on and what was chosen.
    """
    if config.plan.source != GIVEN and config.schedule != unused(config.schedule):
        say(UNUSED.format(source=config.plan.source, name=config.schedule.name))
    if config.plan.file is not None:
        return replay(config, machinery, config.plan.file, say)
    if config.plan.source == AUTO:
        return search(config, machinery, say)
    return as_given(config, machinery, say)


def as_given(config: RunConfig, machinery: Machinery, say: Say) -> Planned:
    """What section [schedule] says, ordered by the costs of section [cluster]."""
    dispatch = choose_dispatch(config, machinery)
    if dispatch.line is not None:
        say(dispatch.line)
    problem = assumed_problem(with_dispatch(config, dispatch.name), machinery.layout)
    choice = given_choice(config.schedule, problem)
    return Planned(problem=problem, choice=choice, plan=problem.plan(choice))


def search(config: RunConfig, machinery: Machinery, say: Say) -> Planned:
    """Measure or read the cluster, and take the best plan for it."""
    file = cluster_of(config, machinery, say)
    problem = run_problem(config, machinery.layout, file)

    def decide(beat: Beat) -> tuple[list[tuple[Choice, Order, float]], tuple[str, ...], Searched]:
        found, lines = find(problem, file, config.plan.budget, say, beat)
        promising = [found.best, *_rivals(found, config.plan.trials - 1)]
        orders = [(each.choice, Order.of(each.plan), each.predicted_s) for each in promising]
        return orders, lines, found.searched

    timeout_s = config.parallel.timeout_s
    promising, lines, searched = decided_slowly(machinery.control, decide, "choosing a plan", timeout_s)
    for line in lines:
        say(line)
    best, *rivals = [
        Rival(choice=choice, plan=order.plan, predicted_s=seconds) for choice, order, seconds in promising
    ]
    return Planned(
        problem=problem,
        choice=best.choice,
        plan=best.plan,
        file=file,
        lines=lines,
        rivals=tuple(rivals),
        searched=searched,
    )


def _rivals(found: FoundPlan, most: int) -> list[Candidate]:
    """The best of as many other schedules, and of them that with the fewest pieces in any case.

    Of the dispatch that was chosen, since the model is built for it.
    """
    best, firsts = found.best, {found.best.choice.schedule: found.best}
    for other in found.others:
        near = other.predicted_s <= WORTH_TRYING * best.predicted_s
        if near and other.choice.dispatch == best.choice.dispatch:
            firsts.setdefault(other.choice.schedule, other)
    others = list(firsts.values())[1:]
    simplest = sorted(others, key=lambda each: len(each.plan.graph.tasks))[: min(1, most)]
    rest = [each for each in others if each not in simplest][: max(0, most - 1)]
    return [*rest, *simplest]


def replay(config: RunConfig, machinery: Machinery, path: Path, say: Say) -> Planned:
    """The plan in a file, as it is."""
    paper = decided(machinery.control, lambda: PlanFile.read(path), f"reading {path}")
    layout, file = machinery.layout, None
    problem = replace(assumed_problem(config, layout), dispatches=tuple(candidates(config.moe, layout)))
    if config.plan.cluster is not None:
        file = cluster_of(config, machinery, say)
        problem = run_problem(config, layout, file)
    plan = paper.step_plan(problem, str(path))
    say(f"plan {path}: made for {paper.cluster}, {1000 * paper.predicted_s:.0f} ms per step predicted there")
    return Planned(problem=problem, choice=paper.choice.choice, plan=plan, file=file, lines=paper.why)


def cluster_of(config: RunConfig, machinery: Machinery, say: Say) -> ClusterFile:
    """The cluster file that section [plan] names, with a warning if it is not of here; else measured now."""
    plan, layout = config.plan, machinery.layout
    if plan.cluster is None:
        say(f"measuring the cluster for about {plan.profile_s:.0f} s (plan.cluster=FILE skips that)")
        return profile_run(config, machinery, budget_s=plan.profile_s)
    name = plan.cluster
    file = decided(machinery.control, lambda: find_cluster(name), "reading the cluster file")
    warning = mismatch(file, here(machinery.device), layout.world_size, layout.nodes)
    if warning is not None:
        say(f"warning: {warning}")
    return file


def find(
    problem: Problem, file: ClusterFile, budget: float, say: Say, beat: Beat
) -> tuple[FoundPlan, tuple[str, ...]]:
    """The best plan and the five lines that explain it, and one more where the budget cut the search short.

    Memory is an estimate: where nothing fits by it, a warning is said and the best plan is taken all the
    same, since the run itself will find out. beat: called after every simulation.
    """
    memory = None if file.memory_bytes is None else MemoryBudget(bytes=file.memory_bytes)

    def searched() -> FoundPlan:
        return find_plan(problem, memory=memory, budget=budget, progress=lambda _: beat())

    try:
        found = searched()
    except ConfigError as error:
        if memory is None:
            raise
        say(f"warning: {error}")
        memory = None
        found = searched()
    beat()
    return found, (*explain(problem, found, memory).lines, *found.searched.lines)


# ---- problems and choices ----------------------------------------------------------------------------------


def assumed_problem(config: RunConfig, layout: Layout) -> Problem:
    """The step of this run on what section [cluster] assumes."""
    gradients = gradient_bytes(config.model, config.moe, layout)
    sizes = workload(config, layout, *gradients)
    return Problem(
        shape=base_shape(config), workload=sizes, cluster=config.cluster, dispatches=(sizes.dispatch,)
    )


def given_choice(schedule: ScheduleConfig, problem: Problem) -> Choice:
    """What section [schedule] means as a choice: where it leaves the number of chunks open, the usual one."""
    work = problem.workload
    pieces = schedule.pieces(work.all_reduce_bytes, work.expert_all_reduce_bytes)
    shape = schedule.system.shape(problem.shape, pieces)
    return Choice(
        schedule=schedule.name,
        microbatches=schedule.microbatches,
        chunks=shape.chunks,
        backward_chunks=shape.backward_chunks,
        all_reduce_chunk_bytes=schedule.all_reduce_chunk_bytes,
        priority=schedule.priority,
        dispatch=work.dispatch,
    )


def unused(schedule: ScheduleConfig) -> ScheduleConfig:
    """The section with nothing in it but what counts whoever decides."""
    return ScheduleConfig(refine_after=schedule.refine_after)


def with_choice(config: RunConfig, choice: Choice) -> RunConfig:
    """The same run with sections [schedule] and [moe] saying what was chosen."""
    schedule = replace(
        config.schedule,
        name=choice.schedule,
        microbatches=choice.microbatches,
        chunks=choice.chunks,
        backward_chunks=choice.backward_chunks,
        all_reduce_chunk_bytes=choice.all_reduce_chunk_bytes,
        priority=choice.priority,
    )
    return with_dispatch(replace(config, schedule=schedule), _dispatch_name(choice.dispatch))


def _dispatch_name(name: str) -> DispatchName:
    return next(each for each in NAMES if each == name)
