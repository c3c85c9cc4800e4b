"""Compute tasks of the model as the engine runs them, on all ranks at once: alone, and beside traffic.

Two layers run without a network (see `penstock.runtime.transport.silent`), cut in several ways, so that
every kind of task is seen at several sizes. What one layer costs, any other of its kind does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low

import numpy as np
import numpy.typing as npt
import torch

from penstock.autopilot.profiling.machine import here
from penstock.autopilot.profiling.sample import PURPOSE, Budget
from penstock.cost import ClusterConfig, ClusterFile, StepCost
from penstock.cost.cluster_file import Fit, TaskModel
from penstock.cost.fit import fit_line
from penstock.decision import ScheduleConfig
from penstock.graph import Phase, Task
from penstock.moe import MoEConfig
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.transport.load import Load
from penstock.runtime.transport.silent import silent
from penstock.schedule import StepPlan
from penstock.topology import Control
from penstock.train.assemble import build_stack, first_plan, workload
from penstock.train.config import RunConfig

MOST_ROUNDS = 12
SLACK = 1.25
"""How much more traffic is started than seems enough."""

COST_OF_A_ROUND = 3.6
"""Of rounds alone and beside traffic, two sequential steps and traffic that is too much, over one alone."""

PIECES = (1, 2, 4)
ALIKE = 1.05
"""Ranks that differ by no more than this are taken to be equally fast."""

Kind = tuple[str, Phase]
Seconds = npt.NDArray[np.float64]


def measure_tasks(
    config: RunConfig,
    machinery: Machinery,
    budget_s: float,
    file: ClusterFile,
    schedules: Sequence[ScheduleConfig] = (),
) -> ClusterFile:
    """The file with its compute tasks measured: lines over the work by its rates, of ranks of slowness 1.

    The same on all ranks, which must call this together. schedules: how steps are cut; none = in several
    ways, so that the lines hold for any.
    """
    budget = Budget(machinery.control, budget_s)
    sample = sample_of(config)
    stack = build_stack(sample, silent(machinery))
    try:
        runs = _Runs(sample, machinery, stack, schedules or cuts(sample))
        rounds = _rounds(runs, budget)
        slowness, alone = _apart(runs.measure(rounds))
        beside, slowed, cold = alone, 1.0, 1.0
        if machinery.layout.ep_size > 1 and machinery.device.type == "cpu":
            cold = _cold(runs, rounds, machinery)
            crowded, slowed = _beside(runs, rounds, machinery)
            beside = _divided(crowded, slowness)
    finally:
        stack.close()
    tasks = tuple(_behind_transfers(model, cold) for model in _models(runs, alone, beside, file.rates))
    found = replace(
        file,
        rates=_with_overhead(file.rates, tasks),
        tasks=tasks,
        transfers_beside_compute=slowed,
        jitter=_jitter(alone),
        slowness=slowness,
        measured=here(machinery.device),
    )
    return machinery.control.gather(found, "comparing measured tasks")[0]


def _with_overhead(rates: ClusterConfig, tasks: Iterable[TaskModel]) -> ClusterConfig:
    """The overhead of a task that was not measured: the least of one that was."""
    overheads = [task.alpha_s for task in tasks if task.alpha_s > 0]
    return replace(rates, task_overhead_s=min(overheads)) if overheads else rates


def sample_of(config: RunConfig) -> RunConfig:
    """The run with two layers, one of each kind that it has, and at least two samples to cut.

    Routing that depends on the data cannot be imitated without a network, so tokens are then dealt evenly
    into as many slots as there are choices.
    """
    model, batch = config.model, max(2, config.data.batch_per_device)
    dense = any(not model.is_moe(layer) for layer in range(model.num_layers))
    return replace(
        config,
        model=replace(model, preset=None, num_layers=2, moe_layers=(0,) if dense else None),
        moe=_imitable(config.moe),
        optimizer=replace(config.optimizer, sharded=False),  # tasks of the model are measured
        schedule=replace(config.schedule, name="sequential"),
        data=replace(config.data, batch_per_device=batch),
    )


def _imitable(moe: MoEConfig) -> MoEConfig:
    flat = replace(moe, dispatch="flat")
    if moe.order_name != "sort":
        return flat
    return replace(flat, order="index", capacity_factor=1.0, one_copy_per_rank=False)


def cuts(config: RunConfig) -> list[ScheduleConfig]:
    """Ways to cut a step: whole experts in several sizes, and experts whose weight gradients are apart."""
    pieces = [number for number in PIECES if number <= config.data.batch_per_device]
    usual = replace(
        config.schedule, chunks=None, backward_chunks=None, priority="critical_path", microbatches=1
    )
    whole = [replace(usual, name="flowmoe", microbatches=number) for number in pieces]
    return [
        *whole,
        replace(usual, name="penstock"),
        replace(usual, name="penstock", microbatches=2, chunks=2),
    ]


class _Runs:
    """Steps of one stack by several plans, and the durations of their compute tasks."""

    def __init__(
        self,
        config: RunConfig,
        machinery: Machinery,
        stack: PipelinedStack,
        schedules: Sequence[ScheduleConfig],
    ) -> None:
        self.config, self.machinery, self.stack = config, machinery, stack
        self.control: Control = machinery.control
        self.sequential = stack.plan
        gradients = stack.gradients.sizes_bytes
        plans: dict[tuple[Task, ...], StepPlan] = {}  # those that compute alike are run once
        for cut in schedules:
            plan = first_plan(replace(config, schedule=cut), machinery.layout, stack.base_shape, gradients)
            plans.setdefault(tuple(t for t in plan.graph.tasks if t.lane.computes), plan)
        self.tasks, self.plans = list(plans), [stack.adopt(plan) for plan in plans.values()]
        shape = (config.data.batch_per_device, config.model.seq_len)
        generator = torch.Generator().manual_seed(machinery.layout.dp_rank)
        numbers = torch.randint(config.model.vocab_size, (2, *shape), generator=generator)
        self.batch = tuple(numbers.to(machinery.device))

    def step(self, plan: StepPlan, stack: PipelinedStack | None = None) -> None:
        """All ranks start together. Gradients are dropped. stack: none = the one without a network."""
        stack = stack or self.stack
        stack.plan = plan
        self.control.barrier(PURPOSE)
        stack(*self.batch).backward()
        for parameter in stack.model.parameters():
            parameter.grad = None

    def computing_s(self, stack: PipelinedStack, rounds: int) -> float:
        """Computation of a sequential step of such a stack, median over ranks and rounds."""
        stack.adopt(self.sequential)
        found = []
        for number in range(rounds + 1):
            self.step(self.sequential, stack)
            records = stack.records()
            if number > 0:  # the first step allocates
                found.append(sum(r.duration_s for r in records if r.lane.computes))
        everyone = self.control.gather(found, "exchanging measured durations")
        return median(seconds for rank in everyone for seconds in rank)

    def measure(self, rounds: int) -> list[Seconds]:
        """For every plan the seconds of its compute tasks, [rank, round, task]."""
        mine: list[list[list[float]]] = [[] for _ in self.plans]
        for _ in range(rounds):
            for plan, tasks, found in zip(self.plans, self.tasks, mine, strict=True):
                self.step(plan)
                durations = {record.task: record.duration_s for record in self.stack.records()}
                found.append([durations[task] for task in tasks])
        everyone = self.control.gather([np.array(found) for found in mine], "exchanging measured durations")
        return [np.stack(found) for found in zip(*everyone, strict=True)]


def _rounds(runs: _Runs, budget: Budget) -> int:
    """How many fit. The first steps allocate and are not measured, only how long they took."""
    runs.step(runs.plans[0])
    start_s = time.perf_counter()
    for plan in runs.plans:
        runs.step(plan)
    round_s = max(runs.control.gather(time.perf_counter() - start_s, PURPOSE))
    return max(1, min(MOST_ROUNDS, int(budget.agree() / (COST_OF_A_ROUND * round_s))))


def _cold(runs: _Runs, rounds: int, machinery: Machinery) -> float:
    """How many times longer computation takes beside real transfers than without any.

    Transfers leave caches cold and wake other threads up. In a sequential step nothing runs beside them.
    """
    behind_s = runs.computing_s(build_stack(runs.config, machinery), rounds)
    return max(1.0, behind_s / runs.computing_s(runs.stack, rounds))


def _behind_transfers(model: TaskModel, cold: float) -> TaskModel:
    """A task as it runs in a step, where transfers went before it; beside one it is cold already."""
    beside = max(1.0, model.beside / cold)
    return replace(model, alpha_s=cold * model.alpha_s, scale=cold * model.scale, beside=beside)


def _beside(runs: _Runs, rounds: int, machinery: Machinery) -> tuple[list[Seconds], float]:
    """The same beside exchanges without a pause, and how many times longer those take."""
    start_s = time.perf_counter()
    runs.measure(1)
    round_s = max(runs.control.gather(time.perf_counter() - start_s, PURPOSE))
    load = Load(machinery.transports.inter, machinery.control)
    load.start(SLACK * rounds * round_s)
    times = runs.measure(rounds)
    return times, load.finish()


# ---- from durations to models ------------------------------------------------------------------------------


@dataclass
class _Kind:
    """What was seen of one op and phase: (work in seconds by the rates, seconds), and ratios of company."""

    points: list[tuple[float, float]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def model(self, op: str, phase: Phase) -> TaskModel:
        line = fit_line(self.points)
        return TaskModel(
            op=str(op),
            phase=str(phase),
            alpha_s=line.alpha_s,
            scale=line.beta,
            beside=max(1.0, median(self.ratios)),
            fit=Fit(r2=line.r2, residual=line.residual, points=tuple(sorted(self.points))),
        )


def _models(
    runs: _Runs, alone: list[Seconds], beside: list[Seconds], rates: ClusterConfig
) -> Iterable[TaskModel]:
    kinds: dict[Kind, _Kind] = defaultdict(_Kind)
    gradients = runs.stack.gradients.sizes_bytes
    sizes = workload(runs.config, runs.machinery.layout, gradients)
    for plan, tasks, alone_s, beside_s in zip(runs.plans, runs.tasks, alone, beside, strict=True):
        cost = StepCost(plan.shape, sizes, rates)
        for layer_tasks, nominal_s in _alike(tasks, cost, rates).values():
            task = tasks[layer_tasks[0]]
            typical_s = float(np.median(alone_s[:, :, layer_tasks]))
            kind = kinds[task.op, task.phase]
            kind.points.append((nominal_s, typical_s))
            kind.ratios.append(float(np.median(beside_s[:, :, layer_tasks])) / typical_s)
    return [kind.model(*which) for which, kind in kinds.items()]


def _alike(
    tasks: Sequence[Task], cost: StepCost, rates: ClusterConfig
) -> Mapping[tuple[int, str, Phase, float], tuple[list[int], float]]:
    """Numbers of the tasks of one layer, op, phase and size, and their work in seconds by the rates."""
    found: dict[tuple[int, str, Phase, float], tuple[list[int], float]] = {}
    for number, task in enumerate(tasks):
        nominal_s = rates.nominal_s(*cost.forward_work(task))
        key = (task.layer, task.op, task.phase, nominal_s)
        found.setdefault(key, ([], nominal_s))[0].append(number)
    return found


def _apart(times: list[Seconds]) -> tuple[tuple[float, ...], list[Seconds]]:
    """By rank how many times longer it computes than the median rank, and all times without that.

    Empty where ranks are alike; of an even number of ranks the faster of the middle two is the median.
    """
    per_rank = np.sum([np.median(seconds, axis=1).sum(axis=1) for seconds in times], axis=0)
    if per_rank.max() <= ALIKE * per_rank.min():
        return (), times
    slowness = tuple(float(ratio) for ratio in per_rank / median_low(per_rank))
    return slowness, _divided(times, slowness)


def _divided(times: list[Seconds], slowness: tuple[float, ...]) -> list[Seconds]:
    if not slowness:
        return times
    return [seconds / np.array(slowness)[:, None, None] for seconds in times]


def _jitter(times: list[Seconds]) -> float:
    """Median over tasks."""
    scatter = [seconds.std(axis=(0, 1)) / seconds.mean(axis=(0, 1)) for seconds in times]
    return float(np.median(np.concatenate(scatter)))
