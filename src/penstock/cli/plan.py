"""`penstock plan`: what to run on a cluster, also one that nobody here has.

For a published model torch is not loaded; a training configuration needs it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.config import UNSET, ConfigError
from penstock.cost import ClusterFile
from penstock.cost.clusters import find_cluster
from penstock.plan import MemoryBudget, PlanFile, Subject, explain, find_plan, published_problem
from penstock.plan import Progress as Step
from penstock.plan.subject import Overrides
from penstock.plan.words import milliseconds
from penstock.report.plan import PlanReport, saved_plan

NARROWEST, WIDEST = 60, 130
SIZES = ("layers", "batch", "seq_len", "top_k", "num_experts", "nodes", "ranks_per_node", "ep_size")
"""Sizes that a user may give instead of the published ones."""


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's arguments."""
    plan = commands.add_parser(
        "plan",
        help="find out what to run",
        description="Finds the fastest way to run a step, by simulation: schedule, microbatches, chunks, "
        "all-reduce chunks, dispatch and order. Needs no GPU, no network and not the cluster.",
        epilog="Example: penstock plan --model Mixtral-7B --cluster fsmoe-testbed-b",
    )
    plan.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG",
        help="a training configuration, such as configs/tiny.toml",
    )
    plan.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings that win over CONFIG"
    )
    plan.add_argument("--model", metavar="NAME", help="a published model instead of CONFIG")
    plan.add_argument("--cluster", metavar="NAME|FILE", help="a cluster that comes with Penstock, or a file")
    plan.add_argument("--out", type=Path, metavar="FILE", help="save the plan there")
    plan.add_argument("--show", type=Path, metavar="FILE", help="print a saved plan and do nothing else")
    plan.add_argument(
        "--memory-gib", type=float, metavar="X", help="refuse plans that need more per rank (the cluster's)"
    )
    for name in SIZES:
        option = "--" + name.replace("_", "-")
        plan.add_argument(option, type=int, metavar="N", help="instead of the published or described number")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.set_defaults(run=plan_command)


def plan_command(options: argparse.Namespace, given: object) -> int:
    """Exit code: 0, or 2 by way of ConfigError."""
    del given
    width = min(max(shutil.get_terminal_size((110, 24)).columns, NARROWEST), WIDEST)
    if options.show is not None:
        file = PlanFile.read(options.show)
        print(
            json.dumps(file.to_dict()) if options.json else saved_plan(file, str(options.show), width), end=""
        )
        return 0
    subject = _subject(options)
    memory = _memory(options.memory_gib, subject.memory_bytes)
    started = time.monotonic()
    with _progress() as progress:
        found = find_plan(subject.problem, memory=memory, progress=progress)
        explanation = explain(subject.problem, found, memory)
    seconds = time.monotonic() - started
    if options.out is not None:
        PlanFile.of(
            subject.problem,
            found.best,
            model=subject.title,
            cluster=subject.cluster_name,
            why=explanation.lines,
        ).save(options.out)
    saved = None if options.out is None else str(options.out)
    report = PlanReport(subject=subject, found=found, explanation=explanation, seconds=seconds, saved=saved)
    print(json.dumps(report.to_dict()) if options.json else report.to_text(width), end="")
    return 0


def _subject(options: argparse.Namespace) -> Subject:
    if (options.config is None) == (options.model is None):
        why = "say what the plan is for: either a configuration or --model"
        raise ConfigError(
            "plan", UNSET, why, "Such as penstock plan --model Mixtral-7B --cluster fsmoe-testbed-b."
        )
    if options.cluster is None:
        why = "say where the plan is to run"
        raise ConfigError("--cluster", UNSET, why, "Such as --cluster fsmoe-testbed-b, or a file of yours.")
    file = find_cluster(options.cluster)
    if options.model is not None:
        if options.overrides:
            why = "is a setting of a configuration, and --model has none"
            raise ConfigError(options.overrides[0], UNSET, why, "Use options such as --batch 8.")
        sizes = Overrides(**{name: getattr(options, name) for name in SIZES})
        return published_problem(options.model, file, sizes)
    return _configured(options, file)


def _configured(options: argparse.Namespace, file: ClusterFile) -> Subject:
    """The problem of a training run on this cluster's ranks."""
    for name in SIZES:
        if getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            why = "goes with --model; a configuration has settings"
            raise ConfigError(option, getattr(options, name), why, "Write it as section.key=value.")
    from penstock.config import load
    from penstock.topology import Layout
    from penstock.train.config import RunConfig
    from penstock.train.problem import run_problem

    config = load(RunConfig, options.config, options.overrides).resolved(file.ranks)
    experts = config.moe.num_experts
    layout = Layout.build(config.parallel, file.ranks, 0, experts, node_size=file.ranks_per_node)
    return Subject(
        title=str(options.config),
        cluster_name=file.name,
        problem=run_problem(config, layout, file),
        memory_bytes=file.memory_bytes,
    )


def _memory(wanted_gib: float | None, known_bytes: int | None) -> MemoryBudget | None:
    if wanted_gib is None:
        return None if known_bytes is None else MemoryBudget(bytes=known_bytes)
    if not wanted_gib > 0:
        raise ConfigError("--memory-gib", wanted_gib, "must be positive", "Such as 11.")
    return MemoryBudget(bytes=int(wanted_gib * 2**30))


@contextmanager
def _progress() -> Iterator[Callable[[Step], None]]:
    """A line on stderr while a search runs; nothing where nobody looks."""
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
