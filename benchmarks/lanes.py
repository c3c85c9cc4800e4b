"""FSMoE with traffic inside nodes and between them at once, beside the same schedule with both on one lane.

`fsmoe_one_lane` is here to be compared with, and no plan takes it: the step of `fsmoe`, task by task, with a
pass that moves what stays inside a node to the lane of what does not. What `fsmoe` gains over it is what two
networks at the same time are worth (Section 4.3 of the paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from benchmarks.command import run_on_ranks
from benchmarks.progress import BOARD
from penstock.bench import BenchConfig, BenchResult
from penstock.bench.compare import compare
from penstock.bench.field import schedules_field
from penstock.bench.summarise import summarise
from penstock.bench.table import render
from penstock.config import ConfigError
from penstock.decision import Decision, GradientBytes
from penstock.emulate import EmulateConfig
from penstock.graph import Graph, Lane, Task
from penstock.graph.paths import path_ends
from penstock.mesh import stays_inside
from penstock.schedule import Schedule, register_schedule
from penstock.schedule.freeze import Cost, slowest
from penstock.schedule.fsmoe import FSMoE
from penstock.schedule.system import is_all_reduce
from penstock.step import Stage, StepShape
from penstock.topology import Layout

TWO_LANES: Final = FSMoE.name


@dataclass(frozen=True)
class OneLane:
    """before  intra ─ XG.c0 ─ XG.c1      after  inter ─ D.c0 ─ XG.c0 ─ D.c1 ─ XG.c1
    inter ─ D.c0 ─ D.c1
    """

    name = "one_lane"
    stage = Stage.SETTLE

    def __call__(self, graph: Graph) -> Graph:
        """Only lanes change: edges and groups stay."""
        return Graph.of(_on(Lane.INTER, task) if task.lane is Lane.INTRA else task for task in graph.tasks)


class OneLaneFSMoE(FSMoE):
    """FSMoE whose two communication lanes are one, in the order in which their tasks would start on two.

    A reduction keeps its place before the transfer that follows it, since alone on its lane it would start as
    soon as that is idle, and here hold up what experts wait for.
    """

    name = f"{TWO_LANES}_one_lane"

    def shape(self, shape: StepShape, choice: Decision, gradients: GradientBytes) -> StepShape:
        found = super().shape(shape, choice, gradients)
        return replace(found, more=(*found.more, OneLane()))

    def order(self, graph: Graph, cost: Cost, choice: Decision) -> Schedule:
        wide = Graph.of(_on(Lane.INTRA, task) if _stays(task) else task for task in graph.tasks)
        two = super().order(wide, cost, choice)
        start_s = _starts(two, wide, cost)
        sends = [wide.position[task] for lane in (Lane.INTRA, Lane.INTER) for task in two.lanes[lane]]
        merged = sorted(
            sends, key=start_s.__getitem__
        )  # of two that start at once, the one in the node first
        computed = two.lanes[Lane.COMPUTE]
        sent = tuple(graph.tasks[i] for i in merged)
        return Schedule(self.name, {Lane.COMPUTE: computed, Lane.INTER: sent})


def _stays(task: Task) -> bool:
    return not task.lane.computes and stays_inside(task.axes)


def _on(lane: Lane, task: Task) -> Task:
    return replace(task, lane=lane)


def _starts(two: Schedule, wide: Graph, cost: Cost) -> Sequence[float]:
    """When tasks start on two lanes, by position, to the nanosecond; reductions with the next transfer."""
    seconds = [slowest(cost(task)) for task in wide.tasks]
    ends_s = path_ends(two.places(wide), wide.links, seconds)
    start_s = [round(end_s - own_s, 9) for end_s, own_s in zip(ends_s, seconds, strict=True)]
    next_s = inf
    for task in reversed(two.lanes[Lane.INTER]):
        position = wide.position[task]
        if is_all_reduce(task):
            start_s[position] = next_s
        next_s = start_s[position]
    return start_s


def measure(config: BenchConfig, layout: Layout, emulate: EmulateConfig | None) -> BenchResult:
    """As one of the ranks. Raises ConfigError where ranks share nothing: no traffic stays inside nodes."""
    if config.parallel.mp_size == config.parallel.esp_size == 1:
        why = "no ranks share attention or experts, and fsmoe sends nothing inside nodes"
        raise ConfigError("parallel.mp_size", 1, why, "Set parallel.mp_size=2 parallel.esp_size=2.")
    names = (OneLaneFSMoE.name, TWO_LANES)
    field = schedules_field(
        replace(config, compare=replace(config.compare, schedules=names)), layout, BOARD.say
    )
    found = compare(field, config.compare, BOARD.say)
    field.close()
    if emulate is None:
        result = summarise(found, nodes=1, devices=layout.world_size, inter_rate_bit_per_s=None)
    else:
        result = summarise(
            found,
            nodes=emulate.nodes,
            devices=emulate.devices,
            inter_rate_bit_per_s=emulate.inter_rate_bit_per_s,
            intra_rate_bit_per_s=emulate.intra_rate_bit_per_s,
        )
    return replace(result, notes=(gain(result),))


def gain(result: BenchResult) -> str:
    """How many times as fast two lanes are, measured and simulated."""
    one, two = result.cases
    found = two.speedup
    text = f"two lanes over one: measured {found.median:.3f} [{found.low:.3f}, {found.high:.3f}]"
    assert one.simulated_s is not None and two.simulated_s is not None, "both are predicted"
    return f"{text}, simulated {one.simulated_s / two.simulated_s:.3f}"


if __name__ == "__main__":
    register_schedule(OneLaneFSMoE())
    run_on_ranks(
        "lanes",
        "Measures what traffic inside nodes and between them at the same time is worth to FSMoE.",
        "--emulate 2x2 --inter-rate 400mbit parallel.mp_size=2 parallel.esp_size=2 schedule.chunks=2",
        measure,
        render,
    )
