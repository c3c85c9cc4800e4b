"""Measures compute tasks of the model as the engine runs them, on all ranks at once, and in real steps.

Two layers run without a network (see `penstock.runtime.machinery`), cut in several ways, so that every
kind of task is seen at several sizes. All layers of a kind are assumed to cost the same. Updates are measured
before, on the same layers' parameters.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np
import torch

from penstock.autotune.problem import run_problem
from penstock.autotune.profile.kernels import measure_updates
from penstock.autotune.profile.sample import PURPOSE, Budget, Limits, fitted, here
from penstock.autotune.profile.steps import RealSteps, with_steps, worth_running
from penstock.cost import ClusterConfig, ClusterFile, StepCost, Workload
from penstock.cost.cluster_file import TaskModel
from penstock.cost.fit import fit_line
from penstock.cost.measured import OVERRAN
from penstock.decision import Decision, PlacementConfig, ScheduleConfig
from penstock.device import device_of
from penstock.graph import Phase, Task
from penstock.mesh import Seconds
from penstock.models import ModelConfig
from penstock.models.config import QWEN3_MOE
from penstock.ops import OPS
from penstock.plan import Problem
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.machinery import silent
from penstock.schedule import StepPlan
from penstock.topology import Control
from penstock.trace import TaskRecord
from penstock.train.assemble import build_stack, first_plan, workload
from penstock.train.config import RunConfig

logger = logging.getLogger(__name__)

LEAST_ROUNDS, MOST_ROUNDS = 2, 12
PIECES = (1, 2, 4)
ALIKE = 1.05
"""Ranks whose times differ by no more than this factor are taken to be equally fast."""

Kind = tuple[str, Phase]


def measure_tasks(
    config: RunConfig,
    machinery: Machinery,
    budget_s: float,
    file: ClusterFile,
    schedules: Sequence[ScheduleConfig] = (),
    *,
    limits: Limits,
    dtype: torch.dtype = torch.float32,
) -> ClusterFile:
    """Return the file with its compute tasks measured, and what real steps tell about tasks and links.

    Tasks are lines over the work by the file's rates, of ranks of slowness 1. The result is the same on all
    ranks, which must call this together. Where the budget is `late` the file has what was measured by then,
    and says so among its doubts.

    Args:
        schedules: How steps are cut; none = in several ways, so that the lines hold for any.
        limits: What else ends measuring.
        dtype: Type of the model's parameters.
    """
    budget = Budget(machinery.control, budget_s, limits)
    sample = sample_of(config)
    stack = build_stack(sample, silent(machinery), dtype)
    try:
        updates = measure_updates(
            list(stack.model.parameters()), config.optimizer, file.rates, budget, machinery.device
        )
        runs = _Runs(sample, machinery, dtype, stack, list(schedules) or cuts(sample))
        slowness, alone = _apart(runs.measure(_rounds(runs, budget), budget))
    finally:
        stack.close()
    slowest = max(slowness, default=1.0)  # for which updates were timed
    updates = tuple(replace(x, alpha_s=x.alpha_s / slowest, scale=x.scale / slowest) for x in updates)
    tasks = (*_models(runs, alone, file.rates), *updates)
    overheads = [task.alpha_s for task in tasks if task.alpha_s > 0]
    rates = file.rates.measured(task_overhead_s=min(overheads)) if overheads else file.rates
    scatter = [seconds.std(axis=(0, 1)) / seconds.mean(axis=(0, 1)) for seconds in alone]
    measured = replace(
        file,
        rates=_with_issuing(rates, stack.machinery.lanes.issued_s),
        tasks=tasks,
        jitter=float(np.median(np.concatenate(scatter))),
        slowness=slowness,
        measured=here(machinery.device),
    )
    if runs.real is not None and (steps := runs.real.gathered()):
        measured = with_steps(measured, steps, runs.problem)
    if budget.limits.overran:
        measured = replace(measured, doubts=(OVERRAN, *measured.doubts))
    return machinery.control.gather(measured, "comparing measured tasks")[0]


def _with_issuing(rates: ClusterConfig, issued_s: Mapping[Task, float]) -> ClusterConfig:
    """Return the rates with the host's time for each task and each of its operations, if one thread has it.

    Of an op the median counts. A first transfer after counts also waits for the device, so the line follows
    what most ops agree on.
    """
    by_op = defaultdict[str, list[float]](list)
    for task, seconds in issued_s.items():
        by_op[task.op].append(seconds)
    if not by_op:
        return rates
    line = fit_line([(OPS[op].launches, median_low(durations)) for op, durations in by_op.items()])
    return rates.measured(issue_task_s=line.alpha_s, issue_kernel_s=line.beta)


def sample_of(config: RunConfig) -> RunConfig:
    """Return the run with two layers, one of each kind that it has, and at least two samples to cut.

    Routing that depends on the data cannot be imitated without a network, so tokens are then dealt evenly
    into as many slots as there are choices, and neither samples nor experts move.
    """
    moe = replace(config.moe, dispatch="flat")
    if moe.permutation_name == "sort":
        moe = replace(
            moe, permutation="index", capacity_factor=1.0, bound_factor=None, one_copy_per_rank=False
        )
    return replace(
        config,
        placement=PlacementConfig(),
        model=two_layers(config.model),
        moe=moe,
        optimizer=config.optimizer.settled(sharded=False),  # tasks of the model are measured
        schedule=replace(config.schedule, name="sequential"),
        data=replace(config.data, batch_per_device=max(2, config.data.batch_per_device)),
    )


def two_layers(model: ModelConfig) -> ModelConfig:
    """Return a decoder of the model's sizes with two layers, one of each kind that it has."""
    dense = not all(model.has_experts)
    whole = replace(model, preset=None, config=None, model_type=QWEN3_MOE)
    return replace(whole, num_layers=2, moe_layers=(0,) if dense else None)


