"""One step on P ranks against one step of the reference: loss, gradients, norm, parameters afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from penstock.data import DataConfig
from penstock.decision import PlacementConfig, ScheduleConfig
from penstock.device import device_of
from penstock.features.sample_placement.feature import Prediction
from penstock.mesh import Group, Mesh, holders
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.plan.plan_config import PlanConfig
from penstock.runtime import Machinery, PipelinedStack, ShardedAdamW, clip_grad_norm_
from penstock.runtime.bounds import Passes, RowBounds
from penstock.runtime.features.sample_placement import Placer, SampleMoving, SamplePlacement
from penstock.runtime.machinery import build_lanes
from penstock.schedule import StepPlan
from penstock.sharding import Sharding, shardings_of
from penstock.step.shape import FORM_TOKENS, Recompute, TokenLayout
from penstock.topology import Layout, ParallelConfig
from penstock.topology.groups import Summation, TransportName
from penstock.train.assemble import build_machinery, build_optimizer, build_stack, first_plan
from penstock.train.config import OutputConfig, RunConfig, TrainConfig
from penstock.train.optimizer import OptimizerConfig
from tests.support.card import install
from tests.support.close import check_close
from tests.support.joining import joined
from tests.support.layers import module_layer, scattered_layer
from tests.support.reference import reference_loss
from tests.support.reference_moe import Weights
from tests.support.reference_step import adamw_step, cuts_batches, settings_of
from tests.support.searching import short_search

CPU = torch.device("cpu")
CLIP = 0.05
LEARNING_RATE = 1e-2
# A first AdamW step is g / (|g| + eps): with the usual tiny eps it is the sign of g, which turns the rounding
# of an almost-zero gradient into a full step. A larger eps keeps the comparison well-conditioned.
EPS = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step to compare.

    batch: samples of every rank (ranks of an tp group have the same). batches: of each tp group, where they
    differ. padding: some tokens are padding. module_experts: experts are modules of their own. node_size:
    ranks per emulated node. idle_expert, busy_experts: gets no tokens, get all of them. scattered: experts
    are on the ranks in another order than that of their numbers, in every layer another. tokens: what ranks
    of an tp group hold between blocks; the form of the MoE part is the schedule's. placer, prediction: how
    samples get their homes, where they move. carried: rows then bring their residual stream. sharded: the
    optimiser is, so a step leaves no gradients. clips: the optimiser does. recompute: what runs again before
    its backward. packed: samples have several documents each, which do not attend to each other. card: the
    ranks compute on a GPU that stands in for one, see `tests.support.card`. transport: how tensors of GPUs
    travel. summation: how they add parts of gradients. bounds: those of rows, where `moe.bound_factor` is
    set; the first step of a stack has none. late: ranks then know in backward whether they had rows enough.
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
    tp_size: int = 1
    etp_size: int = 1
    tokens: TokenLayout = "split"
    placer: Placer | None = None
    prediction: Prediction = "next_gate"
    carried: bool = True
    sharded: bool = False
    clips: bool = True
    recompute: Recompute = "none"
    packed: bool = False
    card: bool = False
    transport: TransportName = "direct"
    summation: Summation = "native"
    bounds: Literal["", "kept", "exceeded"] = ""
    late: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def holders(self) -> int:
        """Over how many ranks, or groups of shards, experts are spread."""
        return self.ep_size or holders(self.world_size, self.etp_size)

    @property
    def mesh(self) -> Mesh:
        """The dense view of the ranks."""
        return Mesh(world_size=self.world_size, tp_size=self.tp_size)

    @property
    def samples(self) -> tuple[int, ...]:
        """Of every tp group."""
        return self.batches or (self.batch,) * self.mesh.size(Group.DATA)

    def mine(self, rank: int) -> slice:
        """The samples of a rank in the whole batch."""
        place = self.mesh.place(rank, Group.DATA)
        before = sum(self.samples[:place])
        return slice(before, before + self.samples[place])

    @property
    def fixed_slots(self) -> bool:
        """Whether the number of rows does not depend on the routing."""
        return self.moe.capacity_factor is not None or self.moe.gate == "soft"

    @property
    def gate_shares(self) -> int:
        """Into how many parts the positions of a sample are cut of which each has slots of its own."""
        split = FORM_TOKENS[self.schedule.form] == "split"
        return self.tp_size if split and self.fixed_slots else 1

    @property
    def valid(self) -> Tensor | None:
        """Which tokens of the whole batch are no padding: unevenly many per sample, sometimes a whole one."""
        if not self.padding:
            return None
        length = self.model.seq_len
        generator = torch.Generator().manual_seed(self.seed + 2)
        ends = torch.randint(0, length + 1, (sum(self.samples), 1), generator=generator)
        ends[0] = length
        return torch.arange(length) < ends

    @property
    def documents(self) -> Tensor | None:
        """Where the document of every token begins, if samples are packed; of any lengths."""
        if not self.packed:
            return None
        shape = (sum(self.samples), self.model.seq_len)
        begins = torch.rand(shape, generator=torch.Generator().manual_seed(self.seed + 3)) < 0.3
        return (torch.arange(shape[1]) * begins).cummax(1).values

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            model=self.model,
            moe=self.moe,
            schedule=self.schedule,
            parallel=ParallelConfig(
                processes=self.world_size,
                ep_size=self.ep_size,
                tp_size=self.tp_size,
                etp_size=self.etp_size,
                tokens=self.tokens,
                ranks_per_node=self.node_size,
            ),
            data=DataConfig(batch_per_device=self.batch),
            optimizer=OptimizerConfig(
                lr=LEARNING_RATE,
                eps=EPS,
                zero_stage=1 if self.sharded else 0,
                clip_grad_norm=None if not self.clips else CLIP if self.sharded else 1.0,
            ),
            train=TrainConfig(seed=self.seed),
            placement=PlacementConfig(samples="none" if self.placer is None else "netmoe"),
            plan=PlanConfig(recompute=self.recompute),
            output=OutputConfig(loads=False),
        )


@dataclass(frozen=True)
class StepResult:
    """What a step left behind, by logical name; experts as `name.EXPERT`.

    parts: of the tensors that are parts of whole ones, which.
    """

    loss: float
    norm: float
    gradients: Weights
    parameters: Weights = field(default_factory=dict)
    executed_as_simulated: bool = True
    parts: dict[str, Sharding] = field(default_factory=dict)


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and labels of the whole batch of all ranks."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (sum(case.samples), case.model.seq_len)
    tokens = torch.randint(case.model.vocab_size, shape, generator=generator)
    labels = torch.randint(case.model.vocab_size, shape, generator=generator)
    if case.ignore_labels:  # unevenly over ranks: a mean of local means would be wrong
        labels[0, : shape[1] // 2] = -100
    return tokens, labels


def own_batch(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a rank's samples."""
    (tokens, labels), mine = batch_of(case), case.mine(rank)
    return tokens[mine], labels[mine]


