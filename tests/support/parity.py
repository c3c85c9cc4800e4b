"""One step on P ranks against one step of the reference: loss, gradients, norm, parameters afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from penstock.cost import split_sizes
from penstock.decision import ScheduleConfig
from penstock.dispatch import DISPATCHES
from penstock.models import ModelConfig
from penstock.moe import ModuleExperts, MoEConfig, MoELayer
from penstock.moe.build import GATES, build_layer, build_order, build_shared, dispatch_of
from penstock.runtime import Machinery, PipelinedStack
from penstock.schedule import penstock as searching
from penstock.topology import Layout, ParallelConfig
from penstock.train.assemble import build_machinery, build_stack
from penstock.train.clip import clip_grad_norm
from penstock.train.config import RunConfig, TrainConfig
from penstock.train.corpus import DataConfig
from penstock.train.optimizer import OptimizerConfig, build_adamw
from tests.support.placed import placement_of
from tests.support.reference import Settings, reference_loss
from tests.support.reference_moe import Weights

CLIP = 0.05
LEARNING_RATE = 1e-2
# A first AdamW step is g / (|g| + eps): with the usual tiny eps it is the sign of g, which turns the rounding
# of an almost-zero gradient into a full step. A larger eps keeps the comparison well-conditioned.
EPS = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step to compare.

    batch: samples of every rank. batches: of each rank, where they differ. padding: some
    tokens are padding. module_experts: experts are modules of their own. node_size: ranks per emulated node.
    idle_expert, busy_experts: gets no tokens, get all of them. scattered: experts are on the ranks in another
    order than that of their numbers, in every layer another.
    """

    world_size: int
    ep_size: int | None
    schedule: ScheduleConfig
    model: ModelConfig
    moe: MoEConfig
    batch: int
    batches: tuple[int, ...] = ()
    seed: int = 0
    double: bool = False
    ignore_labels: bool = False
    padding: bool = False
    module_experts: bool = False
    node_size: int | None = None
    idle_expert: int | None = None
    busy_experts: tuple[int, ...] = ()
    scattered: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def samples(self) -> tuple[int, ...]:
        """Of every rank."""
        return self.batches or (self.batch,) * self.world_size

    def mine(self, rank: int) -> slice:
        """The samples of a rank in the whole batch."""
        before = sum(self.samples[:rank])
        return slice(before, before + self.samples[rank])

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            model=self.model,
            moe=self.moe,
            schedule=self.schedule,
            parallel=ParallelConfig(
                processes=self.world_size, ep_size=self.ep_size, ranks_per_node=self.node_size
            ),
            data=DataConfig(batch_per_device=self.batch),
            optimizer=OptimizerConfig(lr=LEARNING_RATE, eps=EPS),
            train=TrainConfig(seed=self.seed),
        )


@dataclass(frozen=True)
class StepResult:
    """What a step left behind, by logical name; experts as `name.EXPERT`."""

    loss: float
    norm: float
    gradients: Weights
    parameters: Weights
    executed_as_simulated: bool


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and labels of the whole batch of all ranks."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (sum(case.samples), case.model.seq_len)
    tokens = torch.randint(case.model.vocab_size, shape, generator=generator)
    labels = torch.randint(case.model.vocab_size, shape, generator=generator)
    if case.ignore_labels:  # unevenly over ranks: a mean of local means would be wrong
        labels[0, : shape[1] // 2] = -100
    return tokens, labels


def valid_of(case: Case) -> Tensor | None:
    """Which tokens of the whole batch are no padding: unevenly many per sample, sometimes a whole sample."""
    if not case.padding:
        return None
    length = case.model.seq_len
    generator = torch.Generator().manual_seed(case.seed + 2)
    ends = torch.randint(0, length + 1, (sum(case.samples), 1), generator=generator)
    ends[0] = length
    return torch.arange(length) < ends


def prepare(stack: PipelinedStack, case: Case) -> None:
    """Larger weights than a fresh model has, so that every gradient matters; and the wanted routing."""
    with torch.no_grad():
        for name, parameter in stack.model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6.0)
            if name.endswith("feed_forward_norm.bias"):
                parameter.fill_(0.5)  # makes the gate's row sums count, see below
            if name.endswith("gate.weight") and case.moe.kind != "soft":
                _steer(parameter, case)


def _steer(gate_EM: Tensor, case: Case) -> None:
    if case.idle_expert is not None:
        gate_EM[case.idle_expert] -= 2.0
    for expert in case.busy_experts:
        gate_EM[expert] += 2.0


def machinery(world_size: int, ep_size: int, rank: int, node_size: int = 0) -> Machinery:
    """Groups and lanes of a rank; kept, since a pool runs many cases."""
    return _machinery(world_size, ep_size, rank, node_size)


