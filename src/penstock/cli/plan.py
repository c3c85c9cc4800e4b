"""`penstock plan`: the best plan for a cluster, which need not be available.

For a published model torch is not loaded; a training configuration needs it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace

from penstock.cli.out import add, add_overrides, check_out, save_out, user_path
from penstock.cli.plan_compare import compared, swept
from penstock.cli.plan_search import find_best, searching
from penstock.cli.plan_stages import planned_in_stages, stages_instead, wants_stages
from penstock.cli.plan_subject import (
    SIZES,
    STATE,
    WORDS,
    Changes,
    Fitting,
    as_settings,
    budget_of,
    changed_options,
    cluster_of,
    memory_of,
    of_study,
    option,
    refuse_set,
    replaced,
    subject_of,
)
from penstock.cli.run import FAILED, INTERRUPTED
from penstock.config import ConfigError
from penstock.cost import ClusterFile
from penstock.cost.clusters.line import EXAMPLE as IN_LINE
from penstock.plan import PlanFile, Subject, explain
from penstock.plan.candidate import NothingFitsError, whole_s
from penstock.plan.effort import COMMAND_S, PLACEMENTS, time_limit
from penstock.plan.models import model_name
from penstock.plan.moving import Weighed, in_full, weigh
from penstock.plan.pipeline import SIZE, VIRTUAL_SIZE
from penstock.report.pipeline import PLANNED_ONLY
from penstock.report.plan import PlanReport, saved_plan
from penstock.words import terminal_width

OF_NO_SEARCH = ("show", "overrides", "json", "run")
"""What stands among the options and does not belong to a search."""

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
    add(
        plan,
        "config CONFIG",
        "a training configuration, such as configs/tiny.toml; or the config.json of a model of "
        "transformers, or its folder",
        nargs="?",
        type=user_path,
    )
    add_overrides(plan)
    add(
        plan,
        "--model NAME|FILE",
        "a model by its name, or the config.json of one of transformers or its folder",
        type=model_name,
    )
    add(
        plan,
        "--cluster LINE|NAME|FILE",
        f"a cluster in a line, such as {IN_LINE}; one that comes with Penstock; or a file",
    )
    add(
        plan,
        "--against WHAT",
        "two plans side by side: this one and WHAT: a saved plan, another model or configuration, "
        "or changes such as ep_size=8,tp_size=2 or cluster=2x8xH100,net=400gbit",
    )
    add(
        plan,
        "--sweep NAME=V,V",
        "a table of plans, one for each value: of net or inside (Gbit/s) of a cluster in a line, or of "
        "an option such as ep_size or seq_len",
    )
    add(plan, "--out FILE", "save the plan to FILE", type=user_path)
    add(plan, "--show FILE", "only print a saved plan", type=user_path)
    add(
        plan,
        "--memory-gib X",
        "memory per rank; plans that need more are refused (default: the cluster's)",
        type=float,
    )
    for name, what in SIZES.items():
        add(plan, f"{option(name)} N", what, type=int)
    _add_stages(plan)
    _add_choices(plan)
    add(plan, "--json", "print one JSON object")
    plan.set_defaults(run=plan_command)


def _add_stages(plan: argparse.ArgumentParser) -> None:
    """Add options for the samples of an update, and for pipeline stages."""
    add(
        plan,
        "--global-batch N",
        "samples of all ranks for an update: gradients of several passes add up (default: one pass)",
        type=int,
    )
    add(
        plan,
        f"{SIZE} N",
        f"pipeline stages, for which --global-batch is needed; {PLANNED_ONLY} (default: none)",
        type=int,
    )
    add(
        plan,
        f"{VIRTUAL_SIZE} N",
        "parts of every stage, which take turns (interleaved 1F1B; default: what is fastest)",
        type=int,
    )


def _add_choices(plan: argparse.ArgumentParser) -> None:
    """Add options for what a search may choose, what it assumes, and how long it searches."""
    add(
        plan,
        "--zero-stage",
        "1: every data-parallel rank keeps the moments of a share of the parameters; 2: gradients are "
        "freed once summed, too, but for a share; 3: parameters are gathered for each use (planned only); "
        "auto: 1 if a whole iteration is shorter so, or does not "
        "fit otherwise (default: 0; auto for open models)",
        choices=WORDS["zero_stage"],
    )
    add(
        plan,
        "--layout",
        "auto: also choose which ranks share attention and experts (default: given)",
        choices=WORDS["layout"],
    )
    add(
        plan,
        "--recompute WHAT",
        "none, experts or blocks are recomputed before their backward, to save memory; auto: what has "
        "to be for a plan to fit (default: auto)",
        choices=WORDS["recompute"],
    )
    add(
        plan,
        "--precision",
        "of products and rows of a published model; auto: what the devices are best at (default: that "
        "of the cluster file's rates)",
        choices=WORDS["precision"],
    )
    for name in STATE:
        add(
            plan,
            option(name),
            f"of every {STATE[name].partition('_')[0]}, as others train (planned only; usual: float32)",
            choices=WORDS[name],
        )
    add(
        plan,
        "--imbalance X",
        "the busiest rank's experts get X times the mean number of tokens; not with --routing (default: 1, "
        "even routing)",
        type=float,
    )
    add(
        plan,
        "--routing NAME|FILE",
        "also say whether it would pay to move samples or experts if steps are routed like a workload, "
        "such as zipf or gini=0.3, or like a recorded run (routing.jsonl)",
    )
    add(plan, "--price X", "of a device for an hour: also print that of a billion tokens", type=float)
    add(
        plan,
        "--budget X",
        f"search effort as a multiple of the usual one (default: 1, which is "
        f"{PLACEMENTS['usual']:,} simulated tasks for a search, {COMMAND_S:g} s of processor time in all)",
        type=float,
    )


def plan_command(options: argparse.Namespace, given: object) -> int:
    """Run the command and return its exit code: 0, or 1 if the plan could not be saved."""
    del given
    width = terminal_width()
    if options.model is not None and "=" in str(options.config or ""):  # a setting, where no file is needed
        options.overrides, options.config = [str(options.config), *options.overrides], None
    if options.show is not None:
        return _show(options, width)
    if options.price is not None and not 0 <= options.price < math.inf:
        why = "must be a price, finite and not negative"
        raise ConfigError("--price", options.price, why, "Such as 2.5.")
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

    given = replaced(options, layout="given")

    def changed(changes: Changes) -> Subject:
        return subject_of(changed_options(given, changes), file)

    def describe(changes: Changes) -> str:
        if not as_options:
            return " ".join(as_settings(changes))
        return " ".join(
            option(key) + ("" if value is True else f" {value}") for key, value in changes.items()
        )

    memory = memory_of(options.memory_gib, file.memory_bytes)
    assert memory is not None, "something did not fit"
    over = time_limit(time.process_time, 1.0, FITTING_S)
    advice = Fitting(changed, memory, describe, of_study(options.model), over).advice()
    if options.layout == "auto" or not advice.startswith("It would fit"):
        return advice
    return f"{advice} --layout auto compares layouts by their times."


def _planned(options: argparse.Namespace, cluster: ClusterFile, width: int) -> int:
    """Search, print and save a plan; return the exit code."""
    subject = subject_of(options, cluster)
    memory = memory_of(options.memory_gib, subject.memory_bytes)
    budget = budget_of(options, subject)
    if options.out is not None:
        check_out(options.out, EXAMPLE)
        if subject.problem.passes > 1:
            limit = "is for plans that can be run, and a run has one pass for an update"
            raise ConfigError("--out", str(options.out), limit, "Remove it, or --global-batch.")
    weighed: Weighed | None = None
    started = time.monotonic()
    with searching(memory, budget) as search:
        subject, plans, updates = find_best(subject, search.find, search.quick)
        starts = (plans.best.choice,)
        explanation = explain(subject.problem, plans, memory, lambda then: search.quick(then, starts))
        if options.routing is not None:
            over = time_limit(time.process_time, budget, PLACING_S)
            observed, movable = subject.problem.observed, subject.movable
            routed = replace(subject.problem, evidence=observed, movable=movable, ends=over)
            choice, routing = plans.best.choice, f"routing {options.routing}"
            weighed = in_full(routed, weigh(routed, [choice], memory, routing, ends=over), choice)
    instead = stages_instead(options, cluster, whole_s(subject.problem, plans.best))
    moves = weighed is not None and weighed.moves
    best = weighed.best if weighed is not None and moves else plans.best
    moving = () if weighed is None else (*weighed.lines, *((weighed.verdict,) if moves else ()))
    why = (*explanation.lines, *updates, *plans.searched.lines, *moving)
    seconds = time.monotonic() - started
    file = subject.plan_file(best, plans.searched, why)
    saved = str(options.out) if options.out is not None and save_out(file.save, options.out) else None
    report = PlanReport(
        subject=subject,
        found=plans,
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
    return INTERRUPTED if search.stopped() else 0


def _show(options: argparse.Namespace, width: int) -> int:
    """Print a saved plan. Raises ConfigError for options of a search, since they would have no effect."""
    of_search = [name for name in vars(options) if name not in OF_NO_SEARCH]
    why = "--show only prints a saved plan"
    refuse_set(options, of_search, why, "Remove one of the two options.")
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
