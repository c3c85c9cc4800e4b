"""Makes a run's first plan: from section [schedule], by measuring and searching, or from a file.

Rank 0 searches and sends its plan to the others: measured costs differ from rank to rank, and one search
loads a machine less than a search on every core.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.autotune.planned import Learnt, Order, Planned
from penstock.autotune.problem import (
    assumed_problem,
    check_shared,
    dispatches_of,
    given_choice,
    open_runs,
    run_problem,
    settled,
    settled_as,
)
from penstock.autotune.profile.measure import LINKS_S, profile_links, profile_run
from penstock.autotune.profile.sample import here
from penstock.config import UNSET, ConfigError, is_missing, to_dict
from penstock.cost import ClusterFile
from penstock.cost.cluster_file import mismatch
from penstock.cost.clusters import UNNAMED, find_cluster
from penstock.cost.measured import IN_A_RUN, summary
from penstock.decision import Decision, PlacementConfig, ScheduleConfig
from penstock.plan import (
    Candidate,
    PlanFile,
    Problem,
    evaluate,
    find_plan,
    reasons,
)
from penstock.plan.candidate import whole_s
from penstock.plan.effort import Searched, time_limit
from penstock.plan.explain import Explanation
from penstock.plan.optimizers import Updated
from penstock.plan.plan_config import AUTO, FIXED
from penstock.plan.plan_file import OtherPlan, PlanSizes
from penstock.plan.predict import closing_s, interval_s
from penstock.plan.search import FoundPlan
from penstock.plan.subject import rate_notes
from penstock.runtime import Machinery
from penstock.train.config import RunConfig
from penstock.train.output import CLUSTER_FILE, PLAN_FILE
from penstock.train.pilot import Resumption
from penstock.words import bit_rate, counted, flop_rate, gib, lane_words, milliseconds, percent, within

logger = logging.getLogger(__name__)

WORTH_TRYING = 1.3
"""Plans whose predicted time is more than WORTH_TRYING times the best are not tried."""

_Choice = tuple[
    int, list[tuple[Order, float]], tuple[OtherPlan, ...], Searched, tuple[str, ...], tuple[str, ...]
]
"""Number of the problem, promising plans, others, how much was searched, the explanation, its short form."""

UNUSED = (
    "section [schedule] (name {name}) is ignored because plan.mode = {mode}. Set plan.mode=fixed to use it"
)

UNMOVED = (
    "placement.{name} = {requested} is ignored because the plan in {source} has {planned}. "
    "Set plan.mode=fixed to use it"
)


def start(config: RunConfig, machinery: Machinery) -> Planned:
    """Return the first plan of a resolved configuration. All ranks call it; it may measure the cluster."""
    counts = ScheduleConfig(refine_after=config.schedule.refine_after)  # with every plan.mode
    if config.plan.mode != FIXED and config.schedule != counts:
        logger.warning(UNUSED.format(mode=config.plan.mode, name=config.schedule.name))
    if config.plan.path is not None:
        return replay(config, machinery, config.plan.path)
    if config.plan.mode == AUTO:
        return search(config, machinery)
    return as_given(config, machinery)


def as_given(config: RunConfig, machinery: Machinery) -> Planned:
    """Return the plan that section [schedule] describes, ordered by the costs of `plan.cluster`, if that is
    given, or else of section [cluster].

    Where the dispatch is open, ranks have a choice and no cluster is given, links are measured for `LINKS_S`,
    or for `plan.profile_s` if that is less; the dispatch with the shortest predicted step is taken.
    """
    file = None if config.plan.cluster is None else cluster_of(config, machinery)
    possible: list[tuple[float, Problem, Decision]] = []
    # With either optimiser, if it is open: that of the shorter iteration counts.
    for run in open_runs(config):
        problem = _priced(run, machinery, file)
        choice = given_choice(run, problem)
        possible.append((whole_s(problem, evaluate(problem, choice)), problem, choice))
    _, problem, choice = min(possible, key=lambda each: each[0])
    names = dispatches_of(problem, choice)
    if len(names) > 1:
        config = settled(config, sharded=problem.shape.updating is not None)
        links = file or profile_links(config, machinery, budget_s=min(LINKS_S, config.plan.profile_s))
        measured = run_problem(config, machinery.layout, links)
        times_s = {name: evaluate(measured, replace(choice, dispatch=name)).predicted_s for name in names}
        choice = replace(choice, dispatch=min(times_s, key=times_s.__getitem__))
        times = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in times_s.items())
        logger.info(
            f"dispatch {choice.dispatch} chosen: predicted step times with the measured links: {times}"
        )
    planned = Planned(problem=problem, choice=choice, plan=problem.plan(choice), file=file)
    logger.info(f"{planned.name}: {choice.words}")
    return planned


def search(config: RunConfig, machinery: Machinery) -> Planned:
    """Measure or read the cluster, and return the best plan for it."""
    check_shared(config.moe, config.parallel)
    file = cluster_of(config, machinery)
    problems = [run_problem(run, machinery.layout, file) for run in open_runs(config)]

    def decide() -> _Choice:
        number, solved = _fastest(problems, file, config.plan.budget)
        result, problem = solved.found, solved.problem
        promising = [result.best, *_to_try(result, config.plan.trials - 1)]
        orders = [(Order.of(each.choice, each.plan), whole_s(problem, each)) for each in promising]
        others = OtherPlan.among(problem, result.others)
        return number, orders, others, result.searched, solved.lines, solved.said

    decided = machinery.control.decided(decide, "choosing a plan", slowly=True)
    number, promising, others, searched, lines, said = decided
    logger.info("\n".join(said))
    logger.debug("\n".join(lines))
    (best, _), *to_try = promising
    return Planned(
        problem=problems[number],
        choice=best.choice,
        plan=best.plan,
        file=file,
        lines=lines,
        to_try=tuple(to_try),
        searched=searched,
        learnt=Learnt(others=others),
    )


def _fastest(problems: Sequence[Problem], file: ClusterFile, budget: float) -> tuple[int, Solved]:
    """Solve all problems; return the one with the shortest iteration, by its number.

    A problem that fits into memory is preferred to any that does not.
    """
    solved = [find(problem, file, budget) for problem in problems]
    number = min(range(len(solved)), key=lambda i: (solved[i].warning is not None, solved[i].whole_s))
    best = solved[number].warned()
    if len(problems) > 1:
        both = ", ".join(Updated(problem=each.problem, found=each.found).words for each in solved)
        line = f"Update   predicted whole iterations, clipping and update included: {both}"
        best = replace(best, more=(*best.more, line))
    return number, best


def _to_try(found: FoundPlan, most: int) -> list[Candidate]:
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
    """Return the plan in a file, unchanged, priced by `plan.cluster`, or by what its run measured here."""
    control = machinery.control
    paper = control.decided(lambda: PlanFile.read(path), f"reading {path}")
    config = settled_as(config, paper)
    file: ClusterFile | None
    if config.plan.cluster is not None:
        file = cluster_of(config, machinery)
    else:
        file = control.decided(lambda: _measured_beside(path), f"reading what was measured beside {path}")
        other = file is not None and _elsewhere(file, machinery) is not None
        if control.any(other, "comparing machines with those of the plan"):
            file = None
    problem = _priced(config, machinery, file)
    for line in overruled(config.placement, paper.choice, path):
        logger.warning(line)
    planned = Planned.of(paper, path, problem, file)
    interval = (paper.interval_s[0], paper.interval_s[1]) if len(paper.interval_s) == 2 else None
    predicted = f"{within(paper.predicted_s, interval)} per step were predicted"
    where = "the cluster that its run measured" if paper.cluster == UNNAMED else f"cluster {paper.cluster}"
    logger.info(f"plan 1, from {path}: {paper.choice.words}; made for {where}, where {predicted}")
    return planned


def _priced(config: RunConfig, machinery: Machinery, file: ClusterFile | None) -> Problem:
    """Return the step of a run on the cluster of a file, or else on that of section [cluster]."""
    layout = machinery.layout
    return assumed_problem(config, layout) if file is None else run_problem(config, layout, file)


def cluster_of(config: RunConfig, machinery: Machinery) -> ClusterFile:
    """Return the cluster file that section [plan] names, or else a new measurement.

    A file that describes other machines causes a warning; rates of another precision a line in the log.
    """
    plan, precision = config.plan, config.train.precision
    if plan.cluster is None:
        logger.info(f"measuring the cluster for about {plan.profile_s:.0f} s (plan.cluster=FILE skips this)")
        file = profile_run(config, machinery, budget_s=plan.profile_s)
        logger.info(f"Cluster  {_measured(file)}")
        return file
    name = plan.cluster
    file = machinery.control.decided(lambda: find_cluster(name, "plan.cluster"), "reading the cluster file")
    if (warning := _elsewhere(file, machinery)) is not None:
        logger.warning(warning)
    for note in () if precision == "auto" else rate_notes(file, precision):
        logger.info(f"{name}: {note}")
    return file


def _elsewhere(file: ClusterFile, machinery: Machinery) -> str | None:
    """Return how a file's machines differ from these; None if they do not."""
    layout = machinery.layout
    return mismatch(file, here(machinery.device), layout.world_size, layout.nodes)


