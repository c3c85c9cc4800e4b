"""The plan of a scheduled model's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, get_args

from penstock.autopilot.deciding import Beat, decided_slowly
from penstock.autopilot.planned import Order
from penstock.autopilot.profiling import profile_run
from penstock.autopilot.start import find
from penstock.config import ConfigError
from penstock.cost import ClusterConfig, ClusterFile, HeldBytes, ProfiledCluster, StepCost, Workload
from penstock.data import DataConfig
from penstock.decision import Decision, GradientBytes, PlacementConfig, ScheduleConfig
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.plan import Problem
from penstock.runtime import PipelinedStack
from penstock.runtime.moving import ExpertMoving
from penstock.schedule import StepPlan, plan_step
from penstock.step import StepShape
from penstock.step.shape import Recompute
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import expert_moving
from penstock.train.config import RunConfig
from penstock.words import folded

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
UNKNOWN = (("samples", "masks and positions, which are the model's own, do not move with samples"),)
"""Settings of a decision that a model of transformers does not allow, and the reasons."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a model for a plan. key_value_heads, head_dim: None = as many as heads, of the width that is
    left. element_bytes: of its activations."""

    hidden_size: int
    vocab_size: int
    heads: int
    key_value_heads: int | None
    head_dim: int | None
    dense_width: int
    shared_width: int
    expert_matrices: int
    element_bytes: int
    moe: MoEConfig

    @property
    def groups(self) -> int:
        """Heads of keys and values, as far as several of queries share one evenly."""
        groups = self.key_value_heads or self.heads
        return groups if self.heads % groups == 0 else self.heads

    @property
    def width(self) -> int:
        """Width of a head, rounded up to an even number."""
        width = self.head_dim or max(1, self.hidden_size // self.heads)
        return width + width % 2

    def workload(
        self,
        layout: Layout,
        gradients: GradientBytes,
        batch: int,
        length: int,
        held: HeldBytes | None = None,
    ) -> Workload:
        """Return the sizes of a step with these samples on every rank. held: a rank's bytes of weights."""
        return Workload(
            batch=max(1, batch),
            seq_len=max(1, length),
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.moe.moe_ffn_hidden_size,
            vocab_size=self.vocab_size,
            num_experts=self.moe.num_experts,
            top_k=self.moe.top_k,
            expert_matrices=self.expert_matrices,
            capacity_factor=self.moe.slots_factor,
            min_capacity=self.moe.min_capacity,
            world_size=layout.world_size,
            ep_size=layout.ep_size,
            element_bytes=self.element_bytes,
            all_reduce_bytes=gradients.replicated,
            expert_all_reduce_bytes=gradients.experts,
            partial_all_reduce_bytes=gradients.partial,
            partial_by_form=gradients.partial_by_form,
            mp_size=layout.mp_size,
            esp_size=layout.esp_size,
            attention_size=self.heads * self.width,
            key_value_size=self.groups * self.width,
            dense_ffn_hidden_size=self.dense_width,
            wire_row_bytes=self.moe.row_bytes(self.hidden_size, self.element_bytes),
            dispatch=self.moe.dispatch,
            node_size=layout.ep_node_size,
            devices_per_node=layout.node_size,
            shared_ffn_hidden_size=self.shared_width,
            held=held,
        )

    def stand_in(self, shape: StepShape, parallel: ParallelConfig, batch: int, length: int) -> RunConfig:
        """Return a decoder of Penstock's own with these sizes, to measure the cost of computation.

        Its own schedule cuts nothing: a batch of one sample could not be cut. Where no rank has a sample yet,
        it has one.
        """
        return RunConfig(
            model=ModelConfig(
                num_layers=shape.num_layers,
                hidden_size=self.hidden_size,
                num_heads=self.heads,
                num_key_value_heads=self.groups,
                head_dim=self.width,
                seq_len=max(1, length),
                vocab_size=max(256, self.vocab_size),
                moe_layers=tuple(layer for layer, moe in enumerate(shape.moe_layers) if moe),
                ffn_hidden_size=self.dense_width or None,
            ),
            moe=replace(self.moe, shared_ffn_hidden_size=self.shared_width),
            schedule=ScheduleConfig(name="sequential"),
            data=DataConfig(batch_per_device=max(1, batch)),
            parallel=parallel,
        )


class Planner(Protocol):
    """Makes the plan of a model's steps."""

    def first(self, shape: StepShape, gradients: GradientBytes) -> StepPlan:
        """Return a plan before any step, and whenever the stack itself asks for one."""
        ...

    def of(
        self, stack: PipelinedStack, batch: int, length: int, recompute: Recompute | None = None
    ) -> StepPlan:
        """Return the plan for steps of these samples on every rank. All ranks call it, and get the same plan.

        recompute: what is recomputed in backward; None = as the plan says.
        """
        ...


