"""The plan of a scheduled model's steps."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import get_args

import torch

from penstock.autotune.choose.start import find
from penstock.autotune.planned import Order
from penstock.autotune.problem import possible_dispatches
from penstock.autotune.profile.measure import profile_run
from penstock.config import ConfigError
from penstock.cost import ClusterConfig, ClusterFile, ProfiledCluster, StepCost
from penstock.data import DataConfig
from penstock.decision import Decision, GradientBytes, PlacementConfig, ScheduleConfig
from penstock.families.sizes import ModelSizes
from penstock.models import ModelConfig
from penstock.ops.core import FLAT
from penstock.ops.work import FLOAT32_BYTES
from penstock.plan import Problem
from penstock.plan.plan_config import PlanConfig
from penstock.runtime import PipelinedStack
from penstock.runtime.features.expert_replicas.manager import ExpertMoving
from penstock.schedule import StepPlan, plan_step
from penstock.step import StepShape
from penstock.step.shape import Recompute
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import expert_moving
from penstock.train.config import RunConfig, TrainConfig
from penstock.train.logs import show_unless_told
from penstock.words import folded

logger = logging.getLogger(__name__)

AUTO = "auto"
PROFILE_S = 10.0
"""Seconds for which the cluster is measured for a plan."""

REMEDY = "Start again while it is idle, or name a schedule (plan)"
"""Advice where measurements contradict each other: no file keeps them, and their duration is fixed."""

LINE = 110
"""Characters in a line of messages about plans."""

FIRST_LENGTH = 128
"""Tokens per sample for which a plan is made before the first step."""

USUAL = Decision()
UNKNOWN = (("samples", "masks and positions, which a call may give, do not move with samples"),)
"""Settings of a decision that a model of transformers does not allow, and the reasons."""


def stand_in(
    sizes: ModelSizes, shape: StepShape, parallel: ParallelConfig, batch: int, length: int
) -> RunConfig:
    """Return a decoder of Penstock's own with these sizes, to measure the cost of computation.

    Its own schedule cuts nothing: a batch of one sample could not be cut. Where no rank has a sample yet, it
    has one. How rows travel is open. It is priced by the bytes of the model's activations.

    Args:
        shape: Says which layers have experts.
        batch: Samples per rank.
        length: Tokens per sample.
    """
    settings = sizes.model_settings(shape.moe_layers)
    settings["vocab_size"] = max(256, sizes.vocab_size)
    return RunConfig(
        model=ModelConfig(seq_len=max(1, length), **settings),
        moe=replace(sizes.moe, shared_ffn_hidden_size=sizes.shared_width, dispatch="auto"),
        plan=PlanConfig(mode="auto"),
        schedule=ScheduleConfig(name="sequential"),
        data=DataConfig(batch_per_device=max(1, batch)),
        parallel=parallel,
        train=TrainConfig(precision="float32" if sizes.element_bytes >= FLOAT32_BYTES else "bfloat16"),
    )


@dataclass(frozen=True)
class Planner:
    """Makes the plan of a model's steps: that of a decision, or the best one for the cluster.

    A decision is ordered by assumed costs. For a search the cluster is measured at the first step: links
    directly, computation on a decoder of Penstock's own with the sizes of the model.

    Attributes:
        choice: The decision; where a plan is searched for, that of steps before the search.
        searches: Whether a plan is searched for.
        measured: Clusters by the sizes of the steps with which they were measured.
    """

    choice: Decision
    sizes: ModelSizes
    layout: Layout
    parallel: ParallelConfig
    searches: bool
    measured: dict[object, ClusterFile] = field(default_factory=dict)

    @staticmethod
    def asked(plan: str | Decision, sizes: ModelSizes, layout: Layout, parallel: ParallelConfig) -> Planner:
        """Return the planner that `plan` asks for: "auto", a schedule's name, a decision."""
        searches = plan == AUTO and layout.world_size > 1
        if searches:
            show_unless_told(sys.stdout, shown=layout.rank == 0, width=lambda line: folded(line, LINE))
        return Planner(choice_of(plan, layout.world_size), sizes, layout, parallel, searches)

    def first(self, shape: StepShape, gradients: GradientBytes) -> StepPlan:
        """Return a plan before any step, and whenever the stack itself asks for one."""
        return self._given(self.choice, shape, gradients, 1, FIRST_LENGTH)

    def of(
        self, stack: PipelinedStack, batch: int, length: int, recompute: Recompute | None = None
    ) -> StepPlan:
        """Return the plan for steps of these samples on every rank. All ranks call it, and get the same plan.

        Args:
            batch: Samples per rank.
            length: Tokens per sample.
            recompute: What is recomputed in backward; None = as the plan says.
        """
        if not self.searches:
            choice = self.choice if recompute is None else replace(self.choice, recompute=recompute)
            return self._given(choice, stack.base_shape, stack.gradients.sizes_bytes, batch, length)
        machinery, shape = stack.machinery, replace(stack.base_shape, dispatch=FLAT)
        key = (shape, batch, length, dtype_of(stack), machinery.autocast_dtype)
        if key not in self.measured:
            self.measured[key] = self._measure(stack, batch, length)
        file = self.measured[key]
        problem = self.problem(stack, file, batch, length, recompute)

        def decide() -> tuple[Order, tuple[str, ...]]:
            solved = find(problem, file, 1.0, REMEDY).warned()
            return Order.of(solved.found.best.choice, solved.found.best.plan), solved.lines

        order, lines = machinery.control.decided(decide, "choosing a plan", slowly=True)
        stack.send_by(order.choice.dispatch)
        if self.layout.rank == 0:
            logger.info("\n".join(lines))
        return order.plan

    def problem(
        self,
        stack: PipelinedStack,
        file: ClusterFile,
        batch: int,
        length: int,
        recompute: Recompute | None = None,
    ) -> Problem:
        """Return the planning problem on this cluster, with weights as they are now.

        Args:
            file: Measurements of the cluster.
            batch: Samples per rank.
            length: Tokens per sample.
            recompute: What is recomputed in backward; None = as the plan says.
        """
        gradients, sizes = stack.gradients, self._sizes(stack)
        held = replace(gradients.held, cast=sizes.element_bytes < dtype_of(stack).itemsize)
        return Problem(
            shape=stack.base_shape,
            workload=sizes.workload(self.layout, gradients.sizes_bytes, batch, length, held),
            cluster=ProfiledCluster.build(file),
            dispatches=tuple(possible_dispatches(self._like(stack, batch, length), self.layout)),
            slowness=file.slowness,
            recompute=get_args(Recompute) if recompute is None else (recompute,),
        )

    def _measure(self, stack: PipelinedStack, batch: int, length: int) -> ClusterFile:
        if self.layout.rank == 0:
            logger.info(f"measuring the cluster for about {PROFILE_S:.0f} s (plan=SCHEDULE skips this)")
        like = self._like(stack, batch, length)
        try:
            return profile_run(like, stack.machinery, budget_s=PROFILE_S, dtype=dtype_of(stack))
        except RuntimeError as error:
            if not _is_of_memory(error):
                raise
            error.add_note(
                'plan = "auto" measures computation in the first step, on two more layers of the same sizes '
                f"with the whole vocabulary, for {batch} x {length} tokens: rank {self.layout.rank} ran out "
                'of memory. Give a schedule, which measures nothing: plan="flowmoe".'
            )
            raise

    def _given(
        self, choice: Decision, shape: StepShape, gradients: GradientBytes, batch: int, length: int
    ) -> StepPlan:
        workload = self.sizes.workload(self.layout, gradients, batch, length)
        return plan_step(choice, shape, gradients, lambda cut: StepCost(cut, workload, ClusterConfig()))

    def _like(self, stack: PipelinedStack, batch: int, length: int) -> RunConfig:
        return stand_in(self._sizes(stack), stack.base_shape, self.parallel, batch, length)

    def _sizes(self, stack: PipelinedStack) -> ModelSizes:
        """Return the sizes of the model, with activations of the type in which the next steps compute."""
        dtype = stack.machinery.autocast_dtype or dtype_of(stack)
        return replace(self.sizes, element_bytes=dtype.itemsize)


