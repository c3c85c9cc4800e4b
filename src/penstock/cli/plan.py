"""`penstock plan`: the best plan for a cluster, which need not be available.

For a published model torch is not loaded; a training configuration needs it.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.cli.failing import FAILED
from penstock.cli.fitting import Changes, Fitting
from penstock.cli.out import add_overrides, check_out, save_out, user_path
from penstock.cli.plan_compare import compared, swept
from penstock.cli.plan_search import find_best, searching
from penstock.cli.plan_stages import planned_in_stages, stages_instead, wants_stages
from penstock.cli.plan_subject import (
    SHARDED,
    SIZES,
    STATE,
    as_settings,
    budget_of,
    changed_options,
    cluster_of,
    memory_of,
    of_study,
    option,
    subject_of,
)
from penstock.config import ConfigError
from penstock.cost import ClusterFile
from penstock.cost.clusters.line import EXAMPLE as IN_LINE
from penstock.decision import Decision
from penstock.plan import MemoryBudget, PlanFile, Problem, Subject, explain
from penstock.plan.candidate import NothingFitsError, whole_s
from penstock.plan.effort import COMMAND_S, PLACEMENTS, time_limit
from penstock.plan.models import model_name
from penstock.plan.moving import Weighed, in_full, weigh
from penstock.plan.pipeline import SIZE, VIRTUAL_SIZE
from penstock.plan.plan_config import AUTO
from penstock.plan.subject import ELEMENT_BYTES
from penstock.report.pipeline import PLANNED_ONLY
from penstock.report.plan import PlanReport, saved_plan
from penstock.words import terminal_width

SEARCHED = (
    "config",
    "against",
    "sweep",
    "model",
    "cluster",
    "layout",
    "zero_stage",
    "out",
    "memory_gib",
    "imbalance",
    "routing",
    "budget",
    "price",
    "global_batch",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "recompute",
    "precision",
    *STATE,
    *SIZES,
)
"""Options that belong to a search."""

EXAMPLE = "plan.json"

PLACING_S = 20.0
"""Seconds of processor time after which no more moves of samples and experts are weighed."""

FITTING_S = 5.0
"""Seconds of processor time to look for what would fit."""


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `penstock`."""
    plan = commands.add_parser(
        "plan",
        help="find the fastest plan",
        description="Finds the fastest way to run a step, by simulation: schedule, microbatches, chunks, "
        "all-reduce chunks, dispatch and order. Needs neither a GPU nor the cluster.",
        epilog="Example: penstock plan --model fsmoe/mixtral-7b-layers --cluster fsmoe-testbed-b. "
        "`penstock list` shows all models and clusters that come with Penstock.",
    )
    plan.add_argument(
        "config",
        nargs="?",
        type=user_path,
        metavar="CONFIG",
        help="a training configuration, such as configs/tiny.toml; or the config.json of a model of "
        "transformers, or its folder",
    )
    add_overrides(plan)
    plan.add_argument(
        "--model",
        type=model_name,
        metavar="NAME|FILE",
        help="a model by its name, or the config.json of one of transformers or its folder",
    )
    plan.add_argument(
        "--cluster",
        metavar="LINE|NAME|FILE",
        help=f"a cluster in a line, such as {IN_LINE}; one that comes with Penstock; or a file",
    )
    plan.add_argument(
        "--against",
        metavar="WHAT",
        help="two plans side by side: this one and WHAT: a saved plan, another model or configuration, "
        "or changes such as ep_size=8,tp_size=2 or cluster=2x8xH100,net=400gbit",
    )
    plan.add_argument(
        "--sweep",
        metavar="NAME=V,V",
        help="a table of plans, one for each value: of net or inside (Gbit/s) of a cluster in a line, or of "
        "an option such as ep_size or seq_len",
    )
    plan.add_argument("--out", type=user_path, metavar="FILE", help="save the plan to FILE")
    plan.add_argument("--show", type=user_path, metavar="FILE", help="only print a saved plan")
    plan.add_argument(
        "--memory-gib",
        type=float,
        metavar="X",
        help="memory per rank; plans that need more are refused (default: the cluster's)",
    )
    for name, what in SIZES.items():
        plan.add_argument(option(name), type=int, metavar="N", help=what)
    _add_stages(plan)
    _add_choices(plan)
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.set_defaults(run=plan_command)


