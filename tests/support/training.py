"""Training runs on the ranks of a pool: what they said, what they ran, and how they ended."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from penstock.autotune import Autotuner
from penstock.config import ConfigError, load
from penstock.cost import ClusterFile
from penstock.report import RunSummary
from penstock.topology import ProcessInfo
from penstock.trace import TaskRecord
from penstock.train.config import RunConfig
from penstock.train.logs import telling
from penstock.train.trainer import Trainer
from tests.support.runs import write_config

Watcher = Callable[[Trainer, int], None]
"""Told of every step that has ended, on every rank."""


@dataclass
class Told:
    """What a rank has to say about its run. plans: digest of the schedule by step, from step 1 on.

    logged: what its log would have, screen included. refused: key and text of the ConfigError that ended it.
    """

    summary: RunSummary | None = None
    said: str = ""
    logged: str = ""
    plans: list[str] = field(default_factory=list)
    refused: tuple[str, str] | None = None


def write_cluster(folder: Path, ranks: int) -> Path:
    """A cluster file by hand: rates and no measurement."""
    path = folder / "cluster.json"
    ClusterFile(name="by hand", nodes=1, ranks_per_node=ranks).save(path)
    return path


def train_on(
    rank: int,
    world_size: int,
    folder: Path,
    overrides: list[str],
    on_step: Watcher | None,
    before: Callable[[Trainer], None] | None = None,
) -> Told:
    """This rank's part of a run in `folder/run`; for RankPool.run.

    on_step: told of every step. before: told of the trainer before it runs.
    """
    told, stderr, log = Told(), io.StringIO(), list[str]()
    config = load(RunConfig, folder / "tiny.toml", [f"parallel.processes={world_size}", *overrides])
    info = ProcessInfo(rank=rank, world_size=world_size, local_rank=rank, launcher="penstock")

    def note(step: int, statistics: object) -> None:
        del statistics
        told.plans.append(trainer.stack.plan.schedule.digest)
        if on_step is not None:
            on_step(trainer, step)

    with redirect_stderr(stderr), telling(log.append):
        try:
            trainer = Trainer(config, info, torch.device("cpu"), Autotuner, quiet=False, on_step=note)
            if before is not None:
                before(trainer)
            told.summary = trainer.run()
        except ConfigError as error:
            told.refused = error.key, str(error)
    told.said, told.logged = stderr.getvalue(), "\n".join(log)
    return told


def folder_of(parent: Path, name: str, ranks: int) -> Path:
    """A folder with a configuration, its text and a cluster file."""
    folder = parent / name
    folder.mkdir()
    write_config(folder)
    write_cluster(folder, ranks)
    return folder


def pretend(
    trainer: Trainer, seconds_of: Callable[[TaskRecord], float], step_s: Callable[[int], float]
) -> None:
    """Tasks and whole steps of this rank take what these say, on any machine; `step_s` gets the step."""
    stack, run_step = trainer.stack, trainer._step
    records = stack.records

    def pretended(step: int = 0) -> list[TaskRecord]:
        return [replace(each, end_s=each.start_s + seconds_of(each)) for each in records(step)]

    stack.records = pretended  # type: ignore[method-assign]
    trainer._step = lambda step: replace(run_step(step), iteration_s=step_s(step + 1))  # type: ignore[method-assign]
