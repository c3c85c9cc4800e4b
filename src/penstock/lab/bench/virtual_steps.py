"""Real steps of virtual devices: the time of transfers, and the error of predictions.

Virtual devices sleep instead of computing, so nothing is learnt of computation here, and it slows no transfer
down. Bytes are real, and many ranks share few cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from penstock.autotune.profile.sample import PURPOSE, Budget
from penstock.autotune.profile.steps import (
    TRANSFER,
    Fits,
    Watched,
    transferred,
    with_transfers,
    with_whole_steps,
)
from penstock.autotune.profile.tasks import two_layers
from penstock.cost import ClusterFile, ProfiledCluster
from penstock.decision import Decision, PlacementConfig
from penstock.lab.bench.scheduled import timed
from penstock.lab.virtual import VirtualConfig, VirtualStack, build_virtual
from penstock.runtime import Machinery
from penstock.schedule import StepPlan
from penstock.timing import Cost, iteration_s
from penstock.train.assemble import base_shape, first_plan
from penstock.train.config import RunConfig

SCHEDULES: Final = (("sequential", 1), ("flowmoe", 2))
"""Schedules with their number of microbatches: one without overlap, and one with much."""

LEAST_ROUNDS, MOST_ROUNDS = 2, 5
BUDGET_S: Final = 10.0


def with_virtual_steps(
    config: RunConfig, virtual: VirtualConfig, machinery: Machinery, file: ClusterFile, budget_s: float
) -> ClusterFile:
    """Return the file with what steps of two layers on these devices tell of its links and of whole steps.

    budget_s: seconds of these steps, of which `BUDGET_S` are used at most and some steps are run in any case.
    All ranks call it together and get the same file.
    """
    recorded = virtual.routing == "recorded"  # recorded routing is that of all layers
    model = config.model if recorded else two_layers(config.model)
    sample = replace(config, model=model, placement=PlacementConfig())
    stack = build_virtual(sample, virtual, machinery)
    plans = [stack.adopt(plan) for plan in _plans(sample, stack)]
    stack.links = ProfiledCluster.build(file)
    watched = _watch(stack, plans, min(BUDGET_S, budget_s))
    seen = transferred(watched, lambda each: _cost(stack, each.plan, file), stack.workload)
    found = Fits(TRANSFER, {kind: [replace(x, share=0.0) for x in each] for kind, each in seen.items()})
    file = with_transfers(replace(file, doubts=tuple(found.doubts)), found)
    meets = stack.machinery.layout.mesh
    expected = [
        iteration_s(each.plan.schedule, each.plan.graph, _cost(stack, each.plan, file), meets)
        for each in watched
    ]
    file = with_whole_steps(file, watched, expected)
    return machinery.control.gather(file, "comparing what steps say")[0]


def _plans(config: RunConfig, stack: VirtualStack) -> Iterator[StepPlan]:
    for name, microbatches in SCHEDULES:
        pieces = min(microbatches, config.data.batch_per_device)
        cut = replace(config.schedule, name=name, microbatches=pieces, chunks=None, backward_chunks=None)
        run, layout = replace(config, schedule=cut), stack.machinery.layout
        yield first_plan(run, layout, base_shape(run, layout), stack.bucket_sizes)


def _cost(stack: VirtualStack, plan: StepPlan, file: ClusterFile) -> Cost:
    """Return the cost of the first step's tasks, as the simulator has it."""
    stack.use(plan, stack.placement)
    return replace(stack.cost(0), cluster=ProfiledCluster.build(file))


def _watch(stack: VirtualStack, plans: list[StepPlan], budget_s: float) -> list[Watched]:
    """Run some steps of all plans in turns, after one that opens connections."""
    control, budget = stack.machinery.control, Budget(stack.machinery.control, budget_s)
    noted: list[list[tuple[float, list[list[float]]]]] = [[] for _ in plans]
    for number in range(1 + MOST_ROUNDS):
        if number > 1 and budget.agree() <= 0 and (number > LEAST_ROUNDS or budget.late):
            break
        for plan, steps in zip(plans, noted, strict=True):
            stack.use(plan, stack.placement)
            stack.prepare(0)
            control.barrier(PURPOSE)
            seconds = timed(stack.step, 0)
            spans = {record.task: [record.start_s, record.end_s] for record in stack.records()}
            if number:
                steps.append((seconds, [spans[task] for task in plan.graph.tasks]))
    everyone = control.gather(noted, "exchanging the times of steps")
    return [_watched(plan, [rank[n] for rank in everyone]) for n, plan in enumerate(plans)]


def _watched(plan: StepPlan, everyone: list[list[tuple[float, list[list[float]]]]]) -> Watched:
    spans_KRT2 = np.array([[spans for _, spans in steps] for steps in everyone])
    return Watched(
        plan=plan,
        choice=Decision(),
        spans_KRT2=spans_KRT2,
        quiet_KRT=spans_KRT2[..., 1] - spans_KRT2[..., 0],
        iterations_R=np.array([[seconds for seconds, _ in steps] for steps in everyone]).max(axis=0),
    )
