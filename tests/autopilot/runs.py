"""Runs on two ranks that plan for themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.cost import ClusterFile
from tests.support.ranks import Pools
from tests.support.training import Told, Watcher, train_on

RANKS = 2
SLOW_S = 0.15


def run(ranks: Pools, folder: Path, *overrides: str, on_step: Watcher | None = None) -> list[Told]:
    """A run of 8 steps unless told otherwise; its learning rate does not depend on their number."""
    usual = ["train.steps=8", "optimizer.min_lr_ratio=1.0"]
    return ranks(RANKS).run(train_on, RANKS, folder, [*usual, *overrides], on_step)


def auto(folder: Path) -> tuple[str, ...]:
    """Settings of a run that plans for the cluster file in its folder."""
    return "plan.source=auto", f"plan.cluster={folder / 'cluster.json'}"


def on_slow_devices(folder: Path) -> None:
    """Make the cluster file in a folder that of devices so slow that a slightly busier rank counts."""
    file = ClusterFile.read(folder / "cluster.json")
    replace(file, rates=replace(file.rates, flops_per_s=1e6), tasks=()).save(folder / "cluster.json")
