"""`penstock plan`: the best plan for a cluster, which need not be available.

For a published model torch is not loaded; a training configuration needs it.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.cli.codes import FAILED
from penstock.cli.fitting import Changes, Fitting
from penstock.cli.out import check_out, save_out
from penstock.cli.paths import user_path
from penstock.config import UNSET, ConfigError, check_name, is_folder
from penstock.cost import ClusterFile
from penstock.cost.clusters import UNNAMED, find_cluster
from penstock.cost.clusters.line import EXAMPLE as IN_LINE
from penstock.cost.clusters.line import in_line
from penstock.decision import Decision
from penstock.plan import MemoryBudget, PlanFile, Problem, Subject, explain, find_plan, published_problem
from penstock.plan import Progress as Step
from penstock.plan.candidate import whole_s
from penstock.plan.effort import PLACEMENTS, SEARCH_S, check_budget, time_limit
from penstock.plan.layouts import find_layouts, with_layout
from penstock.plan.models import MODELS, open_models
from penstock.plan.moving import Weighed, in_full, weigh, with_routing
from penstock.plan.optimizers import Find, find_updated, sharing_updates
from penstock.plan.plan_config import AUTO
from penstock.plan.room import NothingFitsError
from penstock.plan.search import FoundPlan
from penstock.plan.subject import ELEMENT_BYTES, Overrides
from penstock.report.plan import PlanReport, saved_plan
from penstock.words import milliseconds, terminal_width
from penstock.workloads import RoutingConfig

SIZES = {
    "layers": "number of layers, instead of the model's",
    "batch": "samples per rank, instead of the model's",
    "seq_len": "tokens per sample, instead of the model's",
    "top_k": "experts per token, instead of the model's",
    "num_experts": "number of experts, instead of the model's",
    "nodes": "number of nodes, instead of the cluster's",
    "ranks_per_node": "ranks per node, instead of the cluster's",
    "ep_size": "ranks over which the experts are spread, instead of the model's",
    "mp_size": "ranks of a node that share attention and samples, instead of the model's",
    "esp_size": "ranks of a node that share every expert, instead of the model's",
}
"""Sizes of a published model and its cluster that options may replace."""

OF_CONFIGURATIONS = {
    "batch": "data.batch_per_device",
    "seq_len": "model.seq_len",
    "ep_size": "parallel.ep_size",
    "mp_size": "parallel.mp_size",
    "esp_size": "parallel.esp_size",
    "recompute": "plan.recompute",
    "precision": "train.precision",
    "sharded_optimizer": "optimizer.sharded",
    "shard_gradients": "optimizer.shard_gradients",
}
"""Settings for which options stand where a model of transformers is planned."""

USUAL = {"batch": 1, "seq_len": 4096, "recompute": "auto", "sharded_optimizer": "auto"}
"""Options of such a model that are not given."""

SEARCHED = (
    "config",
    "model",
    "cluster",
    "layout",
    "sharded_optimizer",
    "shard_gradients",
    "out",
    "memory_gib",
    "imbalance",
    "routing",
    "budget",
    "price",
    "recompute",
    "precision",
    *SIZES,
)
"""Options that belong to a search."""

EXAMPLE = "plan.json"


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
    plan.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that override CONFIG"
    )
    plan.add_argument(
        "--model",
        metavar="NAME|FILE",
        help="a model by its name, or the config.json of one of transformers or its folder",
    )
    plan.add_argument(
        "--cluster",
        metavar="LINE|NAME|FILE",
        help=f"a cluster in a line, such as {IN_LINE}; one that comes with Penstock; or a file",
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
        plan.add_argument(_option(name), type=int, metavar="N", help=what)
    _add_choices(plan)
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.set_defaults(run=plan_command)


def _add_choices(plan: argparse.ArgumentParser) -> None:
    """Add options for what a search may choose, what it assumes, and how long it searches."""
    plan.add_argument(
        "--sharded-optimizer",
        choices=("false", "true", "auto"),
        help="every data-parallel rank keeps the moments of a share of the parameters (ZeRO 1); auto: if a "
        "whole iteration is shorter so, or does not fit otherwise (default: false)",
    )
    plan.add_argument(
        "--shard-gradients",
        action="store_true",
        default=None,
        help="with a sharded optimizer: gradients are freed once summed, but for a share (ZeRO 2)",
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
        "such as zipf or zipf,zipf_exponent=1.5, or like a recorded run",
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
        f"{PLACEMENTS['usual']:,} simulated tasks, and {SEARCH_S:g} s at most for each search)",
    )


def plan_command(options: argparse.Namespace, given: object) -> int:
    """Run the command and return its exit code: 0, or 1 if the plan could not be saved."""
    del given
    width = terminal_width()
    if options.show is not None:
        return _show(options, width)
    cluster = _cluster(options)
    try:
        return _planned(options, cluster, width)
    except NothingFitsError as error:
        raise ConfigError(error.key, error.value, error.why, _what_fits(options, cluster)) from error


def _what_fits(options: argparse.Namespace, file: ClusterFile) -> str:
    """Return which options would make a plan fit."""
    as_options = options.model is not None

    def subject_of(changes: Changes) -> Subject:
        more = changes if as_options else {"overrides": [*options.overrides, *_as_settings(changes)]}
        return _subject(argparse.Namespace(**{**vars(options), **more, "layout": "given"}), file)

    def words(changes: Changes) -> str:
        if not as_options:
            return " ".join(_as_settings(changes))
        of = (_option(name) + ("" if value is True else f" {value}") for name, value in changes.items())
        return " ".join(of)

    memory = _memory(options.memory_gib, file.memory_bytes)
    assert memory is not None, "something did not fit"
    of_study = as_options and _of_transformers(options.model) is None
    return Fitting(subject_of, memory, words, of_study, time_limit(time.monotonic, 1.0)).advice()


def _as_settings(changes: Changes) -> list[str]:
    return [f"{OF_CONFIGURATIONS[name]}={str(value).lower()}" for name, value in changes.items()]


def _planned(options: argparse.Namespace, cluster: ClusterFile, width: int) -> int:
    """Search, print and save a plan; return the exit code."""
    subject = _subject(options, cluster)
    memory = _memory(options.memory_gib, subject.memory_bytes)
    budget = subject.budget if options.budget is None else options.budget
    check_budget("--budget", budget)
    if options.price is not None and not 0 <= options.price < math.inf:
        raise ConfigError(
            "--price", options.price, "must be a price, finite and not negative", "Such as 2.5."
        )
    if options.out is not None:
        check_out(options.out, EXAMPLE)
    weighed: Weighed | None = None
    started = time.monotonic()
    with _progress() as progress, _stopped_by_hand() as stopped:

        def find(problem: Problem) -> FoundPlan:
            over = time_limit(time.monotonic, budget)
            return find_plan(
                problem, memory=memory, progress=progress, budget=budget, ends=lambda: stopped() or over()
            )

        subject, found, updates = _found(subject, find)
        explanation = explain(subject.problem, found, memory, find)
        if options.routing is not None:
            routed = replace(subject.problem, evidence=subject.problem.observed, movable=subject.movable)
            weighed = _weighed(routed, found.best.choice, memory, f"routing {options.routing}")
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
        updates=updates,
        weighed=weighed,
        price=options.price,
        seconds=seconds,
        saved=saved,
    )
    print(json.dumps(report.to_dict()) if options.json else report.to_text(width), end="")
    if options.out is not None and saved is None:
        return FAILED
    return 128 + signal.SIGINT if stopped() else 0


@contextmanager
def _stopped_by_hand() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C inside end the search alone, so that what it has found is printed.

    Yields what tells whether there was one. The next Ctrl-C ends the command, as usual.
    """
    asked, before = list[int](), signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


