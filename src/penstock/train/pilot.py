"""What the training loop requires of the code that decides how steps run, such as `penstock.autotune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from penstock.checkpoint.folder import Record
from penstock.cost.model_flops import ModelFlops
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.features.expert_replicas.manager import ExpertMoving
from penstock.schedule import StepPlan
from penstock.timing import Timeline
from penstock.topology import Control
from penstock.trace import TaskRecord
from penstock.train.config import RunConfig


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

    def forecast(self) -> Forecast | None:
        """Return the prediction of a step under the plan in use; None if the cluster's rates are unknown."""

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