def cuts(config: RunConfig) -> list[ScheduleConfig]:
    """Return ways to cut a step: whole experts in several sizes, and with separate weight gradients."""
    pieces = [number for number in PIECES if number <= config.data.batch_per_device]
    usual = replace(
        config.schedule, chunks=None, backward_chunks=None, priority="critical_path", microbatches=1
    )
    whole = [replace(usual, name="flowmoe", microbatches=number) for number in pieces]
    apart = replace(usual, name="penstock")
    return [*whole, apart, replace(apart, microbatches=2, chunks=2)]


class _Runs:
    """Runs steps of one stack by several plans, and notes the durations of their compute tasks."""

    def __init__(
        self,
        config: RunConfig,
        machinery: Machinery,
        dtype: torch.dtype,
        stack: PipelinedStack,
        schedules: list[ScheduleConfig],
    ) -> None:
        self.config, self.machinery, self.dtype, self.stack = config, machinery, dtype, stack
        self.control: Control = machinery.control
        gradients = stack.gradients.sizes_bytes
        plans: dict[tuple[Task, ...], tuple[StepPlan, Decision]] = {}  # equal computations are run once
        for cut in schedules:
            plan = first_plan(replace(config, schedule=cut), machinery.layout, stack.base_shape, gradients)
            choice = cut.decision("flat", config.placement)
            plans.setdefault(tuple(t for t in plan.graph.tasks if t.lane.computes), (plan, choice))
        self.tasks, self.plans = list(plans), [stack.adopt(plan) for plan, _ in plans.values()]
        shape = (config.data.batch_per_device, config.model.seq_len)
        generator = torch.Generator().manual_seed(machinery.layout.dp_rank)
        numbers = torch.randint(config.model.vocab_size, (2, *shape), generator=generator, device="cpu")
        self.batch = tuple(numbers.to(machinery.device))
        self.real = self._real_steps([choice for _, choice in plans.values()])

    @property
    def work(self) -> Workload:
        """The sizes of the steps, with numbers of the type that they compute in, which may be wider than any
        that a run has."""
        work = workload(self.config, self.machinery.layout, self.stack.gradients.sizes_bytes)
        own_bytes = (self.machinery.autocast_dtype or self.dtype).itemsize
        row_bytes = self.config.moe.row_bytes(work.hidden_size, own_bytes)
        return replace(work, element_bytes=own_bytes, wire_row_bytes=row_bytes)

    def problem(self, file: ClusterFile) -> Problem:
        """Return the steps on the cluster of a file."""
        return replace(run_problem(self.config, self.machinery.layout, file), workload=self.work)

    def step(self, plan: StepPlan, stack: PipelinedStack) -> tuple[float, list[TaskRecord]]:
        """Run a step, which all ranks start together; return seconds and records. Gradients are dropped."""
        stack.plan = plan
        self.control.barrier(PURPOSE)
        start_s = time.perf_counter()
        stack(*self.batch).backward()
        for parameter in stack.model.parameters():
            parameter.grad = None
        device = self.machinery.device
        device_of(device).synchronize(device)  # or the clock would tell how long launching took
        return time.perf_counter() - start_s, stack.records()

    def measure(self, rounds: int, budget: Budget) -> list[Seconds]:
        """Return, for every plan, seconds of its compute tasks without a network, [rank, round, task].

        Real steps run in the same rounds, so that a machine that gets slower does not mislead. Few rounds are
        enough where the budget is used up, or measuring is stopped; plans that have not run at all when it is
        `late` are forgotten.
        """
        own: list[list[list[float]]] = [[] for _ in self.plans]
        for number in range(rounds):
            if number >= LEAST_ROUNDS and budget.agree() <= 0:
                break
            logger.debug(f"steps of two layers, round {number + 1} of {rounds}")
            for plan, tasks, of_plan in zip(self.plans, self.tasks, own, strict=True):
                if own[0] and budget.agree_late():
                    break
                _, records = self.step(plan, self.stack)
                durations = {record.task: record.duration_s for record in records}
                of_plan.append([durations[task] for task in tasks])
            if self.real is not None:
                self.real.round(budget.agree_late)
            if budget.late:
                break
        ran = [place for place, of_plan in enumerate(own) if of_plan]
        self.tasks, self.plans = [self.tasks[n] for n in ran], [self.plans[n] for n in ran]
        noted = [np.array(own[place]) for place in ran]
        everyone = self.control.gather(noted, "exchanging measured durations")
        return [np.stack(of_plan) for of_plan in zip(*everyone, strict=True)]

    def _real_steps(self, choices: Sequence[Decision]) -> RealSteps | None:
        """Return steps over the network; None if nothing is sent, or on GPUs: their lanes share no cores."""
        if self.machinery.layout.world_size == 1 or not device_of(self.machinery.device).is_cpu:
            return None
        stack = build_stack(self.config, self.machinery, self.dtype)
        named = [(choice.schedule, plan) for choice, plan in zip(choices, self.plans, strict=True)]
        shown = [(stack.adopt(self.plans[n]), choices[n]) for n in worth_running(named)]
        return RealSteps(
            shown, lambda plan: self.step(plan, stack), lambda plan: self.step(plan, self.stack), self.control
        )