def _add_stages(plan: argparse.ArgumentParser) -> None:
    """Add options for the samples of an update, and for pipeline stages."""
    plan.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="samples of all ranks for an update: gradients of several passes add up (default: one pass)",
    )
    plan.add_argument(
        SIZE,
        type=int,
        metavar="N",
        help=f"pipeline stages, for which --global-batch is needed; {PLANNED_ONLY} (default: none)",
    )
    plan.add_argument(
        VIRTUAL_SIZE,
        type=int,
        metavar="N",
        help="parts of every stage, which take turns (interleaved 1F1B; default: what is fastest)",
    )


def _add_choices(plan: argparse.ArgumentParser) -> None:
    """Add options for what a search may choose, what it assumes, and how long it searches."""
    plan.add_argument(
        "--zero-stage",
        choices=("0", "1", "2", SHARDED, AUTO),
        help="1: every data-parallel rank keeps the moments of a share of the parameters; 2: gradients are "
        "freed once summed, too, but for a share; 3: parameters are gathered for each use (planned only); "
        "auto: 1 if a whole iteration is shorter so, or does not "
        "fit otherwise (default: 0; auto for open models)",
    )
    plan.add_argument(
        "--layout",
        choices=("given", "auto"),
        help="auto: also choose which ranks share attention and experts (default: given)",
    )
    plan.add_argument(
        "--recompute",
        choices=("auto", "none", "experts", "blocks"),
        metavar="WHAT",
        help="none, experts or blocks are recomputed before their backward, to save memory; auto: what has "
        "to be for a plan to fit (default: auto)",
    )
    plan.add_argument(
        "--precision",
        choices=(*ELEMENT_BYTES, AUTO),
        help="of products and rows of a published model; auto: what the devices are best at (default: that "
        "of the cluster file's rates)",
    )
    for name in STATE:
        plan.add_argument(
            option(name),
            choices=tuple(ELEMENT_BYTES),
            help=f"of every {STATE[name].partition('_')[0]}, as others train (planned only; usual: float32)",
        )
    plan.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="the busiest rank's experts get X times the mean number of tokens (default: 1, even routing)",
    )
    plan.add_argument(
        "--routing",
        metavar="NAME|FILE",
        help="also say whether it would pay to move samples or experts if steps are routed like a workload, "
        "such as zipf or gini=0.3, or like a recorded run (routing.jsonl)",
    )
    plan.add_argument(
        "--price",
        type=float,
        metavar="X",
        help="of a device for an hour: also print that of a billion tokens",
    )
    plan.add_argument(
        "--budget",
        type=float,
        metavar="X",
        help=f"search effort as a multiple of the usual one (default: 1, which is "
        f"{PLACEMENTS['usual']:,} simulated tasks for a search, {COMMAND_S:g} s of processor time in all)",
    )


def plan_command(options: argparse.Namespace, given: object) -> int:
    """Run the command and return its exit code: 0, or 1 if the plan could not be saved."""
    del given
    width = terminal_width()
    if options.model is not None and "=" in str(options.config or ""):  # a setting, where no file is needed
        options.overrides, options.config = [str(options.config), *options.overrides], None
    if options.show is not None:
        return _show(options, width)
    in_stages = wants_stages(options)
    if options.against is not None or options.sweep is not None:
        if options.against is not None and options.sweep is not None:
            why = "compares two plans, and --sweep shows one for every value"
            raise ConfigError("--against", options.against, why, "Remove one of the two options.")
        return compared(options, width) if options.sweep is None else swept(options, width)
    cluster = cluster_of(options)
    if in_stages:
        return planned_in_stages(options, cluster, width)
    try:
        return _planned(options, cluster, width)
    except NothingFitsError as error:
        instead = stages_instead(options, cluster, math.inf)
        hint = _what_fits(options, cluster) + ("" if instead is None else f" {instead.hint}")
        raise ConfigError(error.key, error.value, error.why, hint) from error