Planned = tuple[Subject, FoundPlan, tuple[str, ...]]
"""A subject with what was chosen for it, its plan, and lines on the choice."""


def _found(subject: Subject, find: Find) -> Planned:
    """Return the subject with the optimiser and in the layout whose plan is faster.

    The given layout is taken only for a faster plan. Raises ConfigError if nothing fits.
    """
    if subject.given is None:
        return _updated(subject, find)
    both: list[Planned] = []
    for each in (subject, subject.given):
        try:
            both.append(_updated(each, find))
        except ConfigError as error:
            refused = error
    if not both:
        raise refused
    best, *others = sorted(both, key=lambda each: whole_s(each[0].problem, each[1].best))
    lines = list(best[2])
    for other, plan, _ in others:
        which = "the given layout" if other.given is None else "the best layout by quick plans"
        seconds = milliseconds(whole_s(other.problem, plan.best))
        lines.append(f"Layout   {which} takes {seconds} for a whole iteration, by its own full search")
    return best[0], best[1], tuple(lines)


def _updated(subject: Subject, find: Find) -> Planned:
    """Return the subject with the given or chosen optimiser, its plan, and a line on any choice."""
    if subject.sharded is None:
        return subject, find(subject.problem), ()
    problem, found, line = find_updated(subject.problem, subject.sharded, find)
    return replace(subject, problem=problem), found, (line,)


