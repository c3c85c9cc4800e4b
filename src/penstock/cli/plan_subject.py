"""What `penstock plan` plans for: the step and cluster that its options name; which options would fit."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from penstock.cli.out import user_path
from penstock.config import UNSET, ConfigError, asked, check_name
from penstock.cost import ClusterFile, StateTypes
from penstock.cost.clusters import UNNAMED, find_cluster
from penstock.cost.clusters.line import EXAMPLE, in_line
from penstock.cost.placed import Evidence
from penstock.mesh import holders
from penstock.plan import Problem, Subject, published_problem
from penstock.plan.candidate import least_memory
from penstock.plan.effort import COMMAND_S, check_budget, time_limit
from penstock.plan.layouts import find_layouts, layout_sizes, with_layout
from penstock.plan.models import MODELS, open_models
from penstock.plan.moving import known_routing, sample_sizes
from penstock.plan.optimizers import sharing_updates
from penstock.plan.plan_config import AUTO
from penstock.plan.subject import ELEMENT_BYTES, Overrides
from penstock.words import counted, gib
from penstock.workloads import RoutingConfig, RoutingSizes

STATE = {"param_dtype": "parameter_bytes", "grad_dtype": "gradient_bytes", "moment_dtype": "moment_bytes"}
"""Options for types of what is trained, and what they change."""

PLANNED_ONLY = "planned only: Penstock trains float32 parameters, gradients and moments, and shards none"

SHARDED = "3"
"""The stage of ZeRO in which parameters are sharded, too."""

MOST_NUMBERS = 1 << 28
"""The most numbers in a table of a known routing: two gigabytes."""

MOST_PASSES = 1 << 16
"""The most passes for an update."""

SIZES = {
    "layers": "layers, instead of those of a study's model",
    "batch": "samples per rank, instead of the model's",
    "seq_len": "tokens per sample, instead of the model's",
    "top_k": "experts per token, instead of those of a study's model",
    "num_experts": "experts, instead of those of a study's model",
    "nodes": "nodes, instead of those of a study's cluster",
    "ranks_per_node": "ranks per node, instead of those of a study's cluster",
    "ep_size": "ranks over which the experts are spread, instead of the model's",
    "tp_size": "ranks of a node that share attention and samples, instead of the model's",
    "etp_size": "ranks of a node that share every expert, instead of the model's",
}
"""Sizes of a published model and its cluster that options may replace."""

WORDS: Final[Mapping[str, Sequence[str]]] = {
    "layout": ("given", AUTO),
    "zero_stage": ("0", "1", "2", SHARDED, AUTO),
    "recompute": (AUTO, "none", "experts", "blocks"),
    "precision": (*ELEMENT_BYTES, AUTO),
    **dict.fromkeys(STATE, tuple(ELEMENT_BYTES)),
}
"""Options that take a word, with these words."""

OF_CONFIGURATIONS = {
    "batch": "data.batch_per_device",
    "seq_len": "model.seq_len",
    "ep_size": "parallel.ep_size",
    "tp_size": "parallel.tp_size",
    "etp_size": "parallel.etp_size",
    "recompute": "plan.recompute",
    "precision": "train.precision",
    "zero_stage": "optimizer.zero_stage",
}
"""Settings for which options stand where a model of transformers is planned."""

USUAL = {"batch": 1, "seq_len": 4096, "recompute": "auto", "zero_stage": "auto"}
"""Options of such a model that are not given."""


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse_set(options: argparse.Namespace, names: Iterable[str], why: str, hint: str) -> None:
    """Raise ConfigError about the first of the named options that is set."""
    for name in names:
        if (value := getattr(options, name)) is not None:
            key = "CONFIG" if name == "config" else option(name)
            raise ConfigError(key, str(value) if isinstance(value, Path) else value, why, hint)


def replaced(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """Return the options with some changed."""
    return argparse.Namespace(**{**vars(options), **changes})


def changed_options(options: argparse.Namespace, changes: Mapping[str, Any]) -> argparse.Namespace:
    """Return the options with changes, which are settings where a configuration is planned."""
    if options.model is not None:
        return replaced(options, **changes)
    overrides = [*options.overrides, *as_settings(changes)]
    return replaced(options, overrides=overrides)


def as_settings(changes: Mapping[str, Any]) -> list[str]:
    """Return changed options as settings of a configuration."""
    return [f"{OF_CONFIGURATIONS[name]}={str(value).lower()}" for name, value in changes.items()]


def of_study(model: str | None) -> bool:
    """Return whether a model is one of a study."""
    return model is not None and of_transformers(model) is None


def cluster_of(options: argparse.Namespace) -> ClusterFile:
    """Return the cluster.

    Raises:
        ConfigError: Unless there are one and a step to plan.
    """
    if (options.config is None) == (options.model is None):
        why = "needs either a configuration or --model"
        raise ConfigError(
            "plan",
            UNSET,
            why,
            f"For example, penstock plan --model qwen3-30b-a3b --cluster {EXAMPLE}.",
        )
    if options.cluster is None:
        why = "is needed: the cluster on which the plan will run"
        raise ConfigError("--cluster", UNSET, why, f"For example, --cluster {EXAMPLE}, or a cluster file.")
    file = find_cluster(options.cluster)
    return replace(file, name=options.cluster) if file.name == UNNAMED else file


def subject_of(options: argparse.Namespace, file: ClusterFile) -> Subject:
    """Return what a plan is sought for on this cluster; its plans must hold the rows of a given routing."""
    imbalance, state, samples = options.imbalance, _state_of(options), options.global_batch
    observing = None if options.routing is None else _observing(options)

    def assumed(problem: Problem) -> Problem:
        problem = problem if imbalance is None else problem.with_imbalance(imbalance)
        problem = replace(problem, workload=replace(problem.workload, state=state))
        problem = problem if samples is None else replace(problem, passes=_passes_of(problem, samples))
        return problem if observing is None else observing(problem)

    notes = []
    if imbalance is not None:
        notes += [
            f"the busiest rank of every expert group gets {imbalance:g} times the mean number of tokens"
        ]
    if in_line(options.cluster) is not None:
        notes += [file.source]
    if state != StateTypes():
        notes += [PLANNED_ONLY]
    subject = _stepping(options, file, assumed).changed(assumed, *notes)
    if samples is not None:
        _check_passes(subject.problem, samples)
    return subject


def _state_of(options: argparse.Namespace) -> StateTypes:
    """Return the types and shares of what is trained that options ask for."""
    given = {key: getattr(options, name) for name, key in STATE.items()}
    sizes: dict[str, Any] = {key: ELEMENT_BYTES[value] for key, value in given.items() if value is not None}
    if options.zero_stage == SHARDED:
        sizes["fully_sharded"] = True
    state = replace(StateTypes(), **sizes)
    if state != StateTypes() and options.out is not None:
        why = f"is for plans that can be run: {PLANNED_ONLY}"
        raise ConfigError("--out", str(options.out), why, "Remove it, or the options for types and shares.")
    return state


def _passes_of(problem: Problem, samples: int) -> int:
    """Return the passes for an update of as nearly these samples as can be."""
    return min(MOST_PASSES, max(1, round(samples / problem.workload.samples)))


def _check_passes(problem: Problem, samples: int) -> None:
    """Raise ConfigError unless the passes for an update have exactly these samples, whatever the layout."""
    work = problem.workload
    if (near := problem.passes * work.samples) != samples:
        groups = holders(work.world_size, work.tp_size)
        why = (
            f"is no whole number, up to {MOST_PASSES:,}, of passes: one has {work.samples} samples, "
            f"{work.batch} for each of {counted(groups, 'rank' if work.tp_size == 1 else 'group')}"
        )
        raise ConfigError("--global-batch", samples, why, f"Nearest valid: {near}; or change --batch.")


def _stepping(
    options: argparse.Namespace, file: ClusterFile, assumed: Callable[[Problem], Problem]
) -> Subject:
    """Return the step of the model or of the configuration, in the given or the best layout.

    assumed: changes a step as options say; layouts are compared by what it returns.
    """
    if options.model is not None and (config := of_transformers(options.model)) is not None:
        return _configured(config, options, file, assumed, title=options.model)
    if options.model is not None:
        if options.overrides:
            why = "is a setting of a configuration, and --model has none"
            raise ConfigError(options.overrides[0], UNSET, why, "Use options such as --batch 8.")
        recompute = None if options.recompute in (None, AUTO) else options.recompute
        precision = None if options.precision in (None, AUTO) else options.precision
        if options.precision == AUTO:
            precision, _ = file.usual_precision
        given = {name: getattr(options, name) for name in SIZES}
        sizes = Overrides(**given, recompute=recompute, precision=precision)
        if options.layout != "auto":
            return _shared(published_problem(options.model, file, sizes), options)
        memory_bytes = memory_of(options.memory_gib, file.memory_bytes)
        layouts = find_layouts(
            options.model,
            file,
            sizes,
            memory_bytes,
            time_limit(time.process_time, options.budget or 1.0, COMMAND_S),
            lambda subject: _shared(subject, options).changed(assumed),
        )
        subject = with_layout(options.model, file, sizes, layouts.best.sizes)
        subject = replace(subject, notes=(*subject.notes, *layouts.lines), starts=(layouts.best.best.choice,))
        model = options.model
        return _shared(subject, options).beside(
            lambda: _shared(published_problem(model, file, sizes), options)
        )
    why = "is an option for --model; a configuration has settings"
    names = (*SIZES, "zero_stage", "recompute", "precision")
    refuse_set(options, names, why, "Write it as section.key=value.")
    return _configured(options.config, options, file, assumed)


def of_transformers(model: str) -> Path | None:
    """Return the configuration of an open model, or that at a path; None for a model of a study."""
    if (config := open_models().get(model)) is not None or model in MODELS:
        return config
    path = user_path(model)
    if asked(path.is_dir) or path.suffix == ".json":
        return path
    otherwise = "Of any other model give the path of its config.json."
    check_name("--model", model, (*open_models(), *MODELS), "model", otherwise)
    return None


def _shared(subject: Subject, options: argparse.Namespace) -> Subject:
    """Return the subject with the optimiser that `--zero-stage` asks for, or with both of them."""
    stage = options.zero_stage
    if stage in (None, "0"):
        return subject
    problem = sharing_updates(subject.problem, releases=stage in ("2", SHARDED))
    return replace(subject, sharded=problem) if stage == "auto" else replace(subject, problem=problem)


def _observing(options: argparse.Namespace) -> Callable[[Problem], Problem]:
    """Return what changes a step into one whose plans must hold the rows of --routing.

    Raises ConfigError where --imbalance is set, too.
    """
    if options.imbalance is not None:
        why, hint = "says which ranks get how many tokens, and so does --imbalance", "Remove one of the two."
        raise ConfigError("--routing", options.routing, why, hint)
    try:
        routing = RoutingConfig.parse(options.routing)
    except ConfigError as error:
        raise ConfigError("--routing", options.routing, error.why, error.hint) from error
    known: dict[RoutingSizes, Evidence] = {}  # many layouts have the same

    def observing(problem: Problem) -> Problem:
        sizes = sample_sizes(problem)
        numbers = max(math.prod(sizes.shape), (sizes.groups * problem.workload.tp_size) ** 2)
        if numbers > MOST_NUMBERS:
            why = f"asks for tables of {numbers:.1e} numbers: what samples send to every expert of a layer"
            hint = "Plan fewer nodes, as many as one expert group covers: the others do the same."
            raise ConfigError("--routing", options.routing, why, hint)
        if sizes not in known:
            known[sizes] = known_routing(problem, routing)
        return replace(problem, observed=known[sizes])

    return observing


def _configured(
    config: Path,
    options: argparse.Namespace,
    file: ClusterFile,
    assumed: Callable[[Problem], Problem],
    title: str | None = None,
) -> Subject:
    """Return the problem of a training run on this cluster's ranks.

    assumed: see `_stepping`. title: of a model of transformers, for which options stand in place of settings.
    """
    from penstock.autotune.choose.layouts import has_settings, run_subject

    if title is not None and not asked(config.is_dir) and has_settings(config):
        why = "has settings of a run, and is no model's config.json"
        raise ConfigError("--model", title, why, f"Write penstock plan {title}, without --model.")
    settings = [] if title is None else _settings(options)
    memory_bytes = memory_of(options.memory_gib, file.memory_bytes)
    given = [*settings, *options.overrides]
    try:
        subject = run_subject(
            config, given, file, layout=options.layout, memory_bytes=memory_bytes, assumed=assumed
        )
    except ConfigError as error:
        as_option = {key: option(name) for name, key in OF_CONFIGURATIONS.items()}
        if title is None or error.key not in as_option:
            raise
        raise type(error)(as_option[error.key], error.value, error.why, error.hint) from error
    return subject if title is None else subject.called(title)


def _settings(options: argparse.Namespace) -> list[str]:
    """Return what options say of a model of transformers as settings of a run."""
    why = "is a size of this model, or of its cluster, that no option replaces"
    refuse_set(options, ("nodes", "ranks_per_node"), why, "Say it in --cluster.")
    names = SIZES.keys() - OF_CONFIGURATIONS.keys()
    refuse_set(options, names, why, "Say it in the model's config.json.")
    settings = []
    for name, key in OF_CONFIGURATIONS.items():
        value = getattr(options, name)
        if value is None:
            value = USUAL.get(name)
        elif (name, value) == ("zero_stage", SHARDED):
            value = "2"
        if value is not None:
            settings.append(f"{key}={str(value).lower()}")
    return settings


def memory_of(wanted_gib: float | None, known_bytes: int | None) -> int | None:
    if wanted_gib is None:
        return known_bytes
    wanted_bytes = wanted_gib * 2**30
    if not 0 < wanted_bytes < math.inf:
        raise ConfigError("--memory-gib", wanted_gib, "must be positive and finite", "Such as 11.")
    return int(wanted_bytes)


def budget_of(options: argparse.Namespace, subject: Subject) -> float:
    """Return the effort of searches.

    Raises:
        ConfigError: If it is out of range.
    """
    budget: float = subject.budget if options.budget is None else options.budget
    check_budget("--budget", budget)
    return budget


Changes = Mapping[str, Any]
"""New values of options, by name."""

SAVING: Final[Sequence[Changes]] = (
    {"precision": "bfloat16"},
    {"recompute": "auto"},
    {"zero_stage": "1"},
    {"zero_stage": "2"},
)
"""Changes that keep layout and batch."""

SAID: Final = 3
"""The most changes that are named beside each other."""


@dataclass(frozen=True)
class Fitting:
    """The memory of a step with changed options.

    Attributes:
        subject_of: Returns the step with changed options, or raises ConfigError.
        memory_bytes: What a rank can hold.
        describe: Returns changed options as a user writes them.
        of_study: Whether the step has the same samples whatever the layout.
        ends: Tells whether the time is over.
    """

    subject_of: Callable[[Changes], Subject]
    memory_bytes: int
    describe: Callable[[Changes], str]
    of_study: bool
    ends: Callable[[], bool]
    _known: dict[str, int | None] = field(default_factory=dict)

    def advice(self) -> str:
        """Return what would fit, with its memory, or what needs least."""
        try:
            first = self.subject_of({})
        except ConfigError:
            return ""  # the layout was open, and the given one is impossible
        layouts, batch = list(self._layouts(first)), first.problem.batch
        batches: list[Changes] = [{"batch": batch >> times} for times in range(1, batch.bit_length())]
        alone = [each for each in (*SAVING, *layouts, *batches) if self._fits(each)]
        if alone:
            return f"It would fit with {', or with '.join(map(self._with_memory, alone[:SAID]))}."
        saving: Changes = {}
        for each in SAVING:
            saving = {**saving, **each} if self._bytes({**saving, **each}) is not None else saving
        together = [{**saving, **layout} for layout in ({}, *layouts)]
        together += [{**each, **batch} for each in together for batch in batches[-1:]]
        possible = [each for each in together if self._bytes(each) is not None]
        for each in possible:
            if self._fits(each):
                return f"It would fit with {self._with_memory(self._needed(each))}."
        if not possible:
            return ""
        least = min(possible, key=lambda each: self._bytes(each) or 0)
        return f"Use more ranks: the nearest to fit is {self._with_memory(least)}."

    def _layouts(self, subject: Subject) -> Iterator[Changes]:
        """Yield other layouts, with the same samples per step; a study's model has them by itself."""
        work = subject.problem.workload
        for sizes in other_layouts(subject):
            samples = work.batch * sizes["tp_size"]
            if self.of_study or sizes["tp_size"] == work.tp_size:
                yield sizes
            elif samples % work.tp_size == 0:
                yield {**sizes, "batch": samples // work.tp_size}

    def _needed(self, changes: Changes) -> Changes:
        """Return the changes without those that are not needed."""
        for name in changes:
            fewer = {key: value for key, value in changes.items() if key != name}
            if self._fits(fewer):
                return self._needed(fewer)
        return changes

    def _fits(self, changes: Changes) -> bool:
        needed = self._bytes(changes)
        return needed is not None and needed <= self.memory_bytes

    def _with_memory(self, changes: Changes) -> str:
        return f"{self.describe(changes)} ({gib(self._bytes(changes) or 0)} per rank)"

    def _bytes(self, changes: Changes) -> int | None:
        """Return the least memory of a rank with these changes; None if they are impossible, or no time."""
        key = self.describe(changes)
        if key not in self._known:
            problems: Sequence[Problem] = ()
            with suppress(ConfigError):  # a size does not divide, or this step cannot have it
                problems = () if self.ends() else self.subject_of(changes).problems
            self._known[key] = min((least_memory(each).total_bytes for each in problems), default=None)
        return self._known[key]


def other_layouts(subject: Subject, ep_size: int | None = None) -> Iterator[Changes]:
    """Yield the sizes of other layouts.

    Args:
        ep_size: The only one wanted; None = see `layout_sizes`.
    """
    work = subject.problem.workload
    own = work.tp_size, work.ep_size, work.etp_size
    for layout in layout_sizes(work.world_size, work.devices_per_node, work.num_experts, ep_size):
        sizes = {"tp_size": layout.tp_size, "ep_size": layout.ep_size, "etp_size": layout.etp_size}
        if tuple(sizes.values()) != own and layout.tokens == "split":
            yield sizes
