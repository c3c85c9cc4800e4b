"""Chooses which ranks share attention and experts where that is open (`plan.layout = auto`).

In a run the choice is made before anything is built: the cluster is read from its file or measured, once with
every rank by itself and once with pairs that share; rank 0 ranks all layouts by quick plans and tells the
others. `penstock plan CONFIG` ranks them for the ranks of any cluster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.autotune.problem import check_shared, open_runs, possible_dispatches, run_problem
from penstock.autotune.profile.measure import profile_layout
from penstock.config import ConfigError, IndivisibleError, asked, load, read_json, to_dict
from penstock.config.bounds import types_of
from penstock.cost import ClusterFile
from penstock.cost.clusters import find_cluster
from penstock.cost.devices import Computing
from penstock.mesh import group_sizes, holders
from penstock.plan import PlanFile, Problem, Subject
from penstock.plan.effort import time_limit
from penstock.plan.layouts import FoundLayouts, LayoutSizes, layout_sizes, rank_layouts
from penstock.plan.plan_config import AUTO
from penstock.plan.space import forced
from penstock.plan.subject import precision_of, rate_notes
from penstock.topology import Layout
from penstock.train.assemble import RankMemory, build_machinery, check_run, memory_of
from penstock.train.config import RunConfig
from penstock.train.output import PLAN_FILE
from penstock.train.pilot import Ranks, Resumption
from penstock.train.possible import check_shares

logger = logging.getLogger(__name__)

CHOOSING_AGAIN = "choosing a layout again instead of keeping that of {path} ({why})"
NOTHING: Final[Mapping[str, Any]] = {}
OF_A_LAYOUT = ("tp_size", "ep_size", "etp_size", "tokens", "ranks_per_node")
"""Settings of section [parallel] that must stay the same for a run to keep its layout."""


def settled_layout(config: RunConfig, ranks: Ranks, resumption: Resumption | None) -> RunConfig:
    """Return the resolved configuration with the run's layout; all ranks call it and get the same.

    A resumed run keeps its layout, unless that is impossible by now or another one is requested.
    """
    if config.plan.layout != AUTO:
        return config
    kept = None if resumption is None else _kept(config, ranks, resumption)
    return with_layout(config, kept or _chosen(config, ranks))


def with_layout(config: RunConfig, sizes: LayoutSizes) -> RunConfig:
    """Return the run in which ranks share as in `sizes`, with the same samples per step.

    Raises:
        IndivisibleError: If the samples cannot be divided among the groups of ranks.
    """
    parallel, data = config.parallel, config.data
    samples = data.batch_per_device * sizes.tp_size
    if samples % parallel.tp_size:
        why = f"{samples} samples cannot be divided among {parallel.tp_size} groups of ranks"
        raise IndivisibleError("data.batch_per_device", data.batch_per_device, why, "Use a multiple.")
    data = replace(data, batch_per_device=samples // parallel.tp_size)
    return replace(config, parallel=replace(parallel, **asdict(sizes)), data=data)


def check_some_layout(config: RunConfig, processes: int, node_size: int, there_bytes: int | None) -> None:
    """Raise ConfigError unless in some layout of these local processes everything divides and may fit.

    Args:
        node_size: Number of ranks in a node.
        there_bytes: Memory of all processes together; None = not known.
    """
    last: ConfigError | None = None
    for candidate in _layouts(config, processes, 0, node_size):
        if there_bytes is None:
            return
        try:
            check_run(candidate.config, candidate.layout, there_bytes=there_bytes, sharing=processes)
        except ConfigError as error:
            last = error
        else:
            return
    assert last is not None, "there are layouts, and each was refused"
    raise last


def least_memory(config: RunConfig, world_size: int) -> RankMemory:
    """Return the memory that a rank needs in the layout that needs least, wherever its ranks are.

    Args:
        config: A `resolved` configuration.

    Raises:
        ConfigError: If there is no layout in which everything divides.
    """
    possible = _layouts(config, world_size, 0, world_size)
    return min((memory_of(each.config, each.layout) for each in possible), key=lambda need: need.total_bytes)


def run_layouts(
    config: RunConfig,
    file: ClusterFile,
    memory_bytes: int | None = None,
    given: Mapping[str, Any] = NOTHING,
    assumed: Callable[[Problem], Problem] = lambda problem: problem,
) -> FoundLayouts:
    """Rank all layouts of a resolved configuration on a cluster's ranks.

    It ends by the clock, with what is ranked by then.

    Args:
        memory_bytes: What every rank has for training; None = not known.
        given: Decisions that every plan has, by name.
        assumed: Changes the step of every layout.

    Raises:
        ConfigError: If no layout fits.
    """
    return _ranked(config, file.ranks, file.ranks_per_node, lambda _: file, memory_bytes, given, assumed)


# ---- keeping it --------------------------------------------------------------------------------------------


def _kept(config: RunConfig, ranks: Ranks, resumption: Resumption) -> LayoutSizes | None:
    """Return the layout of the resumed run; None, with the reason printed, if it must be chosen again."""
    path = resumption.path
    try:
        sizes = ranks.control.decided(partial(_saved, config, ranks, resumption), f"reading {path.name}")
    except ConfigError as error:
        logger.info(CHOOSING_AGAIN.format(path=path, why=str(error).rstrip(".")))
        return None
    logger.info(f"layout kept from {path.name}: {_words(sizes)}")
    return sizes


def _saved(config: RunConfig, ranks: Ranks, resumption: Resumption) -> LayoutSizes:
    """Return the saved layout. Raises ConfigError, with the reason, if it is not for this run any more."""
    saved, here = PlanFile.read(resumption.path / PLAN_FILE).sizes, ranks.control.world_size
    if saved.ranks != here:
        raise ConfigError("processes", here, f"it was of {saved.ranks} processes")
    settings = resumption.record.settings or {}
    for section, names in (("plan", ("layout", "cluster")), ("parallel", OF_A_LAYOUT)):
        now, then = to_dict(getattr(config, section)), settings.get(section, {})
        if changed := [name for name in names if now[name] != then.get(name)]:
            raise ConfigError(f"{section}.{changed[0]}", now[changed[0]], "it has changed")
    sizes = LayoutSizes(**{each.name: getattr(saved, each.name) for each in fields(LayoutSizes)})
    _possible(config, sizes, here, 0, ranks.node_size)  # by the nodes and the settings of now
    return sizes


def _words(sizes: LayoutSizes) -> str:
    tokens = f", tokens {sizes.tokens}" if sizes.tp_size > 1 else ""
    return f"tp {sizes.tp_size}, ep {sizes.ep_size}, etp {sizes.etp_size}{tokens}"


# ---- choosing it -------------------------------------------------------------------------------------------


def _chosen(config: RunConfig, ranks: Ranks) -> LayoutSizes:
    """Choose the best layout by the cluster's file, or by a short measurement."""
    control = ranks.control
    possible = _layouts(config, control.world_size, control.rank, ranks.node_size)
    if len(possible) == 1:
        logger.info(f"layout: {_words(possible[0].sizes)}, the only one in which everything divides")
        return possible[0].sizes
    if (name := config.plan.cluster) is None:
        files = _measured(config, possible, ranks)
    else:
        find = partial(find_cluster, name, "plan.cluster")
        files = (control.decided(find, "reading the cluster file"),) * 2

    def decide() -> tuple[LayoutSizes, tuple[str, ...]]:
        def file_of(sizes: LayoutSizes) -> ClusterFile:
            return files[sizes.shares]

        ranked = _ranked(config, control.world_size, ranks.node_size, file_of, files[0].memory_bytes)
        return ranked.best.sizes, ranked.lines

    sizes, lines = control.decided(decide, "choosing a layout", slowly=True)
    logger.info("\n".join(lines))
    return sizes


