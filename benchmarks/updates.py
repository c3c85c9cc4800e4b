"""Whole iterations: forward, backward, sums of gradients, clipping and update, plain and by shares, in turns.

An iteration of the sharded optimiser gathers at its beginning what the one before has updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from benchmarks.command import run_on_ranks
from benchmarks.layer.measure import Band, in_turns, quiet_process, timed
from benchmarks.progress import BOARD
from penstock.autotune.problem import run_problem
from penstock.autotune.profile import profile_run
from penstock.cost import ClusterFile
from penstock.decision import ScheduleConfig
from penstock.lab.bench import BenchConfig
from penstock.lab.bench.scheduled import batch_of, run_config_of
from penstock.lab.bench.table import markdown_table
from penstock.lab.emulate import EmulateConfig
from penstock.moe.build import dispatch_of
from penstock.plan import evaluate
from penstock.plan.predict import closing_s
from penstock.runtime import Machinery, PipelinedStack, ShardedAdamW
from penstock.topology import Layout
from penstock.trace import occupation
from penstock.train.assemble import build_machinery, build_optimizer, build_stack
from penstock.train.config import RunConfig
from penstock.train.logs import telling
from penstock.train.optimizer import Update, build_update

PLAIN, SHARDED = "AdamW", "sharded"
MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Way:
    """One row. Seconds of whole iterations; ratio: of the first row's, round by round; exposed_s: of the last
    one, communication on this rank under which nothing was computed; moments_bytes: of AdamW on this rank."""

    name: str
    predicted_s: float
    step_s: Band
    ratio: Band
    exposed_s: float
    moments_bytes: int


@dataclass(frozen=True, kw_only=True)
class UpdatesResult:
    """All rows."""

    ranks: int
    rounds: int
    ways: tuple[Way, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"updates": asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Running:
    """A stack with its optimiser."""

    stack: PipelinedStack
    update: Update
    batch: tuple[torch.Tensor, torch.Tensor]
    predicted_s: float

    def iterate(self) -> None:
        """One whole iteration."""
        self.update.backward(self.stack(*self.batch), 1)
        self.update.apply(accepted=True)

    @property
    def moments_bytes(self) -> int:
        """What the optimiser keeps here."""
        optimizer = self.update.optimizer
        if isinstance(optimizer, ShardedAdamW):
            return optimizer.updates.state_bytes
        states = optimizer.state.values()
        return sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq"))


def running(
    config: RunConfig, machinery: Machinery, file: ClusterFile, batch: tuple[torch.Tensor, torch.Tensor]
) -> Running:
    """The plan of section [schedule] by what was measured."""
    problem = run_problem(config, machinery.layout, file)
    found = evaluate(problem, config.schedule.decision(dispatch_of(config.moe)))
    stack = build_stack(config, machinery, plan=found.plan)
    update = build_update(stack, build_optimizer(stack, config.optimizer), config.optimizer)
    predicted_s = found.predicted_s + closing_s(problem)
    return Running(stack=stack, update=update, batch=batch, predicted_s=predicted_s)


def measure(config: BenchConfig, layout: Layout, emulate: EmulateConfig | None) -> UpdatesResult:
    """As one of the ranks: every schedule of [compare] with both optimisers."""
    del emulate
    base, rounds = run_config_of(config), config.compare.rounds
    machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
    with telling(BOARD.say):
        file = profile_run(base, machinery, budget_s=config.compare.profile_s)
    batch = batch_of(config, layout)
    ways = {
        f"{name}, {kind}": running(_with(base, name, kind), machinery, file, batch)
        for name in config.compare.schedules
        for kind in (PLAIN, SHARDED)
    }

    def result(times_s: Mapping[str, list[float]]) -> UpdatesResult:
        found = tuple(_way(name, ways, times_s) for name in ways)
        done = len(times_s[next(iter(ways))])
        return UpdatesResult(ranks=layout.world_size, rounds=done, ways=found)

    with quiet_process():
        calls = {name: partial(timed, way.iterate) for name, way in ways.items()}
        found = result(in_turns(calls, rounds, config.compare.warmup, result))
    for way in ways.values():
        way.stack.close()
    return found


def _with(config: RunConfig, name: str, kind: str) -> RunConfig:
    said = {
        key: getattr(config.schedule, key) for key in ("microbatches", "all_reduce_chunk_bytes", "chunks")
    }
    optimizer = replace(config.optimizer, zero_stage=1 if kind == SHARDED else 0)
    return replace(config, schedule=ScheduleConfig(name=name, **said), optimizer=optimizer)


def _way(name: str, ways: Mapping[str, Running], times_s: Mapping[str, list[float]]) -> Way:
    way, first = ways[name], next(iter(times_s.values()))
    return Way(
        name=name,
        predicted_s=way.predicted_s,
        step_s=Band.of(times_s[name]),
        ratio=Band.of_ratios(first, times_s[name]),
        exposed_s=occupation(way.stack.records()).exposed_s,
        moments_bytes=way.moments_bytes,
    )


def render(result: UpdatesResult) -> str:
    """A table in Markdown."""
    titles = ["", "iteration ms", "predicted ms", "speed of the first", "exposed ms", "moments MiB"]
    rows = [
        [
            way.name,
            _band(way.step_s, 1e3, 0),
            f"{1e3 * way.predicted_s:.0f}",
            _band(way.ratio, 1.0, 2),
            f"{1e3 * way.exposed_s:.0f}",
            f"{way.moments_bytes / MIB:.1f}",
        ]
        for way in result.ways
    ]
    head = f"{result.ranks} ranks, {result.rounds} rounds, in turns; median [10 %, 90 %] of whole iterations"
    return "\n".join([head, "", *markdown_table([titles, *rows])])


def _band(band: Band, scale: float, digits: int) -> str:
    low, median, high = (f"{scale * value:.{digits}f}" for value in (band.low, band.median, band.high))
    return f"{median} [{low}, {high}]"


if __name__ == "__main__":
    run_on_ranks(
        "updates",
        "Measures whole iterations, updates included, with AdamW and with its sharded form.",
        '--emulate 2x1 --inter-rate 400mbit compare.schedules=\'["sequential", "penstock"]\'',
        measure,
        render,
    )