def _measured(file: ClusterFile) -> str:
    """Return the measured rates in words, and how many measurements are rough."""
    rates, links = file.rates, dict[str, tuple[float, float]]()
    if file.ranks > 1:
        links["network"] = rates.link_bytes_per_s, rates.link_latency_s
    if file.nodes > 1 and file.ranks_per_node > 1:
        links["inside nodes"] = rates.intra_bytes_per_s, rates.intra_latency_s
    parts = [f"{name} {bit_rate(rate)}, {1e6 * start:.0f} us" for name, (rate, start) in links.items()]
    memory = "" if file.memory_bytes is None else f", {gib(file.memory_bytes)}"
    parts.append(f"{flop_rate(rates.flops_per_s)}{memory} per rank")
    if file.doubts:
        parts.append(f"{counted(len(file.doubts), 'rough measurement')}, listed in {CLUSTER_FILE}")
    return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A problem with the best plan that was found.

    Attributes:
        why: The reasons for the plan.
        more: Lines of the explanation after these.
        warning: Why, by its estimate, no plan fits into memory; None if one does. The best plan is still
            taken, since the run will show whether it fits.
    """

    problem: Problem
    found: FoundPlan
    why: Explanation
    more: tuple[str, ...]
    warning: str | None

    def warned(self) -> Solved:
        """Say the warning, if there is any."""
        if self.warning is not None:
            logger.warning(self.warning)
        return self

    @property
    def whole_s(self) -> float:
        return whole_s(self.problem, self.found.best)

    @property
    def lines(self) -> tuple[str, ...]:
        """Five lines that explain the plan; more where the search ended early or measurements disagree."""
        return *self.why.lines, *self.more

    @property
    def said(self) -> tuple[str, ...]:
        """Three lines for the screen, and one where the optimiser was open: times of whole steps."""
        why, seconds = self.why, self.whole_s
        least = milliseconds(why.lower_bound_s + closing_s(self.problem))
        predicted = within(seconds, interval_s(self.problem, seconds))
        shares = {lane_words(lane, nodes=why.nodes): share for lane, share in why.busy.items() if share > 0}
        busy = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
        there = "" if why.budget_bytes is None else f" of {gib(why.budget_bytes)}"
        return (
            f"Plan 1   {why.best.choice.words}{why.rows}",
            f"Time     {predicted} per step predicted; no plan can take less than {least}",
            f"Limit    {why.binds}; busy: {busy}; {gib(why.memory.total_bytes)}{there} used",
            *(line for line in self.more if line.startswith("Update ")),
        )


def find(problem: Problem, file: ClusterFile, budget: float, remedy: str = IN_A_RUN) -> Solved:
    """Return the best plan and the reasons for it; callers print its warning.

    Args:
        budget: Effort of the search, relative to the usual one.
        remedy: What can be done about measurements that contradict each other.
    """
    ends = time_limit(time.monotonic, budget)
    memory_bytes, warning = file.memory_bytes, None
    try:
        result = find_plan(problem, memory_bytes=memory_bytes, budget=budget, ends=ends)
    except ConfigError as error:
        if memory_bytes is None:
            raise
        memory_bytes, warning = None, str(error)
        result = find_plan(problem, memory_bytes=None, budget=budget, ends=ends)
    doubts = summary(file.doubts, intervals=file.steps is not None, remedy=remedy)
    more, why = (*result.searched.lines, *doubts), reasons(problem, result, memory_bytes)
    return Solved(problem=problem, found=result, why=why, more=more, warning=warning)


def overruled(placement: PlacementConfig, choice: Decision, path: Path) -> list[str]:
    """Return warnings about requests of section [placement] from which the plan of a file differs."""
    requested = {name: getattr(placement, name) for name in ("samples", "experts")}
    if choice.num_replica_slots:
        usual = PlacementConfig()
        own = {name: getattr(placement, name) for name in ("replica_slots", "split")}
        requested |= {name: value for name, value in own.items() if value != getattr(usual, name)}
        if choice.replica_slots in placement.weighed.replica_slots:
            requested.pop("replica_slots", None)
    return [
        UNMOVED.format(name=name, requested=value, source=path, planned=getattr(choice, name))
        for name, value in requested.items()
        if value not in (AUTO, getattr(choice, name))
    ]


# ---- the plan of a resumed run, so that its sums are taken in exactly the same order -----------------------


PLANNING_AGAIN = (
    "planning again instead of continuing the plan of {path}, because {why}: "
    "losses agree with an uninterrupted run up to rounding"
)

COMPARED = ("plan", "schedule", "placement")
"""Sections of settings on which a plan depends."""


def continued_plan(config: RunConfig, machinery: Machinery, from_: Resumption) -> Planned | None:
    """Return the plan under which a checkpoint was made; None, with the reason printed, if it cannot be used.

    The plan is continued with unchanged settings, as many ranks and the same machines, if its trials and its
    ordering were finished, and the file that is replayed has not been edited. All ranks call this together.
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
    settings, path = from_.record.settings, from_.path
    if settings is None or not from_.record.plan_settled:
        raise ConfigError("plan", UNSET, "it was not final yet")
    for section in COMPARED:
        requested = getattr(config, section)
        # A setting that did not exist yet when the checkpoint was made had its default.
        if to_dict(type(requested)()) | settings.get(section, {}) != to_dict(requested):
            raise ConfigError(section, UNSET, f"settings of [{section}] have changed")
    path /= PLAN_FILE
    paper, file = machinery.control.decided(lambda: _papers(path), f"reading {path}")
    given = config.plan.path
    if given is not None and config.plan.tuner is None:  # which changes what a file says
        machinery.control.agreed(lambda: _check_same(given, paper), f"reading {given}", by=0)
    if file is not None and config.plan.cluster is None:  # one that settings name is as it was
        other = _elsewhere(file, machinery) is not None
        if machinery.control.any(other, "comparing machines with those of the plan"):
            raise ConfigError("plan", UNSET, "it was measured on other machines")
    return Planned.of(paper, path, _priced(settled_as(config, paper), machinery, file), file)


