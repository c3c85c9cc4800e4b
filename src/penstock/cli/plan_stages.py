"""`penstock plan` in pipeline stages: a plan for given ones, and what others would bring."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.cli.plan_search import Searching, searching
from penstock.cli.plan_subject import (
    OF_CONFIGURATIONS,
    SIZES,
    budget_of,
    changed_options,
    memory_of,
    of_study,
    option,
    other_layouts,
    refuse_set,
    replaced,
    subject_of,
)
from penstock.cli.run import INTERRUPTED
from penstock.config import UNSET, ConfigError
from penstock.cost import ClusterFile
from penstock.decision import Decision
from penstock.plan import MODELS, Problem, Subject, published_problem
from penstock.plan.candidate import NothingFitsError
from penstock.plan.effort import Effort, time_limit
from penstock.plan.optimizers import NEAR, SHARDED
from penstock.plan.pipeline import SIZE, VIRTUAL_SIZE
from penstock.plan.pipeline_search import FoundPipeline, find_pipeline, pipelines
from penstock.plan.plan_config import AUTO
from penstock.plan.stages import PipelinePlan, can_have, stage_cluster
from penstock.plan.subject import Overrides
from penstock.report.pipeline import PLANNED_ONLY, PipelineReport, stages_dict
from penstock.words import change, gib, milliseconds

WEIGHING_S: Final = 5.0
"""Seconds of processor time to look for layouts in stages."""

GLANCE_S: Final = 2.0
"""The same where nobody has asked for updates of a certain size."""

FINALISTS: Final = 2
"""The number of layouts that are compared by all orders of microbatches."""

MOST_STAGES: Final = 64
"""The most stages that are tried where their number is open."""

ALONE: Final = ("out", "routing", "against", "sweep")
"""Options that have no meaning in stages."""


def wants_stages(options: argparse.Namespace) -> bool:
    """Return whether stages are given.

    Raises:
        ConfigError: If options do not belong together.
    """
    stages, parts = options.pipeline_parallel_size, options.virtual_pipeline_parallel_size
    if stages in (None, 1):
        if parts not in (None, 1):
            why = "is the number of parts of every stage, and no stages are given"
            raise ConfigError(VIRTUAL_SIZE, parts, why, f"Add {SIZE} 4, or remove it.")
        return False
    why = f"is for plans that can be run, and one in stages is {PLANNED_ONLY}"
    refuse_set(options, ALONE, why, f"Remove it, or {SIZE}.")
    if options.global_batch is None:
        why = f"is needed with {SIZE}: its passes are the microbatches that go through the stages"
        raise ConfigError("--global-batch", UNSET, why, "Such as 512.")
    return True


def planned_in_stages(options: argparse.Namespace, file: ClusterFile, width: int) -> int:
    """Search, print the plan, and return the exit code."""
    file, options = _resized(file, options)
    stages = options.pipeline_parallel_size
    started = time.monotonic()
    cluster = stage_cluster(file, stages)
    if options.layout == "auto":
        options = _laid_out(options, file).options
    subject = subject_of(options, cluster)
    memory_bytes = memory_of(options.memory_gib, subject.memory_bytes)
    with searching(None, budget_of(options, subject)) as search:
        try:
            subject, plans, updates = _searched(subject, options, file, memory_bytes, search)
        except NothingFitsError as error:
            hint = error.hint
            with suppress(ConfigError):
                laid = _laid_out(options, file)
                fits = f"{_as_options(laid.plan, laid.options)} ({gib(laid.plan.memory_bytes)} per rank)"
                hint = f"It would fit with {fits}."
            raise ConfigError(error.key, error.value, error.why, hint) from None
    report = PipelineReport(
        subject=subject,
        found=plans,
        node_size=file.ranks_per_node,
        memory_bytes=memory_bytes,
        seconds=time.monotonic() - started,
        updates=updates,
        price=options.price,
    )
    print(json.dumps(report.to_dict()) if options.json else report.to_text(width), end="")
    return INTERRUPTED if search.stopped() else 0


def _laid_out(options: argparse.Namespace, file: ClusterFile) -> _Laid:
    """Return the fastest layout of the given stages. Raises ConfigError if none fits."""
    stages = options.pipeline_parallel_size
    tried = _layouts(options, stage_cluster(file, stages))
    over = time_limit(time.process_time, options.budget or 1.0, WEIGHING_S)
    return _fastest(((stages, each) for each in tried), file, over)


@dataclass(frozen=True, kw_only=True)
class StagesInstead:
    """A layout in stages that would be faster than the plan without.

    Attributes:
        plan: Its plan, by a quick search.
        options: The command-line options that ask for it.
        than_s: Seconds of an update under the plan without stages.
    """

    plan: PipelinePlan
    options: str
    than_s: float

    @property
    def line(self) -> str:
        """What it would bring as a line of text."""
        faster = change(self.plan.update_s, self.than_s)
        update = milliseconds(self.plan.update_s)
        sentence = f"{self.options} would take {update} for an update ({faster}), by a quick plan"
        return f"Stages   {sentence}; {PLANNED_ONLY}"

    @property
    def hint(self) -> str:
        """What would fit, as a sentence."""
        size = gib(self.plan.memory_bytes)
        return f"In stages it would fit with {self.options} ({size} per rank), {PLANNED_ONLY}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**stages_dict(self.plan), "options": self.options, "executable": False}


def stages_instead(options: argparse.Namespace, file: ClusterFile, than_s: float) -> StagesInstead | None:
    """Return the fastest layout in stages; None where none is faster.

    Without `--layout auto`, only a stage for each node is looked at, with experts spread inside it, and with
    shared attention if that does not fit. Where the size of an update is open, it has the samples of the
    step; studies and training configurations say how they are run, and are then left as they are.
    """
    limit_s, given = WEIGHING_S, options.global_batch is not None
    if not given:
        if options.model is None or of_study(options.model) or file.nodes == 1:
            return None
        limit_s = GLANCE_S
        alone = replaced(options, layout="given", zero_stage=None)
        samples = subject_of(alone, file).problem.workload.samples
        options = replaced(options, global_batch=samples)
    over = time_limit(time.process_time, options.budget or 1.0, limit_s)
    try:
        file, options = _resized(file, options)
        try:
            laid = _fastest(_open(options, file), file, over, FINALISTS if given else 0)
        except NothingFitsError:
            inside = replaced(options, ep_size=None)
            tried = ((file.nodes, each) for each in _layouts(inside, stage_cluster(file, file.nodes)))
            laid = _fastest(tried, file, over, FINALISTS if given else 0)
    except ConfigError:
        return None  # no layout in stages is possible
    if laid.plan.update_s * NEAR > than_s:
        return None
    size = () if given else (option("global_batch"), str(options.global_batch))
    text = " ".join((*size, _as_options(laid.plan, options)))
    return StagesInstead(plan=laid.plan, options=text, than_s=than_s)


def _resized(file: ClusterFile, options: argparse.Namespace) -> tuple[ClusterFile, argparse.Namespace]:
    """Return the cluster with the sizes that options replace, and options without them.

    A study's model has the experts that it has on the whole cluster.
    """
    sizes = {name: getattr(options, name) for name in ("nodes", "ranks_per_node")}
    given = {name: size for name, size in sizes.items() if size is not None}
    file = replace(file, slowness=(), **given) if given else file
    left = replaced(options, nodes=None, ranks_per_node=None)
    if options.model in MODELS and options.num_experts is None:
        whole = published_problem(options.model, file, Overrides(top_k=options.top_k))
        left = replaced(left, num_experts=whole.problem.workload.num_experts)
    return file, left


def _searched(
    subject: Subject,
    options: argparse.Namespace,
    file: ClusterFile,
    memory_bytes: int | None,
    search: Searching,
) -> tuple[Subject, FoundPipeline, tuple[str, ...]]:
    """Return the subject with the better optimiser, its plan, and a line on the choice."""
    times, fits, refused = list[str](), list[tuple[Problem, FoundPipeline]](), list[NothingFitsError]()
    for problem in (subject.problem, *(() if subject.sharded is None else (subject.sharded,))):
        of = "AdamW" if problem.shape.updating is None else SHARDED
        try:
            each = _find(problem, options, file, memory_bytes, _choices(search, "quick"))
        except NothingFitsError as error:
            refused.append(error)
            times.append(f"{of} does not fit")
            continue
        fits.append((problem, each))
        update = milliseconds(each.best.update_s)
        times.append(f"{update} with {of} ({gib(each.best.memory_bytes)} per rank)")
    if not fits:
        raise refused[-1]
    problem, quick = min(fits, key=lambda each: each[1].best.update_s)
    updates = (f"Update   predicted updates, by quick plans: {', '.join(times)}",) if len(times) > 1 else ()
    full = _in_full(problem, quick, memory_bytes, _choices(search, "usual"))
    return replace(subject, problem=problem), full, updates


def _in_full(
    problem: Problem,
    quick: FoundPipeline,
    memory_bytes: int | None,
    choices: Callable[[Problem], list[Decision]],
) -> FoundPipeline:
    """Return the plans with those of a search in full for the best orders of microbatches."""
    orders = [plan.pipeline for plan in (quick.best, *quick.others[:1])]
    narrowed = replace(problem, recompute=(quick.best.choice.recompute,))
    plans = {plan.pipeline: plan for plan in (quick.best, *quick.others)}
    try:
        better = find_pipeline(narrowed, orders, choices, memory_bytes)
    except NothingFitsError:
        return quick  # a quick plan just fits
    for plan in (better.best, *better.others):
        plans[plan.pipeline] = min(plan, plans[plan.pipeline], key=lambda each: each.update_s)
    best, *others = sorted(plans.values(), key=lambda plan: plan.update_s)
    return FoundPipeline(best=best, others=tuple(others))


def _find(
    problem: Problem,
    options: argparse.Namespace,
    file: ClusterFile,
    memory_bytes: int | None,
    choices: Callable[[Problem], Sequence[Decision]] = lambda problem: (),
    *,
    orders: int | None = None,
) -> FoundPipeline:
    """Return the best plan of a layout. orders: how many orders of microbatches are tried; None = all."""
    stages, parts = options.pipeline_parallel_size, options.virtual_pipeline_parallel_size
    tried = pipelines(stages, parts, problem.shape.num_layers, problem, file.ranks_per_node)
    return find_pipeline(problem, tried[:orders], choices, memory_bytes)


def _choices(search: Searching, effort: Effort) -> Callable[[Problem], list[Decision]]:
    def found(problem: Problem) -> list[Decision]:
        plans = search.find(problem, effort=effort)
        return [plan.choice for plan in (plans.best, *plans.others)]

    return found


# ---- layouts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Laid:
    """A layout in stages, with a plan that needs no search. problem: its step on the ranks of one stage."""

    options: argparse.Namespace
    problem: Problem
    memory_bytes: int | None
    plan: PipelinePlan


def _fastest(
    tried: Iterator[tuple[int, argparse.Namespace]],
    file: ClusterFile,
    over: Callable[[], bool],
    finalists: int = FINALISTS,
) -> _Laid:
    """Return the layout of the fastest plan. Raises the last layout's ConfigError if none is possible.

    Layouts are compared by the plainest order of microbatches, and the best few, `finalists`, by all.
    """
    fits, seen, refused = list[_Laid](), set[object](), ConfigError(SIZE, UNSET, "no stages are possible")
    for stages, laid in tried:
        options = replaced(laid, pipeline_parallel_size=stages)
        sizes = (stages, *(getattr(options, name) for name in SIZES), *options.overrides)
        if sizes in seen:
            continue
        if seen and over():
            break
        seen.add(sizes)
        laid_out = options
        if options.model is not None and options.zero_stage in (None, AUTO) and not of_study(options.model):
            # The optimiser is open: sharded, it saves memory in stages, and no time.
            laid_out = replaced(options, zero_stage="1")
        try:
            subject = subject_of(laid_out, stage_cluster(file, stages))
            memory_bytes = memory_of(options.memory_gib, subject.memory_bytes)
            problem = subject.sharded or subject.problem
            plan = _find(problem, options, file, memory_bytes, orders=1).best
        except ConfigError as error:
            refused = error
            continue
        fits.append(_Laid(options=options, problem=problem, memory_bytes=memory_bytes, plan=plan))
    if not fits:
        raise refused
    best = sorted(fits, key=lambda each: each.plan.update_s)
    if not finalists:
        return best[0]
    replanned = (
        replace(each, plan=_find(each.problem, each.options, file, each.memory_bytes).best)
        for each in best[:finalists]
    )
    return min(replanned, key=lambda each: each.plan.update_s)


def _open(options: argparse.Namespace, file: ClusterFile) -> Iterator[tuple[int, argparse.Namespace]]:
    """Yield the numbers of stages worth trying with their layouts, first a stage for each node."""
    inside = replaced(options, layout="given", ep_size=None)
    if file.nodes > 1:
        yield file.nodes, inside
    if options.layout != "auto":
        return
    for stages in (each for each in range(2, MOST_STAGES + 1) if can_have(file, each)):
        yield stages, inside
    for stages in (file.nodes, 2 * file.nodes, 2):
        if stages > 1 and can_have(file, stages):
            yield from ((stages, each) for each in _layouts(inside, stage_cluster(file, stages)))


def _layouts(options: argparse.Namespace, cluster: ClusterFile) -> Iterator[argparse.Namespace]:
    """Yield options for the given layout and all others of a stage, with the same samples per microbatch."""
    given = replaced(options, layout="given")
    yield given
    subject = subject_of(given, cluster)
    for sizes in other_layouts(subject, subject.ep_size):
        yield changed_options(given, sizes)


def _as_options(plan: PipelinePlan, options: argparse.Namespace) -> str:
    """Return the options that ask for a layout in stages."""
    work, pipeline = plan.problem.workload, plan.pipeline
    sizes = {"ep_size": work.ep_size, "tp_size": work.tp_size, "etp_size": work.etp_size}
    used = {name: size for name, size in sizes.items() if size > 1 or name == "ep_size"}
    parts = [f"{SIZE} {pipeline.pipeline_parallel_size}"]
    if options.model is None:
        parts += [f"{OF_CONFIGURATIONS[name]}={size}" for name, size in used.items()]
    else:
        parts += [f"{option(name)} {size}" for name, size in used.items()]
    return " ".join(parts)