def _weighed(problem: Problem, choice: Decision, memory: MemoryBudget | None, routing: str) -> Weighed:
    """Return the chosen plan with and without moving, in the chosen order. routing: in words."""
    return in_full(problem, weigh(problem, [choice], memory=memory, routing=routing), choice)


def _show(options: argparse.Namespace, width: int) -> int:
    """Print a saved plan. Raises ConfigError for options of a search, since they would have no effect."""
    for name in SEARCHED:
        if getattr(options, name) is not None:
            option = "CONFIG" if name == "config" else _option(name)
            value = getattr(options, name)
            why, hint = "--show only prints a saved plan", "Remove one of the two options."
            raise ConfigError(option, str(value) if isinstance(value, Path) else value, why, hint)
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


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _cluster(options: argparse.Namespace) -> ClusterFile:
    """Return the cluster. Raises ConfigError unless there are one and a step to plan."""
    if (options.config is None) == (options.model is None):
        why = "needs either a configuration or --model"
        raise ConfigError(
            "plan",
            UNSET,
            why,
            "For example, penstock plan --model fsmoe/mixtral-7b-layers --cluster fsmoe-testbed-b.",
        )
    if options.cluster is None:
        why = "is needed: the cluster on which the plan will run"
        raise ConfigError(
            "--cluster", UNSET, why, "For example, --cluster fsmoe-testbed-b, or a cluster file."
        )
    file = find_cluster(options.cluster)
    return replace(file, name=options.cluster) if file.name == UNNAMED else file


def _subject(options: argparse.Namespace, file: ClusterFile) -> Subject:
    """Return what a plan is sought for on this cluster; its plans must hold the rows of a given routing."""
    subject = _loaded(_stepping(options, file), options.imbalance)
    if in_line(options.cluster) is not None:
        subject = subject.changed(lambda problem: problem, file.source)
    return subject if options.routing is None else _observing(subject, options)


def _stepping(options: argparse.Namespace, file: ClusterFile) -> Subject:
    """Return the step of the model or of the configuration, in the given or the best layout."""
    if options.model is not None and (config := _of_transformers(options.model)) is not None:
        return _configured(config, options, file, title=options.model)
    if options.model is not None:
        if options.overrides:
            why = "is a setting of a configuration, and --model has none"
            raise ConfigError(options.overrides[0], UNSET, why, "Use options such as --batch 8.")
        again = None if options.recompute in (None, AUTO) else options.recompute
        precision = None if options.precision in (None, AUTO) else options.precision
        if options.precision == AUTO:
            precision, _ = file.usual_precision
        given = {name: getattr(options, name) for name in SIZES}
        sizes = Overrides(**given, recompute=again, precision=precision)
        if options.layout != "auto":
            return _shared(published_problem(options.model, file, sizes), options)
        memory = _memory(options.memory_gib, file.memory_bytes)
        found = find_layouts(
            options.model, file, sizes, memory, time_limit(time.monotonic, options.budget or 1.0)
        )
        subject = with_layout(options.model, file, sizes, found.best.sizes)
        subject = replace(subject, notes=(*subject.notes, *found.lines))
        model = options.model
        return _shared(subject, options).beside(
            lambda: _shared(published_problem(model, file, sizes), options)
        )
    for name in (*SIZES, "sharded_optimizer", "shard_gradients", "recompute", "precision"):
        if getattr(options, name) is not None:
            why = "is an option for --model; a configuration has settings"
            raise ConfigError(_option(name), getattr(options, name), why, "Write it as section.key=value.")
    return _configured(options.config, options, file)


