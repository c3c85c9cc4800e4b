"""What `penstock plan CONFIG` plans for: a training run on the ranks of any cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from penstock.autotune.choose import layouts
from penstock.autotune.problem import open_runs, run_problem
from penstock.config import ConfigError, asked, load, read_json
from penstock.cost import ClusterFile
from penstock.cost.devices import Computing
from penstock.mesh import group_sizes, holders
from penstock.plan import MemoryBudget, Subject
from penstock.plan.plan_config import AUTO
from penstock.plan.space import forced
from penstock.plan.subject import precision_of, rate_notes
from penstock.topology import Layout
from penstock.train.config import RunConfig

OF_A_RUN: Final = "schedule.refine_after"
"""The setting of section [schedule] that says what a run does later."""

WHILE_RUNNING: Final = {
    "plan.profile_s": "measures links and computation",
    "plan.trials": "tries plans in real steps",
    **dict.fromkeys(("plan.tuner", "plan.samples", "plan.sample_steps"), "tunes a plan in real steps"),
}
"""Settings of section [plan] for what only a run does, which a plan for a cluster file cannot heed."""

SECTIONS: Final = frozenset(each.name for each in fields(RunConfig))
"""Names of a run's sections."""


def run_subject(
    path: Path,
    overrides: Sequence[str],
    file: ClusterFile,
    *,
    layout: str | None = None,
    memory: MemoryBudget | None = None,
) -> Subject:
    """Return the step of a configuration on this cluster's ranks.

    path: a file of settings; or the config.json of a model of transformers, or its folder, with defaults for
    the rest.
    Section [schedule] of a file is for runs that do not search. What `overrides` set of it holds in every
    plan. layout: instead of plan.layout. Raises ConfigError for overrides that would have no effect.
    """
    keys = [override.partition("=")[0].strip() for override in overrides]
    check_source(overrides)
    # Whatever a run of this file would do, this is a search: so what is open, is.
    of_model = asked(path.is_dir) or (path.suffix == ".json" and not has_settings(path))
    given, model = (None, [f"model.config={path}"]) if of_model else (path, [])
    config = load(RunConfig, given, [*model, *overrides, f"plan.mode={AUTO}"])
    check_overrides(config, keys, file)
    config = config.resolved(file.ranks)
    wanted = config.train.precision
    precision, why = precision_of(file, None if wanted == "auto" else wanted)
    config = config.computing_in(precision)
    notes, decided = tuple(rate_notes(file, precision)), given_decisions(config, keys)

    def subject(config: RunConfig, *more: str) -> Subject:
        return _subject(str(path), config, file, decided, (*notes, *more), (precision, why))

    of_user = config
    if of_model and config.parallel.ep_size is None:  # experts lie on as many ranks as divide them
        valid = group_sizes(holders(file.ranks, config.parallel.etp_size))
        widest = max(size for size in valid if config.moe.num_experts % size == 0)
        of_user = replace(config, parallel=replace(config.parallel, ep_size=widest))
    if (layout or config.plan.layout) != AUTO:
        return subject(of_user)
    found = layouts.run_layouts(config, file, memory, decided)
    best = layouts.with_layout(config, found.best.sizes)
    return subject(best, *found.lines).beside(lambda: subject(of_user))


def has_settings(path: Path) -> bool:
    """Return whether a JSON file has sections of a run's settings, and is no model's config.json."""
    table = read_json(path, "Give a file of settings, or the config.json of a model.")
    return isinstance(table, dict) and "model_type" not in table and not SECTIONS.isdisjoint(table)


def _subject(
    title: str,
    config: RunConfig,
    file: ClusterFile,
    decided: Mapping[str, Any],
    notes: tuple[str, ...],
    precision: tuple[Computing, str],
) -> Subject:
    """Return the step of a resolved configuration in its layout. precision: and the reason for it."""
    experts = config.moe.num_experts
    ranks = Layout.build(config.parallel, file.ranks, 0, experts, node_size=file.ranks_per_node)
    plain, *sharded = [forced(run_problem(run, ranks, file), decided) for run in open_runs(config)]
    return Subject(
        title=title,
        cluster_name=file.name,
        problem=plain,
        precision=precision[0],
        why_precision=precision[1],
        sharded=sharded[0] if sharded else None,
        memory_bytes=file.memory_bytes,
        device=file.device_name,
        notes=notes,
        movable=config.placement.weighed,
        budget=config.plan.budget,
    )


def given_decisions(config: RunConfig, keys: Sequence[str]) -> dict[str, Any]:
    """Return the decisions that these settings of section [schedule] make, by name."""
    schedule = config.schedule
    names = [key.removeprefix("schedule.") for key in keys if key.startswith("schedule.") and key != OF_A_RUN]
    found: dict[str, Any] = {}
    for name in names:
        if name.startswith("more"):
            found |= dict(schedule.more)
        elif getattr(schedule, name) is not None:  # none leaves it open
            found["schedule" if name == "name" else name] = getattr(schedule, name)
    return found


def check_source(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a setting that asks for a plan without a search."""
    for override in overrides:
        key, _, value = (part.strip() for part in override.partition("="))
        if key == "plan.file" or (key == "plan.mode" and value.strip("\"'") != AUTO):
            why = "asks for a plan without a search, and this command searches"
            raise ConfigError(key, value, why, "Leave it out, or use penstock train.")


def check_overrides(config: RunConfig, keys: Sequence[str], file: ClusterFile) -> None:
    """Raise ConfigError for a setting that contradicts `--cluster` or the search, or is for runs alone."""
    for key in keys:
        section, _, name = key.partition(".")
        value, why = getattr(getattr(config, section, None), name, None), ""
        if key == "plan.cluster":
            why = "is the cluster of a run; that of a plan is --cluster"
        elif key in WHILE_RUNNING:
            why = f"{WHILE_RUNNING[key]}, and this command only simulates"
        elif key == "parallel.processes" and value not in (None, file.ranks):
            why = f"differs from the {file.ranks} ranks of --cluster, for which the plan is"
        elif key == "parallel.ranks_per_node" and value not in (None, file.ranks_per_node):
            why = f"differs from the {file.ranks_per_node} ranks per node of --cluster"
        elif section == "cluster":
            why = "is a rate for runs that measure nothing; those of a plan are in the file of --cluster"
        if why:
            hint = "Leave it out." if section == "plan" else "Change the cluster file."
            raise ConfigError(key, value, why, hint)