@cache
def _machinery(world_size: int, ep_size: int, rank: int, node_size: int) -> Machinery:
    layout = Layout(world_size=world_size, ep_size=ep_size, rank=rank, node_size=node_size)
    return build_machinery(layout, torch.device("cpu"), ParallelConfig(), "float32")


def stack_of(rank: int, case: Case) -> PipelinedStack:
    ep_size = case.ep_size or case.world_size
    found = machinery(case.world_size, ep_size, rank, case.node_size or 0)
    place = found.layout.ep_rank
    make_moe = partial(module_layer, case, ep_size, place) if case.module_experts else None
    if case.scattered and not case.module_experts:
        make_moe = partial(scattered_layer, case, ep_size, place)
    with short_search():
        stack = build_stack(case.config, found, case.dtype, make_moe)
    prepare(stack, case)
    return stack


@contextmanager
def short_search() -> Iterator[None]:
    """Every order must give the same step, so the search for a good one stops early, on all ranks alike."""
    most = searching.MOST_EVALUATIONS
    searching.MOST_EVALUATIONS = searching.LEAST_EVALUATIONS
    try:
        yield
    finally:
        searching.MOST_EVALUATIONS = most


def module_layer(case: Case, ep_size: int, ep_rank: int, layer: int) -> MoELayer:
    """The case's layer with experts that nobody knows."""
    config, hidden = case.moe, case.model.hidden_size
    return MoELayer(
        gate=GATES[config.gate](hidden, config, layer),
        order=build_order(config, ep_size),
        expert=ModuleExperts(partial(Tanh, hidden), config.num_experts // ep_size),
        dispatch=DISPATCHES[dispatch_of(config)],
        shared=build_shared(hidden, config),
        ep_size=ep_size,
        ep_rank=ep_rank,
        placement=placement_of(config.num_experts, ep_size, layer, scattered=case.scattered),
    )


def scattered_layer(case: Case, ep_size: int, ep_rank: int, layer: int) -> MoELayer:
    """The case's layer, with experts elsewhere than by default."""
    placement = placement_of(case.moe.num_experts, ep_size, layer, scattered=True)
    place = {"ep_size": ep_size, "ep_rank": ep_rank, "layer": layer}
    return build_layer(case.model.hidden_size, case.moe, **place, placement=placement)


class Tanh(nn.Module):
    """An expert of one matrix, with a bias that every process would draw for itself."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.rand(hidden_size))

    def forward(self, rows_RM: Tensor) -> Tensor:
        return torch.tanh(rows_RM @ self.weight.T + self.bias)


def run_step(rank: int, case: Case) -> StepResult:
    """One step on this rank, as a training loop would do it."""
    return result_of(stack_of(rank, case), rank, case)


def result_of(stack: PipelinedStack, rank: int, case: Case) -> StepResult:
    """The case's step by a stack that has it ready."""
    tokens, labels = batch_of(case)
    mine = case.mine(rank)
    optimizer = build_adamw(stack.model.named_parameters(), case.config.optimizer)
    valid = valid_of(case)
    ids = torch.arange(len(tokens))
    loss = stack(tokens[mine], labels[mine], ids[mine], None if valid is None else valid[mine])
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in stack.model.named_parameters() if p.grad is not None}
    norm = clip_grad_norm(stack, CLIP)
    optimizer.step()
    parameters = {n: p.detach().clone() for n, p in stack.model.named_parameters()}
    return StepResult(
        loss=loss.item(),
        norm=float(norm),
        gradients=logical(stack, gradients),
        parameters=logical(stack, parameters),
        executed_as_simulated=executed_as_planned(stack),
    )


def executed_as_planned(stack: PipelinedStack) -> bool:
    """Whether every lane ran exactly its list, in its order."""
    ran = sorted(stack.records(), key=lambda record: record.start_s)
    lanes = stack.plan.schedule.lanes
    return all([r.task for r in ran if r.lane is lane] == list(order) for lane, order in lanes.items())


def logical(stack: PipelinedStack, tensors: Weights) -> Weights:
    """Local names to names that do not depend on the layout."""
    found: Weights = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        moe = stack.parts.parts[int(name.split(".")[1])].moe
        assert moe is not None
        found.update(moe.by_number(name, tensor))
    return found


def reference_step(case: Case) -> StepResult:
    """The same step by the reference, in one process. Of a schedule it has only the pieces to know."""
    dispatch = replace(case.moe, dispatch="flat")
    alone = replace(case, ep_size=None, node_size=None, moe=dispatch, scattered=False)
    return _reference_step(replace(alone, schedule=_pieces(case)))


def _pieces(case: Case) -> ScheduleConfig:
    if case.schedule.name in ("flowmoe", "penstock"):
        return ScheduleConfig(name="flowmoe", microbatches=case.schedule.microbatches)
    return ScheduleConfig(name="sequential")