def _what_fits(options: argparse.Namespace, file: ClusterFile) -> str:
    """Return which options would make a plan fit."""
    as_options = options.model is not None

    given = argparse.Namespace(**{**vars(options), "layout": "given"})

    def changed(changes: Changes) -> Subject:
        return subject_of(changed_options(given, changes), file)

    def words(changes: Changes) -> str:
        if not as_options:
            return " ".join(as_settings(changes))
        return " ".join(
            option(key) + ("" if value is True else f" {value}") for key, value in changes.items()
        )

    memory = memory_of(options.memory_gib, file.memory_bytes)
    assert memory is not None, "something did not fit"
    over = time_limit(time.process_time, 1.0, FITTING_S)
    advice = Fitting(changed, memory, words, of_study(options.model), over).advice()
    if options.layout == "auto" or not advice.startswith("It would fit"):
        return advice
    return f"{advice} --layout auto compares layouts by their times."


def _planned(options: argparse.Namespace, cluster: ClusterFile, width: int) -> int:
    """Search, print and save a plan; return the exit code."""
    subject = subject_of(options, cluster)
    memory = memory_of(options.memory_gib, subject.memory_bytes)
    budget = budget_of(options, subject)
    if options.price is not None and not 0 <= options.price < math.inf:
        raise ConfigError(
            "--price", options.price, "must be a price, finite and not negative", "Such as 2.5."
        )
    if options.out is not None:
        check_out(options.out, EXAMPLE)
    weighed: Weighed | None = None
    started = time.monotonic()
    with searching(memory, budget) as search:
        subject, found, updates = find_best(subject, search.find, search.quick)
        known = (found.best.choice,)
        explanation = explain(subject.problem, found, memory, lambda then: search.quick(then, known))
        if options.routing is not None:
            over = time_limit(time.process_time, budget, PLACING_S)
            observed, movable = subject.problem.observed, subject.movable
            routed = replace(subject.problem, evidence=observed, movable=movable, ends=over)
            weighed = _weighed(routed, found.best.choice, memory, f"routing {options.routing}", over)
    instead = stages_instead(options, cluster, whole_s(subject.problem, found.best))
    moves = weighed is not None and weighed.moves
    best = weighed.best if weighed is not None and moves else found.best
    moving = () if weighed is None else (*weighed.lines, *((weighed.verdict,) if moves else ()))
    why = (*explanation.lines, *updates, *found.searched.lines, *moving)
    seconds = time.monotonic() - started
    file = PlanFile.of(
        subject.problem,
        best,
        model=subject.title,
        cluster=subject.cluster_name,
        why=why,
        search=found.searched,
    )
    saved = str(options.out) if options.out is not None and save_out(file.save, options.out) else None
    report = PlanReport(
        subject=subject,
        found=found,
        explanation=explanation,
        updates=(*updates, *(() if instead is None else (instead.line,))),
        weighed=weighed,
        stages=None if instead is None else instead.to_dict(),
        price=options.price,
        seconds=seconds,
        saved=saved,
    )
    print(json.dumps(report.to_dict()) if options.json else report.to_text(width), end="")
    if options.out is not None and saved is None:
        return FAILED
    return 128 + signal.SIGINT if search.stopped() else 0


def _weighed(
    problem: Problem,
    choice: Decision,
    memory: MemoryBudget | None,
    routing: str,
    over: Callable[[], bool],
) -> Weighed:
    """Return the chosen plan with and without moving, in the chosen order. routing: in words."""
    return in_full(problem, weigh(problem, [choice], memory, routing, ends=over), choice)


def _show(options: argparse.Namespace, width: int) -> int:
    """Print a saved plan. Raises ConfigError for options of a search, since they would have no effect."""
    for name in SEARCHED:
        if getattr(options, name) is not None:
            key = "CONFIG" if name == "config" else option(name)
            value = getattr(options, name)
            why, hint = "--show only prints a saved plan", "Remove one of the two options."
            raise ConfigError(key, str(value) if isinstance(value, Path) else value, why, hint)
    file = PlanFile.read(options.show)
    file.check_alone(str(options.show))
    if options.json:
        print(json.dumps(file.to_dict()), end="")
        return 0
    if not file.explains_choice:
        note = (
            f"Edited   the plan was changed after the following lines were written, and is now "
            f"{file.choice.words}"
        )
        file = replace(file, why=(note, *file.why))
    print(saved_plan(file, str(options.show), width), end="")
    return 0
