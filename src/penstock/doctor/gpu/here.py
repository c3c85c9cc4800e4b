"""What a stage is given: which rank this is, how much it should do, and the runs whose steps it takes.

The small model takes seconds to build, and has every part of a step. The given run has its own model, and an
optimiser of learning rate 0, so that every step does the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from penstock.cost import ClusterFile
from penstock.data import DataConfig
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.device import device_of
from penstock.models import ModelConfig, MoEDecoder
from penstock.moe import MoEConfig
from penstock.moe.build import dispatch_of
from penstock.plan.plan_config import PlanConfig
from penstock.runtime import Machinery, PipelinedStack
from penstock.topology import Control, Layout, ProcessInfo, find_node_size
from penstock.train.assemble import build_machinery, build_optimizer, build_stack
from penstock.train.config import OutputConfig, Precision, RunConfig, TrainConfig
from penstock.train.optimizer import OptimizerConfig, build_update, set_learning_rate


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much the stages do.

    Attributes:
        rounds: How often the lanes exchange.
        repeats: How often a step is repeated, in races and waits.
        steps: How many steps of every schedule are measured.
        budget_s: Seconds for the curves.
        largest_bytes: The largest collective; 0 = as large as in a profile.
        judged: Whether times say anything about this device; on processors that stand in for GPUs they do
            not.
    """

    rounds: int
    repeats: int
    steps: int
    budget_s: float
    largest_bytes: int
    judged: bool

    @staticmethod
    def of(device: torch.device) -> Scale:
        """Return the usual scale on a device."""
        if device_of(device).is_gpu:
            return Scale(rounds=1000, repeats=20, steps=7, budget_s=60, largest_bytes=1 << 30, judged=True)
        return Scale(rounds=50, repeats=3, steps=3, budget_s=6, largest_bytes=0, judged=False)


@dataclass(frozen=True, kw_only=True)
class Here:
    """A rank in a stage.

    Attributes:
        info: Which rank this is.
        config: The resolved settings of the run for which curves and predictions are made.
        scale: How much the stages do.
        cluster: What the curves have found; None if they have not been measured.
    """

    info: ProcessInfo
    device: torch.device
    config: RunConfig
    scale: Scale
    cluster: ClusterFile | None = None

    @property
    def world_size(self) -> int:
        return self.info.world_size

    @property
    def control(self) -> Control:
        return Control(self.info.rank, self.info.world_size)

    @cached_property
    def node_size(self) -> int:
        """Consecutive ranks in a node; 0 = nodes differ. All ranks must ask for it together."""
        given = self.config.parallel.ranks_per_node
        return find_node_size(self.control, self.info.local_rank) if given is None else given


def timed(here: Here, action: Callable[[], object]) -> tuple[float, float]:
    """Run an action that all ranks start together; return the seconds until it was issued, and done."""
    kind = device_of(here.device)
    kind.synchronize(here.device)
    here.control.barrier("starting what is timed")
    start_s = time.perf_counter()
    action()
    issued_s = time.perf_counter() - start_s
    kind.synchronize(here.device)
    return issued_s, time.perf_counter() - start_s


MODEL: Final = ModelConfig(
    num_layers=2, hidden_size=32, num_heads=4, num_key_value_heads=2, seq_len=8, vocab_size=64
)
BATCH: Final = 4
LARGER: Final = 6.0
"""The factor on fresh matrices: with those every part of the model has gradients that matter."""

OPTIMIZER: Final = OptimizerConfig(lr=100.0, eps=1.0, weight_decay=0.0, clip_grad_norm=0.05)
"""With so large an `eps` a step of AdamW changes parameters nearly in proportion to gradients, so that errors
of rounding stay as small as they are."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to run the small model.

    Attributes:
        name: What people call it.
        parallel, moe, plan, placement, optimizer: Settings of those sections that differ from the usual ones.
    """

    name: str
    schedule: str = "flowmoe"
    precision: Precision = "float32"
    parallel: Mapping[str, Any] = field(default_factory=dict)
    moe: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def learns_from_loads(self) -> bool:
        """Whether a step depends on the loads of steps before."""
        return bool(self.moe.get("bound_factor") or self.placement.get("experts"))

    def moe_config(self, num_experts: int) -> MoEConfig:
        usual = {"num_experts": num_experts, "moe_ffn_hidden_size": 48, "expert": "gelu"}
        usual |= {"aux_loss_coeff": 0.0, "z_loss_coeff": 0.0, "dispatch": "flat"}
        return MoEConfig(**{**usual, **self.moe})

    def config(self, here: Here) -> RunConfig:
        """Return the run, with the connections of the run that was given."""
        given = here.config.parallel
        plain = {"tp_size": 1, "etp_size": 1, "ep_size": None, "tokens": "split"}
        parallel = replace(given, **{**plain, **self.parallel})
        return RunConfig(
            model=MODEL,
            moe=self.moe_config(2 * here.world_size),
            schedule=ScheduleConfig(
                name=self.schedule, microbatches=2, chunks=2, all_reduce_chunk_bytes=4096
            ),
            placement=PlacementConfig(**self.placement),
            plan=PlanConfig(**self.plan),
            parallel=parallel,
            data=DataConfig(batch_per_device=BATCH),
            optimizer=replace(OPTIMIZER, **self.optimizer),
            train=TrainConfig(precision=self.precision),
            output=OutputConfig(loads=False),
        )