@dataclass(frozen=True)
class GivenPlan:
    """The plan of a decision, in the order that assumed costs give it."""

    choice: Decision
    sizes: ModelSizes
    layout: Layout

    def first(self, shape: StepShape, gradients: GradientBytes) -> StepPlan:
        return self._made(self.choice, shape, gradients, 1, FIRST_LENGTH)

    def of(
        self, stack: PipelinedStack, batch: int, length: int, recompute: Recompute | None = None
    ) -> StepPlan:
        choice = self.choice if recompute is None else replace(self.choice, recompute=recompute)
        return self._made(choice, stack.base_shape, stack.gradients.sizes_bytes, batch, length)

    def _made(
        self, choice: Decision, shape: StepShape, gradients: GradientBytes, batch: int, length: int
    ) -> StepPlan:
        workload = self.sizes.workload(self.layout, gradients, batch, length)
        return plan_step(choice, shape, gradients, lambda cut: StepCost(cut, workload, ClusterConfig()))


@dataclass(frozen=True)
class SearchedPlan:
    """The best plan for the cluster as it is measured at the first step.

    Links are measured directly, computation on a decoder of Penstock's own with the sizes of the model.
    say: called on rank 0 with what is measured and chosen. measured: clusters by the sizes of the steps with
    which they were measured.
    """

    meanwhile: GivenPlan
    parallel: ParallelConfig
    say: Callable[[str], None]
    measured: dict[object, ClusterFile] = field(default_factory=dict)

    def first(self, shape: StepShape, gradients: GradientBytes) -> StepPlan:
        return self.meanwhile.first(shape, gradients)

    def of(
        self, stack: PipelinedStack, batch: int, length: int, recompute: Recompute | None = None
    ) -> StepPlan:
        layout, machinery = self.meanwhile.layout, stack.machinery
        file = self._cluster(stack, batch, length)
        problem = self.problem(stack, file, batch, length, recompute)

        def decide(beat: Beat) -> tuple[Order, tuple[str, ...]]:
            found, lines = find(problem, file, 1.0, self.say, beat, REMEDY)
            return Order.of(found.best.plan), lines

        order, lines = decided_slowly(machinery.control, decide, "choosing a plan", self.parallel.timeout_s)
        if layout.rank == 0:
            self.say("\n".join(lines))
        return order.plan

    def problem(
        self,
        stack: PipelinedStack,
        file: ClusterFile,
        batch: int,
        length: int,
        recompute: Recompute | None = None,
    ) -> Problem:
        """Return the planning problem on this cluster, with weights as they are now; see also `of`."""
        sizes, layout, gradients = self.meanwhile.sizes, self.meanwhile.layout, stack.gradients
        return Problem(
            shape=stack.base_shape,
            workload=sizes.workload(layout, gradients.sizes_bytes, batch, length, gradients.held),
            cluster=ProfiledCluster.build(file),
            slowness=file.slowness,
            recompute=get_args(Recompute) if recompute is None else (recompute,),
        )

    def _cluster(self, stack: PipelinedStack, batch: int, length: int) -> ClusterFile:
        sizes, shape = self.meanwhile.sizes, stack.base_shape
        key = shape, batch, length
        if key not in self.measured:
            stand_in = sizes.stand_in(shape, self.parallel, batch, length)
            self.measured[key] = profile_run(stand_in, stack.machinery, budget_s=PROFILE_S)
        return self.measured[key]


def planner_of(plan: str | Decision, sizes: ModelSizes, layout: Layout, parallel: ParallelConfig) -> Planner:
    """Return the planner that `plan` asks for: "auto", a schedule's name, a decision."""
    given = GivenPlan(choice_of(plan, layout.world_size), sizes, layout)
    return SearchedPlan(given, parallel, _say) if plan == AUTO and layout.world_size > 1 else given


def moving_of(choice: Decision, sizes: ModelSizes, stack: PipelinedStack) -> ExpertMoving | None:
    """Return how guests are planned, by assumed costs; None where experts stay."""
    work = sizes.workload(stack.machinery.layout, stack.gradients.sizes_bytes, 1, FIRST_LENGTH)
    placement = PlacementConfig(experts=choice.experts, guest_slots=choice.guest_slots, split=choice.split)
    return expert_moving(placement, choice, StepCost(stack.base_shape, work, ClusterConfig()))


def choice_of(plan: str | Decision, ranks: int = 1) -> Decision:
    """Return the decision that `plan` names; of "auto" the one until the cluster is measured.

    Raises ConfigError for an unknown name, and for decisions that steps of such models do not allow.
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


def _say(text: str) -> None:
    print(folded(text, LINE), flush=True)
