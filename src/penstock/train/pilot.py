"""What the training loop is given: a pilot, such as `penstock.autotune`, for how steps run, and a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from penstock.checkpoint.folder import Record
from penstock.cost.model_flops import ModelFlops
from penstock.models.qwen3_moe import CONFIG, config_json, lack_of
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.features.expert_replicas.manager import ExpertMoving
from penstock.schedule import StepPlan
from penstock.timing import Timeline
from penstock.topology import Control
from penstock.trace import TaskRecord
from penstock.train.assemble import build_stack
from penstock.train.config import RunConfig
from penstock.train.run_state import DecoderNaming, Naming


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A checkpoint that is whole and of a run like this one.

    Attributes:
        older: Earlier checkpoints, the newest first.
        damaged: Later checkpoints, which could not be used.
    """

    path: Path
    record: Record
    older: tuple[Path, ...]
    damaged: tuple[Path, ...]


@dataclass(frozen=True)
class Forecast:
    """What is expected of a step under the plan in use.

    Attributes:
        source: What the forecast is made from, in words.
        timeline: The simulated step.
    """

    source: str
    timeline: Timeline


class Pilot(Protocol):
    """Decides by which plan steps run. It is made before the model, which it takes over before any step."""

    @property
    def config(self) -> RunConfig:
        """The run as it is now: sections [schedule] and [moe] say what the plan has chosen."""

    @property
    def plan(self) -> StepPlan:
        """The plan in use."""

    @property
    def moving(self) -> ExpertMoving | None:
        """How the replicas of the next step are planned; None where experts stay."""

    @property
    def settled(self) -> bool:
        """Whether the plan is final, until something changes."""

    @property
    def reads_records(self) -> bool:
        """Whether `after_step` of the next step needs records."""

    @property
    def all_reduce_chunk_bytes(self) -> int | None:
        """The size of all-reduce chunks; None for a schedule without chunks."""

    @property
    def flops(self) -> ModelFlops:
        """Floating-point operations that the model requires, and the peak of the devices."""

    def forecast(self) -> Forecast:
        """Return what is expected of a step under the plan in use."""

    def take_over(self, stack: PipelinedStack) -> None:
        """Steer this stack, which was built with `plan`, from now on."""

    def after_step(self, slowest_s: float, records: Sequence[TaskRecord]) -> bool:
        """Adopt another plan if it is better; return whether it did. All ranks call it after the same steps.

        Args:
            slowest_s: Seconds of the step on the slowest rank.
            records: This rank's records of the step; on a GPU [] for a step that was not timed.
        """

    def save(self, folder: Path) -> None:
        """Write the plan, and the cluster for which it was made, into a folder, on one rank."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that have met, before it is known which ranks share what.

    Attributes:
        node_size: Consecutive ranks in one node, see `Layout`.
    """

    control: Control
    device: torch.device
    node_size: int


class MakePilot(Protocol):
    """Makes pilots. All ranks call both methods, with a resolved configuration."""

    def layout(self, config: RunConfig, ranks: Ranks, resumption: Resumption | None, /) -> RunConfig:
        """Return the run with a layout, decided where its configuration leaves it open."""

    def __call__(self, config: RunConfig, machinery: Machinery, resumption: Resumption | None, /) -> Pilot:
        """Make the first plan, or continue with a checkpoint's."""


# ---- the model ---------------------------------------------------------------------------------------------


Files = Mapping[str, Mapping[str, Any]]
"""JSON files by which transformers knows a model, by name; none where it knows no such model."""


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """The model of a run.

    Attributes:
        stack: The stack that runs its steps.
        naming: Returns how checkpoints name the tensors of the model.
        files: Returns, for the sha256 of the tokenizer of the run's text, the JSON files of a checkpoint that
            make it a folder of transformers.
        repeats_late: Whether a step may be found only after its backward pass to have to run again, which
            spares a GPU's host a wait.
    """

    stack: PipelinedStack
    naming: Callable[[nn.Module], Naming]
    files: Callable[[str | None], Files]
    repeats_late: bool


MakeModel = Callable[..., RunModel]
"""Builds the model of a run, with its first plan, as `decoder_of` does; all ranks call it together."""


def decoder_of(
    config: RunConfig,
    machinery: Machinery,
    *,
    plan: StepPlan | None,
    moving: ExpertMoving | None,
    begins: bool,
) -> RunModel:
    """Return Penstock's own decoder as the model of a run.

    Args:
        plan, moving, begins: As for `build_stack`.
    """

    def files(tokenizer: str | None) -> Files:
        if lack_of(config.moe) is not None:
            return {}
        like = config.model.config
        return {CONFIG: config_json(config.model, config.moe, tokenizer_digest=tokenizer, like=like)}

    stack = build_stack(config, machinery, plan=plan, moving=moving, begins=begins)
    return RunModel(stack=stack, naming=DecoderNaming, files=files, repeats_late=True)