def dtype_of(stack: PipelinedStack) -> torch.dtype:
    """Return the type of most of a model's parameters; float32 where none is floating-point."""
    held_bytes: Counter[torch.dtype] = Counter()
    for parameter in stack.model.parameters():
        if parameter.is_floating_point():
            held_bytes[parameter.dtype] += parameter.nbytes
    return max(held_bytes, key=held_bytes.__getitem__, default=torch.float32)


def _is_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or what has caused it, is that a device has no more memory."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error is not None


def moving_of(choice: Decision, sizes: ModelSizes, stack: PipelinedStack) -> ExpertMoving | None:
    """Return how replicas are planned, by assumed costs; None where experts stay."""
    work = sizes.workload(stack.machinery.layout, stack.gradients.sizes_bytes, 1, FIRST_LENGTH)
    placement = PlacementConfig(
        experts=choice.experts, replica_slots=choice.replica_slots, split=choice.split
    )
    return expert_moving(placement, choice, StepCost(stack.base_shape, work, ClusterConfig()))


def choice_of(plan: str | Decision, ranks: int = 1) -> Decision:
    """Return the decision that `plan` names; of "auto" the one until the cluster is measured.

    Raises:
        ConfigError: For an unknown name, and for decisions that steps of such models do not allow.
    """
    if plan == AUTO:
        plan = "sequential" if ranks == 1 else "flowmoe"
    if isinstance(plan, Decision):
        plan.check()
        for name, why in UNKNOWN:
            usual = getattr(USUAL, name)
            if (value := getattr(plan, name)) != usual:
                raise ConfigError(f"plan.{name}", value, why, f"Use {usual!r}.")
        return plan
    return ScheduleConfig(name=plan).decision("flat", PlacementConfig())