def _check_same(given: Path, paper: PlanFile) -> None:
    """Raise ConfigError if a file no longer holds the plan that was replayed; it may be gone by now."""
    if is_missing(given):
        return
    now = PlanFile.read(given)
    # However the lines of an order stand that was edited by hand.
    there, here = (sorted(map(str.split, each.schedule or ())) for each in (now, paper))
    if now.choice != paper.choice or (there and there != here):
        raise ConfigError("plan", UNSET, f"{given} holds another plan by now")


def remembering(planned: Planned, machinery: Machinery, from_: Resumption) -> Planned:
    """Return a newly made plan with what the run has learnt before from trials of moving.

    That holds for the same step on the same machines. All ranks call this together.
    """
    control, path = machinery.control, from_.path / PLAN_FILE
    try:
        paper, file = control.decided(lambda: _papers(path), f"reading {path}")
    except ConfigError as error:
        logger.info(f"what the run has learnt from trials of moving cannot be read: {error}")
        return planned
    if file is None or planned.file is None:
        return planned
    other = _elsewhere(file, machinery) is not None
    if control.any(other or paper.sizes != PlanSizes.of(planned.problem), "comparing machines and steps"):
        return planned
    return planned.learning(file.moves, paper.lost)


def _beside(path: Path) -> ClusterFile | None:
    """Return the cluster file in the folder of a plan, if there is one."""
    cluster = path.parent / CLUSTER_FILE
    return ClusterFile.read(cluster) if cluster.exists() else None


def _papers(path: Path) -> tuple[PlanFile, ClusterFile | None]:
    """Return a plan, and the cluster that its run left beside it, if there is one."""
    return PlanFile.read(path), _beside(path)


def _measured_beside(path: Path) -> ClusterFile | None:
    """Return the cluster that a plan's run has measured; None if it did not, or that cannot be read."""
    try:
        file = _beside(path)
    except ConfigError as error:
        logger.warning(f"steps have no prediction: {error}")
        return None
    return file if file is not None and file.measured is not None else None