def _measured(
    config: RunConfig, possible: Sequence[_Possible], ranks: Ranks
) -> tuple[ClusterFile, ClusterFile]:
    """Measure the cluster for layouts in which every rank works alone, and for those in which ranks share.

    One layout of either kind is measured, the second in pairs if they divide; each file is completed from the
    other.
    """
    alone = [each for each in possible if not each.sizes.shares][:1]
    sharing = sorted(
        (each for each in possible if each.sizes.shares),
        key=lambda each: (each.sizes.tp_size > 1) + (each.sizes.etp_size > 1),
    )
    samples = [*alone, *sharing[-1:]]
    budget_s = config.plan.profile_s / len(samples)
    logger.info(f"measuring the cluster for about {config.plan.profile_s:.0f} s to choose a layout")
    files: list[ClusterFile] = []
    for each in samples:
        machinery = build_machinery(each.layout, ranks.device, config.parallel, config.train.precision)
        first = files[0] if files else None
        try:
            files.append(profile_layout(each.config, machinery, budget_s=budget_s, first=first))
        finally:
            machinery.close()
    return files[0].beside(files[-1]), files[-1].beside(files[0])


@dataclass(frozen=True, kw_only=True)
class _Possible:
    """A layout in which everything divides, and the run with that layout."""

    sizes: LayoutSizes
    config: RunConfig
    layout: Layout


