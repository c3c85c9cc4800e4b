"""What the training loop asks of the code that decides how steps run, such as `penstock.autopilot`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from penstock.cost.model_flops import ModelFlops
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.moving import ExpertMoving
from penstock.schedule import StepPlan
from penstock.simulate import Timeline
from penstock.topology import Control
from penstock.trace import TaskRecord
from penstock.train.config import RunConfig
from penstock.train.resume import Resumption, Say


@dataclass(frozen=True)
class Forecast:
    """What the plan in use makes one expect of a step. source: what it is made of, in words."""

    source: str
    timeline: Timeline


class Pilot(Protocol):
    """Decides by which plan steps run. Made before the model, it takes that over before the first step."""

    @property
    def config(self) -> RunConfig:
        """The run as it is now: sections [schedule] and [moe] say what the plan has chosen."""

    @property
    def plan(self) -> StepPlan:
        """The plan in use."""

    @property
    def moving(self) -> ExpertMoving | None:
        """How the guests of the next step are planned; None where experts stay."""

    @property
    def settled(self) -> bool:
        """Whether the plan is final, until something changes."""

    @property
    def all_reduce_chunk_bytes(self) -> int | None:
        """The size of all-reduce chunks; None for a schedule without chunks."""

    @property
    def flops(self) -> ModelFlops:
        """What the model asks of the devices, and what they were measured to do."""

    def forecast(self) -> Forecast:
        """What is expected of a step under the plan in use."""

    def take_over(self, stack: PipelinedStack) -> None:
        """Steer this stack from now on. It was built with `plan`."""

    def after_step(self, slowest_s: float, records: Sequence[TaskRecord]) -> bool:
        """Perhaps adopt another plan; returns whether it did. All ranks call it after the same steps.

        slowest_s: how long the step took on the slowest rank. records: of this rank.
        """

    def save(self, folder: Path) -> None:
        """Write the plan, and the cluster it was made for, into a folder; for one rank."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that have met, before anything says who shares what. node_size: see `Layout`."""

    control: Control
    device: torch.device
    node_size: int


class MakePilot(Protocol):
    """Makes pilots. All ranks call both, with a resolved configuration."""

    def layout(
        self, config: RunConfig, ranks: Ranks, resumption: Resumption | None, say: Say, /
    ) -> RunConfig:
        """The run with which ranks share what, where its configuration leaves that open."""

    def __call__(
        self, config: RunConfig, machinery: Machinery, resumption: Resumption | None, say: Say, /
    ) -> Pilot:
        """Make the first plan, or go on with a checkpoint's."""