def _of_transformers(model: str) -> Path | None:
    """Return the configuration of an open model, or that at a path; None for a model of a study."""
    if (found := open_models().get(model)) is not None or model in MODELS:
        return found
    path = user_path(model)
    if is_folder(path) or path.suffix == ".json":
        return path
    check_name("--model", model, (*open_models(), *MODELS), "model")
    return None


def _shared(subject: Subject, options: argparse.Namespace) -> Subject:
    """Return the subject with the optimiser that `--sharded-optimizer` asks for, or with both of them.

    Raises ConfigError for `--shard-gradients` without a sharded optimiser.
    """
    sharded, releases = options.sharded_optimizer, bool(options.shard_gradients)
    if sharded not in ("true", "auto"):
        if releases:
            why = "keeps a share of every gradient, for an optimizer that updates shares"
            raise ConfigError("--shard-gradients", True, why, "Add --sharded-optimizer true, or auto.")
        return subject
    problem = sharing_updates(subject.problem, releases=releases)
    return replace(subject, sharded=problem) if sharded == "auto" else replace(subject, problem=problem)


def _loaded(subject: Subject, imbalance: float | None) -> Subject:
    """Return the subject with a busiest rank."""
    if imbalance is None:
        return subject
    note = f"the busiest rank of every expert group gets {imbalance:g} times the mean number of tokens"
    return subject.changed(lambda problem: problem.with_imbalance(imbalance), note)


def _observing(subject: Subject, options: argparse.Namespace) -> Subject:
    """Return the subject whose plans must hold the rows of --routing.

    Raises ConfigError where --imbalance is set, too.
    """
    if options.imbalance is not None:
        why, hint = "says which ranks get how many tokens, and so does --imbalance", "Remove one of the two."
        raise ConfigError("--routing", options.routing, why, hint)
    try:
        routing = RoutingConfig.parse(options.routing)
    except ConfigError as error:
        raise ConfigError("--routing", options.routing, error.why, error.hint) from error

    def observing(problem: Problem) -> Problem:
        return replace(problem, observed=with_routing(problem, routing, subject.movable).evidence)

    return subject.changed(observing)


def _configured(
    config: Path, options: argparse.Namespace, file: ClusterFile, title: str | None = None
) -> Subject:
    """Return the problem of a training run on this cluster's ranks.

    title: of a model of transformers, for which options stand in place of settings.
    """
    from penstock.autopilot.run_subject import run_subject

    settings = [] if title is None else _settings(options)
    memory = _memory(options.memory_gib, file.memory_bytes)
    given = [*settings, *options.overrides]
    subject = run_subject(config, given, file, layout=options.layout, memory=memory)
    return subject if title is None else replace(subject, title=title)


def _settings(options: argparse.Namespace) -> list[str]:
    """Return what options say of a model of transformers as settings of a run."""
    for name in SIZES.keys() - OF_CONFIGURATIONS.keys():
        if getattr(options, name) is not None:
            where = "--cluster" if name in ("nodes", "ranks_per_node") else "the model's config.json"
            why = "is a size of this model, or of its cluster, that no option replaces"
            raise ConfigError(_option(name), getattr(options, name), why, f"Say it in {where}.")
    given = ((key, getattr(options, name), name) for name, key in OF_CONFIGURATIONS.items())
    chosen = ((key, USUAL.get(name) if value is None else value) for key, value, name in given)
    return [f"{key}={str(value).lower()}" for key, value in chosen if value is not None]


def _memory(wanted_gib: float | None, known_bytes: int | None) -> MemoryBudget | None:
    if wanted_gib is None:
        return MemoryBudget.of(known_bytes)
    wanted_bytes = wanted_gib * 2**30
    if not 0 < wanted_bytes < math.inf:
        raise ConfigError("--memory-gib", wanted_gib, "must be positive and finite", "Such as 11.")
    return MemoryBudget(bytes=int(wanted_bytes))


@contextmanager
def _progress() -> Iterator[Callable[[Step], None]]:
    """Show a line on standard error while a search runs, if that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr, stderr=True), transient=True) as bar:
        line = bar.add_task("planning", total=None, best="")

        def show(step: Step) -> None:
            best = "" if step.best_s is None else f"best {milliseconds(step.best_s)}"
            bar.update(line, description=step.stage, completed=step.done, total=step.total, best=best)

        yield show
