"""Runs on two ranks that plan for themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.cost import ClusterFile
from penstock.trace import TaskRecord
from penstock.train.trainer import Trainer
from tests.support.ranks import Pools
from tests.support.training import Told, Watcher, pretend, train_on

RANKS = 2
TASK_S, STEP_S = 1e-3, 0.1
"""What tasks and steps take on a pretended clock."""

SLOW = 4.0
"""How many times as long they take where something is slow."""


def run(
    ranks: Pools,
    folder: Path,
    *overrides: str,
    on_step: Watcher | None = None,
    before: Callable[[Trainer], None] | None = None,
) -> list[Told]:
    """A run of 8 steps unless told otherwise; its learning rate does not depend on their number."""
    usual = ["train.steps=8", "optimizer.min_lr_ratio=1.0"]
    return ranks(RANKS).run(train_on, RANKS, folder, [*usual, *overrides], on_step, before)


def slow_rank(trainer: Trainer, after: int) -> None:
    """Rank 1 computes slowly after a step, and steps take longer there."""

    def factor(step: int) -> float:
        return SLOW if trainer.layout.rank == 1 and step > after else 1.0

    def task_s(record: TaskRecord) -> float:
        return TASK_S * (factor(record.step) if record.lane.computes else 1.0)

    pretend(trainer, task_s, lambda step: STEP_S * factor(step))


def auto(folder: Path) -> tuple[str, ...]:
    """Settings of a run that plans for the cluster file in its folder."""
    return "plan.mode=auto", f"plan.cluster={folder / 'cluster.json'}"


def on_slow_devices(folder: Path) -> None:
    """Make the cluster file in a folder that of devices so slow that a slightly busier rank counts."""
    file = ClusterFile.read(folder / "cluster.json")
    replace(file, rates=replace(file.rates, flops_per_s=1e6), tasks=()).save(folder / "cluster.json")
