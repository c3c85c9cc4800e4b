"""Contenders that run by a schedule: one model, stacks with and without a network, a plan for each."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from penstock.data import DataConfig
from penstock.decision import ScheduleConfig
from penstock.lab.bench.config import BenchConfig, Named
from penstock.models import MoEDecoder
from penstock.moe.build import dispatch_of
from penstock.runtime import Machinery, PipelinedStack
from penstock.runtime.machinery import silent
from penstock.schedule import StepPlan
from penstock.step.shape import ExpertForm
from penstock.topology import Layout
from penstock.trace import TaskRecord
from penstock.train.assemble import (
    build_machinery,
    build_optimizer,
    build_stack,
    first_plan,
    model_of,
)
from penstock.train.config import OutputConfig, RunConfig, TrainConfig
from penstock.train.optimizer import Update, build_adamw, build_update, initialise_state, set_learning_rate


@dataclass(frozen=True)
class Scheduled:
    """Whole iterations of one stack by one plan, clipping and update included.

    The learning rate is 0: an update costs what it always does, and all entries keep the same weights.
    """

    stack: PipelinedStack
    plan: StepPlan
    batch: tuple[Tensor, Tensor]
    update: Update

    def prepare(self, number: int) -> None:
        del number  # the batch is the same every time: all entries do the same work
        self.stack.plan = self.plan

    def step(self, number: int) -> None:
        self.prepare(number)
        self.update.backward(self.stack(*self.batch), number + 1)
        self.update.apply(accepted=True)

    def records(self) -> list[TaskRecord]:
        return self.stack.records()

    def close(self) -> None:
        self.stack.close()


class _Alone(Update):
    """The end of an iteration without a network: nothing is summed, so ranks are not compared."""

    def backward(self, loss: Tensor, step: int) -> Tensor:
        del step
        loss.backward()
        parameters = list(self.stack.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # get_total_norm meets other ranks once a model of transformers was scheduled in this process.
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        limit = math.inf if self.max_norm is None else self.max_norm
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm


class Stacks:
    """The stacks that share one model on this rank, with its optimiser; and a copy without a network.

    A stack whose steps update parameters themselves has a separate model, with shares as its steps are cut.
    """

    def __init__(self, config: BenchConfig, layout: Layout) -> None:
        self.run_config = run_config_of(config)
        self.config, self.layout = config, layout
        self.machinery = build_machinery(layout, torch.device("cpu"), config.parallel, "float32")
        self.silent_machinery = silent(self.machinery)
        self.model = model_of(config.model, config.moe, layout)
        self.model.initialise(config.compare.seed)
        self.batch = batch_of(config, layout)
        self.real = self.build(self.machinery)
        self._alone = copy.deepcopy(self.model)
        self.silent = self.build(self.silent_machinery, self._alone)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        for model in (self.model, self._alone):
            optimizer = build_adamw(model.named_parameters(), self.run_config.optimizer)
            initialise_state(optimizer)
            self._optimizers[id(model)] = _still(optimizer)
        self._by_form: dict[tuple[bool, ExpertForm], PipelinedStack] = {}

    def run_of(self, name: str) -> RunConfig:
        """Return the training run whose iterations an entry of this name has."""
        return replace(self.run_config, optimizer=Named.of(name).optimizer(self.run_config.optimizer))

    def scheduled(self, plan: StepPlan, *, sends: bool = True) -> Scheduled:
        """Return iterations by a plan. All ranks must call it.

        Args:
            sends: Whether they use the network.
        """
        if (updating := plan.shape.updating) is None:
            return self.of_stack(self.of(plan, sends=sends), plan)
        shares = replace(self.run_config.optimizer, zero_stage=2 if updating.releases else 1)
        config = replace(self.run_config, optimizer=shares)
        stack = build_stack(config, self.machinery if sends else self.silent_machinery, plan=plan)
        optimizer = _still(build_optimizer(stack, config.optimizer))
        return Scheduled(stack, plan, self.batch, build_update(stack, optimizer, config.optimizer))

    def of_stack(self, stack: PipelinedStack, plan: StepPlan) -> Scheduled:
        """Return iterations of a stack that shares its model with others, by a plan that it adopts."""
        optimizer, config = self._optimizers[id(stack.model)], self.run_config.optimizer
        build = _Alone if stack.machinery is self.silent_machinery else build_update
        update = build(stack, optimizer, config)
        return Scheduled(stack, stack.adopt(plan), self.batch, update)

    def of(self, plan: StepPlan, *, sends: bool = True) -> PipelinedStack:
        """Return the stack that runs a plan.

        Where ranks share attention or experts, gradients and routes depend on the form of the MoE part. Every
        form therefore has a stack, and no stack is prepared again during a comparison.

        Args:
            sends: Whether it uses the network.
        """
        first = self.real if sends else self.silent
        if plan.shape.sharing.is_none:
            return first
        key = sends, plan.shape.expert_form
        if key not in self._by_form:
            self._by_form[key] = self.build(first.machinery, self.model if sends else self._alone)
        return self._by_form[key]

    def close(self) -> None:
        self.real.close()
        self.silent.close()

    def build(self, machinery: Machinery, model: MoEDecoder | None = None) -> PipelinedStack:
        """Build a stack of the model, or of another one, on this machinery."""
        make_plan = partial(first_plan, self.run_config, self.layout)
        model = model or self.model
        return PipelinedStack(model, model, self.config.moe, machinery, make_plan)


def _still(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimiser with a learning rate of 0."""
    set_learning_rate(optimizer, 0.0)
    return optimizer


def run_config_of(config: BenchConfig) -> RunConfig:
    """Return the training run whose steps are compared; its schedule is the first of the comparison."""
    compare = config.compare
    return RunConfig(
        model=config.model,
        moe=replace(config.moe, dispatch=dispatch_of(config.moe)),  # the dispatch of the model, built once
        schedule=replace(config.schedule, name=Named.of(compare.schedules[0]).schedule),
        parallel=config.parallel,
        cluster=config.cluster,
        data=DataConfig(batch_per_device=compare.batch_per_device),
        train=TrainConfig(seed=compare.seed),
        output=OutputConfig(loads=False),
    )


def run_of(config: BenchConfig, name: str, schedule: ScheduleConfig) -> RunConfig:
    """Return the training run whose steps a contender of this name has, cut as `schedule` says."""
    named, run = Named.of(name), run_config_of(config)
    return replace(
        run,
        moe=named.moe(run.moe),
        schedule=schedule,
        placement=named.placement(config.placement),
        optimizer=named.optimizer(run.optimizer),
    )


def batch_of(config: BenchConfig, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return random tokens and labels, [B, L] each; equal on ranks that share attention."""
    generator = torch.Generator().manual_seed(config.compare.seed + layout.dp_rank)
    shape = (config.compare.batch_per_device, config.model.seq_len)
    high = config.model.vocab_size
    return torch.randint(high, shape, generator=generator), torch.randint(high, shape, generator=generator)