class Running:
    """A stack with its optimiser and one batch, on this rank.

    Args:
        factor: What all fresh matrices are multiplied by.
    """

    def __init__(self, config: RunConfig, machinery: Machinery, factor: float = 1.0) -> None:
        self.stack = build_stack(config, machinery)
        with torch.no_grad():
            for parameter in self.stack.model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(factor)
        optimizer = build_optimizer(self.stack, config.optimizer)
        self.update = build_update(self.stack, optimizer, config.optimizer)
        layout, samples = machinery.layout, config.data.batch_per_device
        own = slice(samples * layout.dp_rank, samples * (layout.dp_rank + 1))
        tokens, labels = batch_of(config.model, samples * layout.dp_size)
        numbers = torch.arange(len(tokens))
        self._batch = tuple(each[own].to(machinery.device) for each in (tokens, labels, numbers))

    def step(self, number: int = 0) -> tuple[Tensor, Tensor]:
        """Run a whole step; return its loss and the norm of its gradients, on the device."""
        loss = self.stack(*self._batch)
        norm = self.update.backward(loss, number + 1)
        self.update.apply(accepted=True)
        return loss.detach(), norm

    def rehearse(self) -> None:
        """Run a pass whose gradients are thrown away.

        Where experts move and how many rows they get follows from the loads of a pass before.
        """
        self.stack(*self._batch).backward()
        self.stack.model.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        """Return copies of the parameters on the host, as every next step finds them."""
        self.update.flush()
        return {name: each.detach().cpu().clone() for name, each in self.stack.model.named_parameters()}


def small_machinery(here: Here, case: Case) -> Machinery:
    """Build what a case runs on. All ranks must call it together."""
    config = case.config(here).resolved(here.world_size)
    return build_machinery(layout_of(here, config), here.device, config.parallel, config.train.precision)


def small_run(here: Here, case: Case, machinery: Machinery) -> Running:
    """Return a case's step on machinery of a case with the same layout."""
    config = case.config(here).resolved(here.world_size)
    rounds = torch.bfloat16 if case.precision == "bfloat16" else None
    return Running(config, replace(machinery, autocast_dtype=rounds), LARGER)


def batch_of(model: ModelConfig, samples: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels of all ranks, drawn evenly."""
    generator = torch.Generator().manual_seed(1)
    shape = (samples, model.seq_len)
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    return tokens, torch.randint(model.vocab_size, shape, generator=generator)


def logical(stack: PipelinedStack, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Return a local tensor by the names that one process has for it: of experts, each by its number."""
    assert isinstance(stack.model, MoEDecoder), "the small model is one"
    return stack.model.logical(name, tensor)


def settled(here: Here) -> RunConfig:
    """Return the run with what it leaves open decided in the plainest way."""
    given = here.config
    return replace(
        given,
        moe=replace(given.moe, dispatch=dispatch_of(given.moe)),
        optimizer=given.optimizer.settled(sharded=given.optimizer.is_sharded),
        output=replace(given.output, loads=False),
    )


def layout_of(here: Here, config: RunConfig) -> Layout:
    """Return the layout of a run. All ranks must call it together."""
    experts = config.moe.num_experts
    return Layout.build(config.parallel, here.world_size, here.info.rank, experts, here.node_size)


def given_machinery(here: Here) -> Machinery:
    """Build what the run runs on. All ranks must call it together."""
    config = here.config
    return build_machinery(layout_of(here, config), here.device, config.parallel, config.train.precision)


def given_run(here: Here, machinery: Machinery) -> Running:
    ran = Running(settled(here), machinery)
    set_learning_rate(ran.update.optimizer, 0.0)
    return ran