@lru_cache(maxsize=16)
def _reference_step(case: Case) -> StepResult:
    alone = replace(case, world_size=1, ep_size=1, batches=(), schedule=ScheduleConfig(name="sequential"))
    stack = stack_of(0, alone)
    weights = {n: p.detach().clone().requires_grad_() for n, p in stack.model.named_parameters()}
    tokens, labels = batch_of(case)
    loss = reference_loss(weights, settings_of(case), tokens, labels)
    loss.backward()
    gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in weights.items()}
    norm = torch.cat([g.flatten().double() for g in gradients.values()]).norm()
    after = _adamw(weights, gradients, min(1.0, CLIP / (float(norm) + 1e-6)), case.config.optimizer)
    return StepResult(loss.item(), float(norm), logical(stack, gradients), logical(stack, after), True)


def settings_of(case: Case) -> Settings:
    pieces = case.schedule.microbatches if case.schedule.name in ("flowmoe", "penstock") else 1
    fixed = case.moe.capacity_factor is not None or case.moe.gate == "soft"
    cuts: list[list[int]] = []
    seats: list[int] = []
    for rank, batch in enumerate(case.samples):
        sizes = split_sizes(max(case.samples) if fixed else batch, pieces)
        samples = iter(range(case.mine(rank).start, case.mine(rank).stop))
        cuts += [list(islice(samples, size)) for size in sizes]
        seats += sizes
    layers = range(case.model.num_layers)
    groups, limit, valid = case.moe.num_groups, case.moe.group_top_k, valid_of(case)
    return Settings(
        num_layers=case.model.num_layers,
        num_heads=case.model.num_heads,
        moe_layers=frozenset(layer for layer in layers if case.model.is_moe(layer)),
        num_experts=case.moe.num_experts,
        top_k=case.moe.top_k,
        swiglu=case.moe.expert == "swiglu",
        renormalise=case.moe.top_k > 1 if case.moe.norm_topk_prob is None else case.moe.norm_topk_prob,
        gate=case.moe.gate,
        scale=case.moe.routed_scaling_factor,
        groups=None if groups is None or limit is None else (groups, limit),
        slots_per_expert=case.moe.slots_per_expert,
        modules=case.module_experts,
        seed=case.seed,
        padding=None if valid is None else ~valid,
        capacity_factor=case.moe.capacity_factor,
        min_capacity=case.moe.min_capacity,
        aux_coeff=case.moe.aux_loss_coeff,
        aux_group=case.moe.aux_loss_group,
        z_coeff=case.moe.z_loss_coeff,
        pieces=cuts,
        seats=seats,
    )


def _adamw(weights: Weights, gradients: Weights, scale: float, config: OptimizerConfig) -> Weights:
    """The first AdamW step written out: both moments are bias-corrected back to g and g^2."""
    after: Weights = {}
    for name, weight in weights.items():
        g = gradients[name] * scale
        decays = weight.dim() >= 2 and "embed" not in name
        decayed = weight * (1 - config.lr * config.weight_decay) if decays else weight
        after[name] = (decayed - config.lr * g / (g.abs() + config.eps)).detach()
    return after


def merge(results: list[StepResult]) -> StepResult:
    """One result of all ranks; asserts that what should be equal on several ranks is."""
    first = results[0]
    gradients, parameters = dict(first.gradients), dict(first.parameters)
    for result in results:
        assert result.loss == first.loss, "the loss differs between ranks"
        assert result.norm == first.norm, "the gradient norm differs between ranks"
        assert result.executed_as_simulated, "a lane ran another order than its list"
        for mine, all_ranks in ((result.gradients, gradients), (result.parameters, parameters)):
            for name, tensor in mine.items():
                assert torch.equal(all_ranks.setdefault(name, tensor), tensor), (
                    f"{name} differs between ranks"
                )
    return StepResult(first.loss, first.norm, gradients, parameters, True)


def check_parity(pools: Any, case: Case) -> StepResult:
    """Run the case on real ranks and compare with the reference."""
    result = merge(pools(case.world_size).run(run_step, case))
    check_result(result, case)
    return result


def check_result(result: StepResult, case: Case) -> None:
    """Compare what all ranks have together with the reference."""
    expected = reference_step(case)
    tolerance = 1e-10 if case.double else 1e-5
    assert abs(result.loss - expected.loss) <= tolerance * abs(expected.loss), "loss"
    assert abs(result.norm - expected.norm) <= tolerance * expected.norm, "gradient norm"
    for what in ("gradients", "parameters"):
        ours, theirs = getattr(result, what), getattr(expected, what)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            check_close(ours[name], tensor, tolerance, f"{what} of {name}")


def check_close(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    """Relative norm of the difference; a tensor that should be zero must be zero to rounding."""
    difference, size = float((ours - theirs).double().norm()), float(theirs.double().norm())
    assert difference <= tolerance * max(size, 1e-7), f"{what}: {difference:.3g} against {size:.3g}"


def digest(weights: Weights) -> str:
    """A hash of the bits of all tensors."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return total.hexdigest()
