"""The whole configuration of a training run. Every section lives beside what it configures.

All ranks train by the same settings; otherwise each would silently train its own replica.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from penstock.config import Checked, ConfigError, Within, asked, check_bounds, check_name, to_dict
from penstock.config.bounds import MOST_STEPS, FilePath, Items, Name, Seed, Steps, by_key
from penstock.config.error import shown
from penstock.config.load import COMMAND_LINE
from penstock.cost import ClusterConfig
from penstock.data import DataConfig
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.models import PRESETS, ModelConfig
from penstock.models.config import QWEN3_MOE, experts_of_preset, sizes_of_preset
from penstock.models.qwen3_moe import model_type_of, sections_of
from penstock.moe import MoEConfig
from penstock.plan.plan_config import FIXED, REPLAY, PlanConfig
from penstock.topology import Control, ParallelConfig
from penstock.train.optimizer import OptimizerConfig
from penstock.train.possible import check_movable, check_moves, check_sections, check_shares, moving_in

Precision = Literal["auto", "float32", "bfloat16"]
Resume = Literal[True, False, "auto"]
IF_PRESENT = "auto"
"""Value of `resume`: continue if there is something to continue, else start from the beginning."""
AtLeastOne = Annotated[int, Within(1, MOST_STEPS, "steps are numbered with eight digits")]
TracedSteps = Annotated[int, Within(0, 10_000, "every task of a traced step is in memory; 0 = no trace")]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Checked):
    """Section `[train]`: how long a run is, and what it does beside training."""

    steps: AtLeastOne = 200
    """Optimiser steps in all, counted from the first start."""
    seed: Seed = 0
    """Seed of weights, data order and dropout."""
    resume: Resume = False
    """Whether to go on: true = from the newest complete checkpoint, an error if there is none; "auto" = from
    it if there is one, otherwise from the beginning, for jobs that a batch system restarts
    ([more](training.md#resuming))."""
    precision: Precision = "auto"
    """Format of computation: "auto" = bfloat16 autocast where the device supports it, otherwise float32;
    plans are made for what it comes to."""
    eval_every: Steps = 100
    """Steps between evaluations; 0 = only at the end."""
    eval_batches: Annotated[int, Within(1, MOST_STEPS, "an evaluation needs a batch")] = 4
    """Held-out batches per rank and evaluation."""
    checkpoint_every: Steps = 100
    """Steps between checkpoints; 0 = only at the end."""
    keep_checkpoints: Annotated[int, Within(1, MOST_STEPS, "a run resumes from the newest")] = 2
    """How many checkpoints are kept; older ones are removed."""
    log_every: Steps = 10
    """Steps between log lines; 0 = only at the end."""
    max_skipped_steps: Steps = 4
    """Consecutive steps that may be skipped because the loss or gradients are not finite; one more ends the
    run."""


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Section `[output]`: what a run leaves."""

    dir: FilePath = Path("runs/default")
    """Folder for checkpoints, metrics and the trace."""
    tensorboard: bool = True
    """Whether to write event files of TensorBoard, too."""
    trace_steps: TracedSteps = 2
    """How many of the last steps are traced; 0 = no trace."""
    loads: bool = True
    """Gather once per step how many tokens of every rank chose each expert, for metrics and pictures: a few
    hundred bytes."""
    routing: bool = False
    """Write `routing.jsonl`: how many tokens chose each expert in every step, for virtual devices and plans
    that route as this run did."""
    routing_samples: bool = False
    """Also count them by sample."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.routing_samples and not (self.routing and self.loads):
            why = "is written into routing.jsonl, from the loads that steps gather"
            hint = "Set output.routing=true and leave output.loads as it is, or leave it out."
            raise ConfigError("routing_samples", True, why, hint)


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Checked):
    """Section `[metrics]`: where metrics go beside the run's own files."""

    wandb: Literal[True, False, "offline"] = False
    """Weights & Biases: true = metrics go to the server, too (`pip install 'penstock[wandb]'`); "offline" =
    into the run's folder, from where `wandb sync` sends them."""
    wandb_project: Name = "penstock"
    """Under which project."""
    wandb_entity: Name | None = None
    """Of which user or team; none = the default of who is logged in."""
    wandb_name: Name | None = None
    """Name of the run; none = that of its folder."""
    wandb_tags: Annotated[tuple[Name, ...], Items(100, "more tags find nothing")] = ()
    """The run's labels."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that `penstock train` reads.

    Attributes:
        sources: Where `load` has found each setting that is set, and as what, by its dotted key; copies with
            other sections have it, too.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    sources: Mapping[str, tuple[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        preset = self.model.preset
        if preset is not None:
            check_name("model.preset", preset, PRESETS, "published model")
        if self.plan.mode == FIXED and self.schedule.reads("microbatches"):  # else the section is not used
            samples, wanted = self.data.batch_per_device, self.schedule.microbatches
            if wanted > samples and wanted != ScheduleConfig.microbatches:
                why = f"data.batch_per_device = {samples} samples cannot be cut into more pieces than samples"
                raise ConfigError("schedule.microbatches", wanted, why, f"Nearest valid: {samples}.")
            if wanted > samples:  # the usual number
                object.__setattr__(self, "schedule", replace(self.schedule, microbatches=samples))

    def resolved(self, world_size: int) -> RunConfig:
        """Return the run with the sizes of its model, checked for this number of ranks."""
        run = self.with_sizes(world_size)
        check_shares(run.model, run.moe, run.parallel, world_size)
        check_moves(run.placement, run.plan.mode, run.parallel, world_size)
        if run.plan.mode != REPLAY:
            given = run.schedule if run.plan.mode == FIXED else None
            check_movable(run.placement, given, run.moe, run.parallel)
        return run

    def with_sizes(self, world_size: int) -> RunConfig:
        """Return the run with the sizes of a preset, or of the model's file, where the user set none.

        A preset's number of experts depends on the number of ranks. In Python, a key is set if its value is
        not its default; so it is in a file for which the command line names the preset or model.
        """
        return self._with_preset(world_size)._with_config()

    def computing_in(self, usual: Precision) -> RunConfig:
        """Return the run with its own precision, or the `usual` one where it leaves that to the device."""
        chosen = self.train.precision != "auto"
        return self if chosen else replace(self, train=replace(self.train, precision=usual))

    def _with_config(self) -> RunConfig:
        if self.model.config is None:
            return self
        if not asked(self.model.config.exists):
            hint = "Give a config.json or a folder of transformers; for one on the hub, run hf download."
            raise ConfigError("model.config", str(self.model.config), "is not there", hint)
        place = self.model.config.resolve()
        if self.output.dir.resolve() in (place, *place.parents):
            why = "lies in output.dir, where a run moves and removes what earlier ones have left"
            hint = "Copy it elsewhere, or choose another output.dir."
            raise ConfigError("model.config", str(self.model.config), why, hint)
        if model_type_of(self.model.config) != QWEN3_MOE:
            from penstock.families import sections  # transformers takes seconds to load

            sizes = sections.sections_of(self.model.config)
            model, moe = self._sized("model", sizes["model"]), self._sized("moe", sizes["moe"])
            check_sections(self.model.config, sizes, model, moe)
            placement = moving_in(model.model_type, self.placement, self.data)
            return replace(self, model=model, moe=moe, placement=placement)
        sizes = sections_of(self.model.config)
        layers = sizes["model"]["moe_layers"]
        if layers is not None and self._is_set("model", "num_layers"):
            sizes["model"]["moe_layers"] = tuple(each for each in layers if each < self.model.num_layers)
        return replace(self, **{name: self._sized(name, sizes[name]) for name in sizes})

    def _with_preset(self, world_size: int) -> RunConfig:
        if self.model.preset is None:
            return self
        preset = PRESETS[self.model.preset]
        try:
            return replace(
                self,
                model=self._sized("model", sizes_of_preset(preset)),
                moe=self._sized("moe", experts_of_preset(preset, world_size)),
                data=self._sized("data", {"batch_per_device": preset.batch}),
            )
        except ConfigError as error:
            if preset.experts_per_device * world_size >= preset.top_k:
                raise  # not the number of ranks, but something that the user set beside the preset
            experts = f"{preset.experts_per_device * world_size} experts on {world_size} processes"
            least = -(-preset.top_k // preset.experts_per_device)
            why = f"has {experts}, and there {error}"
            hint = f"Start {least} processes or more (parallel.processes)."
            raise ConfigError("model.preset", self.model.preset, why.rstrip("."), hint) from None

    def _sized(self, section: str, sizes: Mapping[str, Any]) -> Any:
        """Return the section with `sizes` for every key that the user has not set."""
        open_sizes = {name: size for name, size in sizes.items() if not self._is_set(section, name)}
        return replace(getattr(self, section), **open_sizes)

    def _is_set(self, section: str, name: str) -> bool:
        """Tell whether the user set a key for this very model: a file may be one for any."""
        named = "model.preset" if self.model.config is None else "model.config"
        settings = getattr(self, section)
        now, usual = getattr(settings, name), getattr(type(settings), name)
        where, then = self.sources.get(f"{section}.{name}", (None, None))
        of_this = where is not None and where in (COMMAND_LINE, self.sources.get(named, (None,))[0])
        return bool(now != usual) or (of_this and now == then)


OF_A_RANK: Final = (
    "model.config",
    "data.path",
    "data.tokenizer",
    "data.cache",
    "output.dir",
    "parallel.processes",
    "parallel.send_buffer_bytes",
)
"""Settings that may differ between machines: locations, whose contents are compared instead, and two settings
that concern one machine alone."""

MIXTURE: Final = "data.mixture"
NOTHING: Final = "nothing of that name"
MOST_NAMED = 5
HINT = "Start all ranks with the same configuration file, overrides and version."


def resolved_for_all(config: RunConfig, control: Control) -> RunConfig:
    """Return the run with the sizes that follow from others and from files, the same on all ranks.

    Raises:
        ConfigError: On all ranks, for settings that differ or that one cannot use.
    """
    check_same_settings(config, control)
    resolved = control.agreed(lambda: config.resolved(control.world_size), "reading the settings")
    check_same_settings(resolved, control)  # files of one name may differ, and who set what
    return resolved


def check_same_settings(config: RunConfig, control: Control) -> None:
    """Raise ConfigError, the same on all ranks, naming a setting that differs between ranks.

    Costs one exchange of 64 bytes when all agree.
    """
    own = {key: value for key, value in by_key(RunConfig, to_dict(config)).items() if key not in OF_A_RANK}
    if config.data.mixture:  # the paths of texts, too, may differ between machines
        own[MIXTURE] = [weight for _, weight in config.data.mixture]
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    purpose = "comparing settings"
    if len(set(control.gather(digest, purpose))) == 1:
        return
    first, *others = control.gather(own, purpose)
    for rank, other in enumerate(others, start=1):
        different = [key for key in first | other if first.get(key, NOTHING) != other.get(key, NOTHING)]
        if different:
            key, *more = different
            why = f"is so on rank 0, and on rank {rank} it is {shown(other.get(key, NOTHING))}"
            if more:
                named = ", ".join(more[:MOST_NAMED]) + (", ..." if len(more) > MOST_NAMED else "")
                why += f" (also different: {named})"
            raise ConfigError(key, first.get(key, NOTHING), why, HINT)
