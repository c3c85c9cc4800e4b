"""The runs whose steps stages take: the one that was given to the command, and a small one.

The small model takes seconds to build, and has every part of a step. The given run has its own model, and an
optimiser of learning rate 0, so that every step does the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from penstock.data import DataConfig
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.doctor.gpu.here import Here
from penstock.models import ModelConfig, MoEDecoder
from penstock.moe import MoEConfig
from penstock.moe.build import dispatch_of
from penstock.plan.plan_config import PlanConfig
from penstock.runtime import Machinery, PipelinedStack
from penstock.topology import Layout, find_node_size
from penstock.train.assemble import build_machinery, build_optimizer, build_stack
from penstock.train.config import OutputConfig, Precision, RunConfig, TrainConfig
from penstock.train.optimizer import OptimizerConfig, build_update, set_learning_rate

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
    """A way to run the small model. name: for people. parallel, moe, plan, placement, optimizer: settings of
    those sections that differ from the usual ones."""

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

    def layout(self, here: Here, config: RunConfig) -> Layout:
        node_size = find_node_size(here.control, here.info.local_rank)
        experts = config.moe.num_experts
        return Layout.build(config.parallel, here.world_size, here.info.rank, experts, node_size)


class Running:
    """A stack with its optimiser and one batch, on this rank. factor: on all fresh matrices."""

    def __init__(self, config: RunConfig, machinery: Machinery, factor: float = 1.0) -> None:
        self.stack = build_stack(config, machinery)
        with torch.no_grad():
            for parameter in self.stack.model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(factor)
        optimizer = build_optimizer(self.stack, config.optimizer)
        self.update = build_update(self.stack, optimizer, config.optimizer)
        layout, samples = machinery.layout, config.data.batch_per_device
        mine = slice(samples * layout.dp_rank, samples * (layout.dp_rank + 1))
        tokens, labels = batch_of(config.model, samples * layout.dp_size)
        numbers = torch.arange(len(tokens))
        self._batch = tuple(each[mine].to(machinery.device) for each in (tokens, labels, numbers))

    def step(self, number: int = 0) -> tuple[Tensor, Tensor]:
        """Run a whole step; return its loss and the norm of its gradients, on the device."""
        loss = self.stack(*self._batch)
        norm = self.update.backward(loss, number + 1)
        self.update.apply(accepted=True)
        return loss.detach(), norm

    def rehearse(self) -> None:
        """Run a pass whose gradients are thrown away: where experts move and how many rows they get follows
        from the loads of a pass before."""
        self.stack(*self._batch).backward()
        self.stack.model.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        """Return copies of the parameters on the host, as every next step finds them."""
        self.update.flush()
        return {name: each.detach().cpu().clone() for name, each in self.stack.model.named_parameters()}


def small_machinery(here: Here, case: Case) -> Machinery:
    """Build what a case runs on. All ranks must call it together."""
    config = case.config(here).resolved(here.world_size)
    layout = case.layout(here, config)
    return build_machinery(layout, here.device, config.parallel, config.train.precision)


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


def given_layout(here: Here) -> Layout:
    """Return the layout of the run. All ranks must call it together."""
    node_size = find_node_size(here.control, here.info.local_rank)
    experts = here.config.moe.num_experts
    return Layout.build(here.config.parallel, here.world_size, here.info.rank, experts, node_size)


def given_machinery(here: Here) -> Machinery:
    """Build what the run runs on. All ranks must call it together."""
    config = here.config
    return build_machinery(given_layout(here), here.device, config.parallel, config.train.precision)


def given_run(here: Here, machinery: Machinery) -> Running:
    ran = Running(settled(here), machinery)
    set_learning_rate(ran.update.optimizer, 0.0)
    return ran