def _rounds(runs: _Runs, budget: Budget) -> int:
    """Return how many rounds fit, from the first steps, which allocate and are not measured otherwise."""
    runs.step(runs.plans[0], runs.stack)
    start_s = budget.clock()
    for plan in runs.plans:
        if budget.agree_late():
            return LEAST_ROUNDS
        runs.step(plan, runs.stack)
    if runs.real is not None:
        runs.real.round(budget.agree_late, counts=False)
    round_s = max(runs.control.gather(budget.clock() - start_s, PURPOSE))
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(budget.agree() / round_s)))


# ---- from durations to models ------------------------------------------------------------------------------


def _models(runs: _Runs, alone: list[Seconds], rates: ClusterConfig) -> Iterator[TaskModel]:
    kinds = defaultdict[Kind, list[tuple[float, float]]](list)  # work in seconds by the rates, seconds
    sizes = runs.work
    for plan, tasks, alone_s in zip(runs.plans, runs.tasks, alone, strict=True):
        cost = StepCost(plan.shape, sizes, rates)
        for layer_tasks, nominal_s in _alike(tasks, cost, rates).values():
            task = tasks[layer_tasks[0]]
            typical_s = float(np.median(alone_s[:, :, layer_tasks]))
            kinds[task.op, task.phase].append((nominal_s, typical_s))
    for (op, phase), points in kinds.items():
        line, fit = fitted(points)
        yield TaskModel(op=str(op), phase=str(phase), alpha_s=line.alpha_s, scale=line.beta, fit=fit)


def _alike(
    tasks: Sequence[Task], cost: StepCost, rates: ClusterConfig
) -> Mapping[tuple[int, str, Phase, float], tuple[list[int], float]]:
    """Return numbers of tasks by layer, op, phase and size, with their work in seconds by the rates."""
    groups: dict[tuple[int, str, Phase, float], tuple[list[int], float]] = {}
    for number, task in enumerate(tasks):
        work = cost.work(task)
        nominal_s = rates.nominal_s(work.flops, work.copied_bytes)
        key = (task.layer, task.op, task.phase, nominal_s)
        groups.setdefault(key, ([], nominal_s))[0].append(number)
    return groups


def _apart(times: list[Seconds]) -> tuple[tuple[float, ...], list[Seconds]]:
    """Return every rank's slowness relative to the median rank, and all times without that factor.

    The factors are empty where ranks are alike; of an even number of ranks the faster of the middle two is
    the median.
    """
    per_rank = np.sum([np.median(seconds, axis=1).sum(axis=1) for seconds in times], axis=0)
    if per_rank.max() <= ALIKE * per_rank.min():
        return (), times
    slowness = tuple(float(ratio) for ratio in per_rank / median_low(per_rank))
    return slowness, [seconds / np.array(slowness)[:, None, None] for seconds in times]
