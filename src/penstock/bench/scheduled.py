"""Contenders that run by a schedule: one model, stacks with and without a network, a plan for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from penstock.bench.config import BenchConfig
from penstock.bench.naming import Named
from penstock.data import DataConfig
from penstock.moe.build import dispatch_of
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.transport.silent import silent
from penstock.schedule import StepPlan
from penstock.step.shape import ExpertForm
from penstock.topology import Layout
from penstock.trace import TaskRecord
from penstock.train.assemble import build_machinery, first_plan, model_of
from penstock.train.config import OutputConfig, RunConfig, TrainConfig


@dataclass(frozen=True)
class Scheduled:
    """Steps of one stack by one plan. Gradients are dropped after every step."""

    stack: PipelinedStack
    plan: StepPlan
    batch: tuple[Tensor, Tensor]

    def prepare(self, number: int) -> None:
        del number  # the same batch every time: all entries do the same work
        self.stack.plan = self.plan

    def step(self, number: int) -> None:
        self.prepare(number)
        self.stack(*self.batch).backward()
        for parameter in self.stack.model.parameters():
            parameter.grad = None

    def records(self) -> list[TaskRecord]:
        return self.stack.records()

    def close(self) -> None:
        self.stack.close()


class Stacks:
    """One model on this rank, as the stacks that share it: with a network and without."""

    def __init__(self, config: BenchConfig, layout: Layout) -> None:
        self.run_config = run_config_of(config)
        self.config, self.layout = config, layout
        self.machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
        self.model = model_of(config.model, config.moe, layout)
        self.model.initialise(config.compare.seed)
        self.batch = batch_of(config, layout)
        self.real = self.build(self.machinery)
        self.silent = self.build(silent(self.machinery))
        self._by_form: dict[tuple[bool, ExpertForm], PipelinedStack] = {}

    def of(self, plan: StepPlan, *, sends: bool = True) -> PipelinedStack:
        """The stack that runs a plan; sends: with a network.

        Where ranks share attention or experts, gradients and routes depend on the form of the MoE part. Every
        form therefore has a stack, and no stack is prepared again during a comparison.
        """
        first = self.real if sends else self.silent
        if plan.shape.sharing.is_none:
            return first
        key = sends, plan.shape.expert_form
        if key not in self._by_form:
            self._by_form[key] = self.build(first.machinery)
        return self._by_form[key]

    def close(self) -> None:
        self.real.close()
        self.silent.close()

    def build(self, machinery: Machinery) -> PipelinedStack:
        """The model on this machinery."""
        make_plan = partial(first_plan, self.run_config, self.layout)
        return PipelinedStack(self.model, self.model, self.config.moe, machinery, make_plan)


def run_config_of(config: BenchConfig) -> RunConfig:
    """The training run whose steps are compared; its schedule is the first of the comparison."""
    compare = config.compare
    return RunConfig(
        model=config.model,
        moe=replace(config.moe, dispatch=dispatch_of(config.moe)),  # that of the model, which is built once
        schedule=replace(config.schedule, name=Named.of(compare.schedules[0]).schedule),
        parallel=config.parallel,
        cluster=config.cluster,
        data=DataConfig(batch_per_device=compare.batch_per_device),
        train=TrainConfig(seed=compare.seed),
        output=OutputConfig(loads=False),
    )


def batch_of(config: BenchConfig, layout: Layout) -> tuple[Tensor, Tensor]:
    """Random tokens and labels, [B, L] each; the same on ranks that share attention."""
    generator = torch.Generator().manual_seed(config.compare.seed + layout.dp_rank)
    shape = (config.compare.batch_per_device, config.model.seq_len)
    high = config.model.vocab_size
    return torch.randint(high, shape, generator=generator), torch.randint(high, shape, generator=generator)


def timed(step: Callable[[int], None], number: int) -> float:
    """Seconds of one step."""
    start_s = time.perf_counter()
    step(number)
    return time.perf_counter() - start_s
