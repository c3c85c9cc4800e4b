"""Makes a run's first plan: from section [schedule], by measuring and searching, or from a file.

Rank 0 searches and sends its plan to the others: measured costs differ from rank to rank, and one search
loads a machine less than a search on every core.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.autotune.planned import Learnt, Order, Planned, Rival, decided, decided_slowly
from penstock.autotune.problem import (
    assumed_problem,
    check_shared,
    dispatches_of,
    given_choice,
    open_runs,
    run_problem,
    settled,
)
from penstock.autotune.profile import profile_links, profile_run
from penstock.autotune.profile.sample import here
from penstock.config import UNSET, ConfigError, to_dict
from penstock.cost import ClusterFile
from penstock.cost.clusters import UNNAMED, find_cluster
from penstock.cost.doubts import IN_A_RUN, summary
from penstock.cost.match import mismatch
from penstock.decision import Decision, PlacementConfig, ScheduleConfig
from penstock.plan import (
    Candidate,
    MemoryBudget,
    PlanFile,
    Problem,
    evaluate,
    find_plan,
    reasons,
)
from penstock.plan.candidate import whole_s
from penstock.plan.effort import Searched, time_limit
from penstock.plan.optimizers import Updated
from penstock.plan.plan_config import AUTO, FIXED
from penstock.plan.plan_file import OtherPlan, PlanSizes
from penstock.plan.search import FoundPlan
from penstock.runtime import Machinery
from penstock.train.config import RunConfig
from penstock.train.output import CLUSTER_FILE, PLAN_FILE
from penstock.train.pilot import Resumption
from penstock.words import within

logger = logging.getLogger(__name__)

WORTH_TRYING = 1.3
"""Plans whose predicted time is more than WORTH_TRYING times the best are not tried."""

_Found = tuple[int, list[tuple[Order, float]], tuple[str, ...], Searched, tuple[OtherPlan, ...]]
"""Number of the problem, promising plans, explanation, how much was searched, and the other plans found."""

UNUSED = (
    "section [schedule] (name {name}) is ignored because plan.mode = {mode}. Set plan.mode=fixed to use it"
)

UNMOVED = (
    "placement.{name} = {asked} is ignored because the plan in {source} has {planned}. "
    "Set plan.mode=fixed to use it"
)


def start(config: RunConfig, machinery: Machinery) -> Planned:
    """Return the first plan of a resolved configuration. All ranks call it; it may measure the cluster."""
    if config.plan.mode != FIXED and config.schedule != unused(config.schedule):
        logger.warning(UNUSED.format(mode=config.plan.mode, name=config.schedule.name))
    if config.plan.path is not None:
        return replay(config, machinery, config.plan.path)
    if config.plan.mode == AUTO:
        return search(config, machinery)
    return as_given(config, machinery)


def as_given(config: RunConfig, machinery: Machinery) -> Planned:
    """Return the plan that section [schedule] describes, ordered by the costs of section [cluster].

    Where the dispatch is open and ranks have a choice, links are measured for some seconds, and the dispatch
    with the shortest predicted step is taken.
    """
    problem, choice = _asked(config, machinery)
    names = dispatches_of(problem, choice)
    if len(names) > 1:
        config = settled(config, sharded=problem.shape.updating is not None)
        measured = run_problem(config, machinery.layout, profile_links(config, machinery))
        times_s = {name: evaluate(measured, replace(choice, dispatch=name)).predicted_s for name in names}
        choice = replace(choice, dispatch=min(times_s, key=times_s.__getitem__))
        times = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in times_s.items())
        logger.info(
            f"dispatch {choice.dispatch} chosen: predicted step times with the measured links: {times}"
        )
    planned = Planned(problem=problem, choice=choice, plan=problem.plan(choice))
    logger.info(f"{planned.name}: {choice.words}")
    return planned


def _asked(config: RunConfig, machinery: Machinery) -> tuple[Problem, Decision]:
    """Return what section [schedule] describes, with the optimiser of the shorter iteration if it is open."""
    asked: list[tuple[float, Problem, Decision]] = []
    for run in open_runs(config):
        problem = assumed_problem(run, machinery.layout)
        choice = given_choice(run, problem)
        asked.append((whole_s(problem, evaluate(problem, choice)), problem, choice))
    _, problem, choice = min(asked, key=lambda each: each[0])
    return problem, choice


def search(config: RunConfig, machinery: Machinery) -> Planned:
    """Measure or read the cluster, and return the best plan for it."""
    check_shared(config.moe, config.parallel)
    file = cluster_of(config, machinery)
    problems = [run_problem(run, machinery.layout, file) for run in open_runs(config)]

    def decide() -> _Found:
        number, found, lines = _fastest(problems, file, config.plan.budget)
        promising = [found.best, *_rivals(found, config.plan.trials - 1)]
        problem = problems[number]
        orders = [(Order.of(each.choice, each.plan), whole_s(problem, each)) for each in promising]
        return number, orders, lines, found.searched, OtherPlan.among(problem, found.others)

    decided_by = machinery.control, decide, "choosing a plan", config.parallel.timeout_s
    number, promising, lines, searched, others = decided_slowly(*decided_by)
    logger.info("\n".join(numbered(shown(lines), 1)))
    best, *rivals = [
        Rival(choice=order.choice, plan=order.plan, predicted_s=seconds) for order, seconds in promising
    ]
    return Planned(
        problem=problems[number],
        choice=best.choice,
        plan=best.plan,
        file=file,
        lines=lines,
        rivals=tuple(rivals),
        searched=searched,
        learnt=Learnt(others=others),
    )


def _fastest(
    problems: Sequence[Problem], file: ClusterFile, budget: float
) -> tuple[int, FoundPlan, tuple[str, ...]]:
    """Solve all problems; return the one with the shortest iteration, its plan and explanation.

    A problem that fits into memory is preferred to any that does not.
    """
    found = [_searched(problem, file, budget, IN_A_RUN, time.monotonic) for problem in problems]
    times_s = [whole_s(each, plan.best) for each, (plan, _, _) in zip(problems, found, strict=True)]
    number = min(range(len(found)), key=lambda i: (found[i][2] is not None, times_s[i]))
    plan, lines, warning = found[number]
    if warning is not None:
        logger.warning(warning)
    if len(problems) == 1:
        return number, plan, lines
    both = ", ".join(
        Updated(problem=problem, found=each).words
        for problem, (each, _, _) in zip(problems, found, strict=True)
    )
    return (
        number,
        plan,
        (*lines, f"Update   predicted whole iterations, clipping and update included: {both}"),
    )


def _rivals(found: FoundPlan, most: int) -> list[Candidate]:
    """Return the best plans of at most `most` other schedules, among them that with the fewest tasks.

    They share the chosen dispatch and form of rows, since the model is built for these.
    """
    best, firsts = found.best, {found.best.choice.schedule: found.best}
    for other in found.others:
        near = other.predicted_s <= WORTH_TRYING * best.predicted_s
        same = replace(other.choice, dispatch=best.choice.dispatch, comm_dtype=best.choice.comm_dtype)
        if near and same == other.choice:
            firsts.setdefault(other.choice.schedule, other)
    others = list(firsts.values())[1:]
    simplest = sorted(others, key=lambda each: len(each.plan.graph.tasks))[: min(1, most)]
    rest = [each for each in others if each not in simplest][: max(0, most - 1)]
    return [*rest, *simplest]


def replay(config: RunConfig, machinery: Machinery, path: Path) -> Planned:
    """Return the plan in a file, unchanged."""
    paper = decided(machinery.control, lambda: PlanFile.read(path), f"reading {path}")
    layout, file = machinery.layout, None
    if config.optimizer.zero_stage == "auto":
        config = settled(config, sharded=paper.sizes.zero_stage > 0)
    problem = assumed_problem(config, layout)
    if config.plan.cluster is not None:
        file = cluster_of(config, machinery)
        problem = run_problem(config, layout, file)
    for line in overruled(config.placement, paper.choice, path):
        logger.warning(line)
    planned = Planned.of(paper, path, problem, file)
    interval = (paper.interval_s[0], paper.interval_s[1]) if len(paper.interval_s) == 2 else None
    predicted = f"{within(paper.predicted_s, interval)} per step were predicted"
    where = "the cluster that its run measured" if paper.cluster == UNNAMED else f"cluster {paper.cluster}"
    logger.info(f"plan 1, from {path}: {paper.choice.words}; made for {where}, where {predicted}")
    return planned


def cluster_of(config: RunConfig, machinery: Machinery) -> ClusterFile:
    """Return the cluster file that section [plan] names, or else a new measurement.

    A file that describes other machines causes a warning.
    """
    plan, layout = config.plan, machinery.layout
    if plan.cluster is None:
        logger.info(f"measuring the cluster for about {plan.profile_s:.0f} s (plan.cluster=FILE skips this)")
        return profile_run(config, machinery, budget_s=plan.profile_s)
    name = plan.cluster
    file = decided(machinery.control, lambda: find_cluster(name, "plan.cluster"), "reading the cluster file")
    warning = mismatch(file, here(machinery.device), layout.world_size, layout.nodes)
    if warning is not None:
        logger.warning(warning)
    return file


def find(
    problem: Problem,
    file: ClusterFile,
    budget: float,
    remedy: str = IN_A_RUN,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[FoundPlan, tuple[str, ...]]:
    """Return the best plan and the five lines that explain it.

    One more line follows if the budget ended the search early, and one if the measurements contradict each
    other. Memory is an estimate: if no plan fits by it, a warning is printed and the best plan is still
    taken, since the run will show whether it fits. remedy: of
    measurements that contradict each other. clock: by which the search ends after `SEARCH_S`, with the best
    plan by then.
    """
    found, lines, warning = _searched(problem, file, budget, remedy, clock)
    if warning is not None:
        logger.warning(warning)
    return found, lines


def _searched(
    problem: Problem, file: ClusterFile, budget: float, remedy: str, clock: Callable[[], float]
) -> tuple[FoundPlan, tuple[str, ...], str | None]:
    """Return what `find` returns, and the warning, if there is any."""
    ends = time_limit(clock, budget)
    memory, warning = MemoryBudget.of(file.memory_bytes), None
    try:
        found = find_plan(problem, memory=memory, budget=budget, ends=ends)
    except ConfigError as error:
        if memory is None:
            raise
        memory, warning = None, str(error)
        found = find_plan(problem, memory=None, budget=budget, ends=ends)
    doubts = summary(file.doubts, intervals=file.steps is not None, remedy=remedy)
    return found, (*reasons(problem, found, memory).lines, *found.searched.lines, *doubts), warning


SHOWN: Final = ("Plan", "Time", "Limit", "Update", "Caution")
"""How lines begin that are said when a plan is chosen; its file has all of them."""


def shown(lines: Sequence[str]) -> list[str]:
    """Return the lines of an explanation that are said at once."""
    return [line for line in lines if line.partition(" ")[0] in SHOWN]


def numbered(lines: Sequence[str], number: int) -> list[str]:
    """Return the lines that explain a plan, with its number in the line that describes it."""
    return [
        f"Plan {number}   {line.removeprefix('Plan').strip()}" if line.startswith("Plan ") else line
        for line in lines
    ]


def unused(schedule: ScheduleConfig) -> ScheduleConfig:
    """Return the section with nothing but the settings that count with every plan.mode."""
    return ScheduleConfig(refine_after=schedule.refine_after)


def overruled(placement: PlacementConfig, choice: Decision, path: Path) -> list[str]:
    """Return warnings about requests of section [placement] from which the plan of a file differs."""
    asked = {name: getattr(placement, name) for name in ("samples", "experts")}
    if choice.guests:
        usual = PlacementConfig()
        own = {name: getattr(placement, name) for name in ("replica_slots", "split")}
        asked |= {name: value for name, value in own.items() if value != getattr(usual, name)}
        if choice.replica_slots in placement.weighed.replica_slots:
            asked.pop("replica_slots", None)
    return [
        UNMOVED.format(name=name, asked=value, source=path, planned=getattr(choice, name))
        for name, value in asked.items()
        if value not in (AUTO, getattr(choice, name))
    ]


# ---- continues the plan of a resumed run, so that its sums are ta ------------------------------------------


PLANNING_AGAIN = (
    "planning again instead of continuing the plan of {path}, because {why}: "
    "losses agree with an uninterrupted run up to rounding"
)

COMPARED = ("plan", "schedule", "placement")
"""Sections of settings on which a plan depends."""


def continued_plan(config: RunConfig, machinery: Machinery, from_: Resumption) -> Planned | None:
    """Return the plan under which a checkpoint was made; None, with the reason printed, if it cannot be used.

    The plan is continued with unchanged settings, as many ranks and the same machines, if its trials and its
    ordering were finished. All ranks call this together.
    """
    try:
        planned = _read(config, machinery, from_)
    except ConfigError as error:
        why = error.why if error.key in COMPARED else str(error).rstrip(".")
        logger.info(PLANNING_AGAIN.format(path=from_.path, why=why))
        return None
    logger.info(f"{planned.name}, continued from {from_.path.name}: {planned.choice.words}")
    return planned


def _read(config: RunConfig, machinery: Machinery, from_: Resumption) -> Planned:
    settings, layout, path = from_.record.settings, machinery.layout, from_.path
    if settings is None or not from_.record.plan_settled:
        raise ConfigError("plan", UNSET, "it was not final yet")
    for section in COMPARED:
        asked = getattr(config, section)
        # A setting that did not exist yet when the checkpoint was made had its default.
        if to_dict(type(asked)()) | settings.get(section, {}) != to_dict(asked):
            raise ConfigError(section, UNSET, f"settings of [{section}] have changed")
    paper, file = decided(machinery.control, lambda: _files(from_), f"reading the plan of {path.name}")
    if config.optimizer.zero_stage == "auto":
        config = settled(config, sharded=paper.sizes.zero_stage > 0)
    if file is None:
        problem = assumed_problem(config, layout)
    else:
        problem = run_problem(config, layout, file)
        other = mismatch(file, here(machinery.device), layout.world_size, layout.nodes)
        if machinery.control.any(other is not None, "comparing machines with those of the plan"):
            raise ConfigError("plan", UNSET, "it was measured on other machines")
    return Planned.of(paper, path / PLAN_FILE, problem, file)


def remembering(planned: Planned, machinery: Machinery, from_: Resumption) -> Planned:
    """Return a newly made plan with what the run has learnt before from trials of moving.

    That holds for the same step on the same machines. All ranks call this together.
    """
    control, layout = machinery.control, machinery.layout
    try:
        paper, file = decided(control, lambda: _files(from_), f"reading the plan of {from_.path.name}")
    except ConfigError as error:
        logger.info(f"what the run has learnt from trials of moving cannot be read: {error}")
        return planned
    if file is None or planned.file is None:
        return planned
    other = mismatch(file, here(machinery.device), layout.world_size, layout.nodes) is not None
    if control.any(other or paper.sizes != PlanSizes.of(planned.problem), "comparing machines and steps"):
        return planned
    return planned.learning(file.moves, paper.lost)


def _files(from_: Resumption) -> tuple[PlanFile, ClusterFile | None]:
    cluster = from_.path / CLUSTER_FILE
    return PlanFile.read(from_.path / PLAN_FILE), ClusterFile.read(cluster) if cluster.exists() else None