def own_samples(
    rank: int, case: Case, device: torch.device = CPU
) -> tuple[list[Tensor | None], Tensor | None]:
    """Tokens, labels, numbers and validity of a rank's samples, and where their documents begin."""
    tokens, labels = batch_of(case)
    whole = tokens, labels, torch.arange(len(tokens)), case.valid, case.documents
    *batch, documents = (None if each is None else each[case.mine(rank)].to(device) for each in whole)
    return batch, documents


def gradients_of(model: nn.Module) -> Weights:
    """Copies of all gradients that there are, by the names of the model's parameters."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def prepare(stack: PipelinedStack, case: Case) -> None:
    """Larger weights than a fresh model has, so that every gradient matters; and the wanted routing."""
    with torch.no_grad():
        for name, parameter in stack.model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(6.0)
            elif parameter.dim() == 1:
                parameter.mul_(torch.linspace(0.7, 1.3, parameter.numel()).to(parameter.device))
            if name.endswith("embed_tokens.weight") and (case.busy_experts or case.idle_expert is not None):
                parameter[:, 0] += 0.5  # a direction that all tokens have, see below
            if name.endswith("gate.weight") and case.moe.kind != "soft":
                _steer(parameter, case)
    if isinstance(stack.bounds, RowBounds):
        _bound_rows(stack.bounds, stack.plan.shape.microbatches, case)


def _steer(gate_EM: Tensor, case: Case) -> None:
    if case.idle_expert is not None:
        gate_EM[case.idle_expert, 0] -= 4.0
    for expert in case.busy_experts:
        gate_EM[expert, 0] += 4.0


def _bound_rows(bounds: RowBounds, microbatches: int, case: Case) -> None:
    """Bound rows as if earlier steps had wanted all of them, or one of each expert."""
    bounds.late = case.late
    if not case.bounds:
        return
    positions = sum(order.num_experts for order in bounds.orders)
    most = case.model.seq_len * max(case.samples)
    rows = np.full(positions, most if case.bounds == "kept" else 1)
    for training in (True, False):
        bounds.history(Passes(microbatches, training)).use(rows)


def machinery(
    world_size: int,
    ep_size: int,
    rank: int,
    node_size: int = 0,
    *,
    card: bool = False,
    transport: TransportName = "direct",
    summation: Summation = "native",
    **shared: int,
) -> Machinery:
    """Groups and lanes of a rank; kept, since a pool runs many cases. Streams of a recorded device belong to
    one recording, so its lanes are made for each. shared: ranks that share attention, or every expert."""
    layout = Layout(world_size=world_size, ep_size=ep_size, rank=rank, node_size=node_size, **shared)  # type: ignore[arg-type]  # sizes
    recorded = device_of(CPU).is_gpu
    found = _machinery(layout, card, ParallelConfig(transport=transport, reduce_scatter=summation), recorded)
    return replace(found, lanes=build_lanes(CPU, found.transports.abort)) if recorded else found


@cache
def _machinery(layout: Layout, card: bool, parallel: ParallelConfig, recorded: bool) -> Machinery:
    del recorded  # such a device has other transports than a CPU
    return build_machinery(layout, install() if card else CPU, parallel, "float32")


def machinery_of(rank: int, case: Case) -> Machinery:
    """The same for a case."""
    found = machinery(
        case.world_size,
        case.holders,
        rank,
        case.node_size or 0,
        tp_size=case.tp_size,
        etp_size=case.etp_size,
        card=case.card,
        transport=case.transport,
        summation=case.summation,
    )
    return replace(found, layout=replace(found.layout, tokens=case.tokens))


def stack_of(rank: int, case: Case) -> PipelinedStack:
    found = machinery_of(rank, case)
    make_moe = partial(module_layer, case, found.layout) if case.module_experts else None
    if case.scattered and not case.module_experts:
        make_moe = partial(scattered_layer, case, found.layout)
    with short_search():  # here, too, where this process is the only rank
        stack = build_stack(case.config, found, case.dtype, make_moe)
        if not case.carried:
            stack.adopt(apart(stack, case))
    if case.placer is not None:
        stack.of(SamplePlacement).moving = SampleMoving(case.placer, case.prediction)
        stack.adopt(stack.plan)
    prepare(stack, case)
    return stack


def apart(stack: PipelinedStack, case: Case) -> StepPlan:
    """The plan of a step in which residual streams follow samples beside their rows."""
    shape = replace(stack.base_shape, carries_residual=False)
    return first_plan(case.config, stack.machinery.layout, shape, stack.gradients.sizes_bytes)


def run_step(rank: int, case: Case) -> StepResult:
    """One step on this rank, as a training loop would do it."""
    return result_of(stack_of(rank, case), rank, case)


def result_of(stack: PipelinedStack, rank: int, case: Case) -> StepResult:
    """The case's step by a stack that has it ready."""
    optimizer = build_optimizer(stack, case.config.optimizer)
    batch, documents = own_samples(rank, case, stack.machinery.device)
    loss = stack(*batch, documents_BL=documents)
    gradients: Weights = {}
    if isinstance(optimizer, ShardedAdamW):
        with optimizer.in_backward():
            loss.backward()
        norm = optimizer.norm
        optimizer.flush()
    else:
        loss.backward()
        gradients = gradients_of(stack.model)
        norm = clip_grad_norm_(stack, CLIP)
        optimizer.step()
    check_equal_values(stack)
    parameters = {n: p.detach().clone() for n, p in stack.model.named_parameters()}
    return StepResult(
        loss=loss.item(),
        norm=float(norm),
        gradients=logical(stack, {name: each.cpu() for name, each in gradients.items()}),
        parameters=logical(stack, {name: each.cpu() for name, each in parameters.items()}),
        executed_as_simulated=executed_as_planned(stack),
        parts=parts_of(stack),
    )