def _layouts(config: RunConfig, world_size: int, rank: int, node_size: int) -> list[_Possible]:
    """Return all possible layouts. Raises ConfigError, with the reason, if there are none."""
    possible, refused = list[_Possible](), list[ConfigError]()
    for sizes in _tried(config, world_size, node_size):
        try:
            possible.append(_possible(config, sizes, world_size, rank, node_size))
        except IndivisibleError:
            continue
        except ConfigError as error:
            refused.append(error)
    if refused and not possible:
        raise refused[0]
    if not possible:
        why = f"no layout of {world_size} ranks divides heads, widths, experts and samples"
        raise ConfigError("plan.layout", AUTO, why, "Set plan.layout=given to see what does not divide.")
    return possible


def _tried(config: RunConfig, world_size: int, node_size: int) -> Iterator[LayoutSizes]:
    per_node = config.parallel.ranks_per_node or node_size
    return layout_sizes(world_size, per_node, config.moe.num_experts, config.parallel.ep_size)


def _possible(config: RunConfig, sizes: LayoutSizes, world_size: int, rank: int, node_size: int) -> _Possible:
    """Return the run with this layout. Raises IndivisibleError or ConfigError for what cannot be shared."""
    run = with_layout(config, sizes)
    check_shares(run.model, run.moe, run.parallel, world_size)
    check_shared(run.moe, run.parallel)
    layout = Layout.build(run.parallel, world_size, rank, run.moe.num_experts, node_size)
    possible_dispatches(run, layout)
    return _Possible(sizes=sizes, config=run, layout=layout)


def _ranked(
    config: RunConfig,
    world_size: int,
    node_size: int,
    file_of: Callable[[LayoutSizes], ClusterFile],
    memory_bytes: int | None,
    given: Mapping[str, Any] = NOTHING,
    assumed: Callable[[Problem], Problem] = lambda problem: problem,
) -> FoundLayouts:
    def problems_of(sizes: LayoutSizes) -> Sequence[Problem]:
        file = file_of(sizes)
        candidate = _possible(config, sizes, world_size, 0, node_size)
        runs = open_runs(candidate.config)
        return [assumed(forced(run_problem(run, candidate.layout, file), given)) for run in runs]

    tried, ends = _tried(config, world_size, node_size), time_limit(time.monotonic, config.plan.budget)
    return rank_layouts(tried, problems_of, memory_bytes, ends=ends)


OF_A_RUN: Final = "schedule.refine_after"
"""The setting of section [schedule] that says what a run does later."""

WHILE_RUNNING: Final = {
    "plan.profile_s": "measures links and computation",
    "plan.trials": "tries plans in real steps",
    **dict.fromkeys(("plan.tuner", "plan.samples", "plan.sample_steps"), "tunes a plan in real steps"),
}
"""Settings of section [plan] for what only a run does, which a plan for a cluster file cannot heed."""

SECTIONS: Final = frozenset(types_of(RunConfig))
"""Names of a run's sections."""


def run_subject(
    path: Path,
    overrides: Sequence[str],
    file: ClusterFile,
    *,
    layout: str | None = None,
    memory_bytes: int | None = None,
    assumed: Callable[[Problem], Problem] = lambda problem: problem,
) -> Subject:
    """Return the step of a configuration on this cluster's ranks.

    Args:
        path: A file of settings; or the config.json of a model of transformers, or its folder, with defaults
            for the rest. Section [schedule] of a file is for runs that do not search.
        overrides: Settings `key=value`. Those of section [schedule] hold in every plan.
        layout: What counts instead of `plan.layout`; None = that.
        memory_bytes: What every rank has for training; None = not known.
        assumed: Changes the steps by which layouts are compared.

    Raises:
        ConfigError: If an override would have no effect.
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
    of_user, ep_size = config, config.parallel.ep_size

    def subject(config: RunConfig, *more: str) -> Subject:
        own = _subject(str(path), config, file, decided, (*notes, *more), (precision, why))
        return replace(own, ep_size=ep_size)

    if of_model and config.parallel.ep_size is None:  # experts lie on as many ranks as divide them
        valid = group_sizes(holders(file.ranks, config.parallel.etp_size))
        widest = max(size for size in valid if config.moe.num_experts % size == 0)
        of_user = replace(config, parallel=replace(config.parallel, ep_size=widest))
    if (layout or config.plan.layout) != AUTO:
        return subject(of_user)
    ranked = run_layouts(config, file, memory_bytes, decided, assumed)
    best = with_layout(config, ranked.best.sizes)
    chosen = replace(subject(best, *ranked.lines), starts=(ranked.best.best.choice,))
    return chosen.beside(lambda: subject(of_user))


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
    decisions: dict[str, Any] = {}
    for name in names:
        if name.startswith("more"):
            decisions |= dict(schedule.more)
        elif getattr(schedule, name) is not None:  # none leaves it open
            decisions["schedule" if name == "name" else name] = getattr(schedule, name)
    return decisions


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