def check_equal_values(stack: PipelinedStack) -> None:
    """Ranks hold the same bits of what they share: a difference that rounding explains is an error, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stack.compare_values()


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
        moe = stack.parts.parts[int(name.split(".")[2])].moe
        assert moe is not None
        found.update(moe.by_number(name, tensor))
    return found


def parts_of(stack: PipelinedStack) -> dict[str, Sharding]:
    """Which parts of whole tensors this rank has, by logical name."""
    shardings = shardings_of(stack.model)
    local = {name: p for name, p in stack.model.named_parameters() if name in shardings}
    return {
        logical_name: shardings[name]
        for name, parameter in local.items()
        for logical_name in logical(stack, {name: parameter})
    }


def reference_step(case: Case) -> StepResult:
    """The same step by the reference, in one process."""
    return _reference_step(reference_case(case))


def reference_case(case: Case) -> Case:
    """What the reference computes. Of a layout it has only the shares of the gate."""
    flat = replace(case.moe, dispatch="flat")
    alone = replace(
        case,
        transport="direct",
        ep_size=None,
        node_size=None,
        moe=flat,
        scattered=False,
        etp_size=1,
        tokens="split",
        placer=None,
        sharded=False,
    )
    if case.gate_shares == 1:
        groups = case.mesh.size(Group.DATA)
        alone = replace(alone, world_size=groups, tp_size=1)
    return replace(alone, schedule=_pieces(case), recompute="none")


def _pieces(case: Case) -> ScheduleConfig:
    if cuts_batches(case):
        return ScheduleConfig(name="flowmoe", microbatches=case.schedule.microbatches)
    return ScheduleConfig(name="sequential")


def lone_stack(case: Case) -> PipelinedStack:
    """The whole model of a case, in one process."""
    sequential = ScheduleConfig(name="sequential")
    alone = replace(case, world_size=1, tp_size=1, ep_size=1, batches=(), schedule=sequential)
    return stack_of(0, alone)


@lru_cache(maxsize=16)
def _reference_step(case: Case) -> StepResult:
    (step,) = reference_steps(case, partial(adamw_step, config=case.config.optimizer))
    return step


def reference_steps(
    alone: Case,
    update: Callable[[Weights, Weights, float], Weights],
    steps: int = 1,
    change: Callable[[Weights], None] | None = None,
) -> Iterator[StepResult]:
    """Steps by the reference, of what `reference_case` says. update: makes the weights of the next one, from
    gradients and the scale by which they are clipped; `change` changes them then."""
    stack = lone_stack(alone)
    weights: Weights = dict(stack.model.named_parameters())
    for _ in range(steps):
        weights = {n: w.detach().clone().requires_grad_() for n, w in weights.items()}
        loss = reference_loss(weights, settings_of(alone), *batch_of(alone))
        loss.backward()
        gradients = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()}
        norm = float(torch.cat([g.flatten().double() for g in gradients.values()]).norm())
        weights = update(weights, gradients, min(1.0, CLIP / (norm + 1e-6)))
        after = {name: weight.clone() for name, weight in weights.items()}
        yield StepResult(loss.item(), norm, logical(stack, gradients), logical(stack, after))
        if change is not None:
            change(weights)


def merge(results: list[StepResult]) -> StepResult:
    """One result of all ranks; asserts that what should be equal on several ranks is."""
    first = results[0]
    for result in results:
        assert result.loss == first.loss, "the loss differs between ranks"
        assert result.norm == first.norm, "the gradient norm differs between ranks"
        assert result.executed_as_simulated, "a lane ran another order than its list"
    gradients, parameters = (
        joined([(getattr(result, what), result.parts) for result in results])
        for what in ("gradients", "parameters")
    )
    return replace(first, gradients=gradients, parameters=parameters)


def check_parity(pools: Any, case: Case) -> StepResult:
    """Run the case on real ranks and compare with the reference."""
    result = merge(pools(case.world_size).run(run_step, case))
    check_result(result, case)
    return result


def check_result(result: StepResult, case: Case, expected: StepResult | None = None) -> None:
    """Compare what all ranks have together with the reference, or with what it `expected` of another step."""
    expected = expected or reference_step(case)
    tolerance = 1e-10 if case.double else 1e-5
    assert abs(result.loss - expected.loss) <= tolerance * abs(expected.loss), "loss"
    assert abs(result.norm - expected.norm) <= tolerance * expected.norm, "gradient norm"
    for what in ("parameters",) if case.sharded else ("gradients", "parameters"):
        ours, theirs = getattr(result, what), getattr(expected, what)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            # Attention over one token has gradients that cancel to zero, or to the rounding of their terms.
            check_close(ours[name], tensor, tolerance, f"{what} of {name}", least=1e-4 * expected.norm)
