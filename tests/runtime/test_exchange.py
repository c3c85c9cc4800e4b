"""The MoE layer with ExpertParallel under DistributedDataParallel, on real ranks.

A training step is compared with one process that holds all experts, sees the batch of every rank, and trains
on the mean over ranks. That process runs the layer alone, which tests/moe/test_alone.py compares with loops.
Four ranks are two nodes of two for hierarchical dispatches; two ranks are two nodes of one.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.config import ConfigError
from penstock.dispatch import DISPATCHES
from penstock.moe import (
    EinsumOrder,
    ExpertBias,
    ExpertChoiceGate,
    Experts,
    Gate,
    GeluExperts,
    Hook,
    IndexOrder,
    MergedOrder,
    ModuleExperts,
    MoELayer,
    Order,
    SharedExpert,
    SigmoidGate,
    SoftmaxGate,
    SortOrder,
    SwiGLUExperts,
    update_expert_biases,
)
from penstock.moe.config import BalanceGroup
from penstock.moe.layer import LayerLosses
from penstock.runtime.exchange import ExpertParallel, ignore_experts
from tests.support.ranks import Pools

IN, HIDDEN, OUT, EXPERTS, CHOICES = 4, 6, 3, 8, 3
SAMPLES, LENGTH = 2, 5
AUX, Z, RATE, LEARNING_RATE = 0.3, 0.07, 0.25, 0.1
CAPACITY = {"capacity_factor": 0.75, "min_capacity": 1}
TOLERANCE = 1e-10

ACCEPTED = [
    *product(["softmax", "sigmoid"], ["sort", "merged", "index", "einsum"]),
    ("expert_choice", "index"),
    ("expert_choice", "einsum"),
]
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step.

    ep_size: none = all ranks. node: ranks per node. passes: accumulated before the step. samples: of each
    rank, if not all have equally many. idle: experts that no token of the first rank likes.
    """

    world: int
    ep_size: int | None = None
    node: int | None = None
    gate: str = "softmax"
    order: str = "sort"
    dispatch: str = "flat"
    experts: str = "gelu"
    balance: BalanceGroup = "global"
    padded: bool = False
    hooked: bool = False
    reentrant: bool | None = None
    passes: int = 1
    no_sync: bool = False
    samples: tuple[int, ...] = ()
    idle: tuple[int, ...] = ()
    prepare: Callable[[Model], Model] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of every rank."""
        return self.samples or (SAMPLES,) * self.world


@dataclass(frozen=True)
class Step:
    """What a step left, by names that do not depend on the layout; experts as `name.EXPERT`."""

    loss: float
    gradients: Tensors
    parameters: Tensors
    bias: list[float]


class Model(nn.Sequential):
    """Linear, MoE layer, Linear; hands the mask on to the layer, and its losses with the output."""

    reentrant: bool | None = None

    @property
    def layer(self) -> MoELayer:
        layer = self[1]
        assert isinstance(layer, MoELayer)
        return layer

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, LayerLosses]:
        def run(h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            out, losses = self[1](h, valid), self.layer.losses
            assert losses is not None
            return out, losses.balance, losses.z

        h = self[0](x)
        made = run(h) if self.reentrant is None else checkpoint(run, h, use_reentrant=self.reentrant)
        return self[2](made[0]), LayerLosses(*made[1:])


class Bent(Hook):
    """Something that is not linear, at every place."""

    def before_dispatch(self, rows_RM: Tensor) -> Tensor:
        return rows_RM * 2

    def after_dispatch(self, rows_RM: Tensor) -> Tensor:
        return rows_RM.tanh()

    def before_combine(self, rows_RM: Tensor) -> Tensor:
        return rows_RM.sinh()

    def after_combine(self, rows_RM: Tensor) -> Tensor:
        return rows_RM.square()


def gate_of(case: Case) -> Gate:
    if case.gate == "expert_choice":
        return ExpertChoiceGate(HIDDEN, EXPERTS, top_k=CHOICES, **CAPACITY)  # type: ignore[arg-type]
    if case.gate == "sigmoid":
        return SigmoidGate(HIDDEN, EXPERTS, CHOICES, bias=ExpertBias(EXPERTS, RATE))
    return SoftmaxGate(HIDDEN, EXPERTS, CHOICES)


def order_of(case: Case, ep_size: int) -> Order:
    if case.order == "merged":
        return MergedOrder(EXPERTS, CHOICES, ep_size)
    if case.order == "sort":
        return SortOrder(EXPERTS)
    made = IndexOrder if case.order == "index" else EinsumOrder
    return made(EXPERTS, **CAPACITY)  # type: ignore[arg-type]  # a table of settings


def experts_of(case: Case, local: int) -> Experts:
    if case.experts == "module":
        return ModuleExperts(lambda: nn.Linear(HIDDEN, HIDDEN), local)
    return (SwiGLUExperts if case.experts == "swiglu" else GeluExperts)(HIDDEN, 5, local)


def model_of(case: Case, exchange: ExpertParallel | None) -> Model:
    """The model with this rank's experts; every tensor is drawn by its name in the whole model."""
    ep_size = 1 if exchange is None else exchange.ep_size
    layer = MoELayer(
        gate=gate_of(case),
        order=order_of(case, ep_size),
        expert=experts_of(case, EXPERTS // ep_size),
        dispatch=DISPATCHES[case.dispatch],
        hooks=(Bent(),) if case.hooked else (),
        shared=SharedExpert(GeluExperts(HIDDEN, 3, 1)),
        exchange=exchange,
        balance=case.balance,
    )
    model = Model(nn.Linear(IN, HIDDEN), layer, nn.Linear(HIDDEN, OUT)).double()
    model.reentrant = case.reentrant if exchange is not None else None
    for name, tensor in logical(model, dict(model.named_parameters())).items():
        tensor.detach().copy_(numbers(*tensor.shape, seed=zlib.crc32(name.encode())))
    return model


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logical(model: Model, tensors: Tensors) -> Tensors:
    """Names in the whole model; what belongs to experts cut into them."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith("1.experts."):
            found[name] = tensor
            continue
        for stem, number, part in model.layer.experts.split(name, tensor):
            found[f"{stem}.{model.layer.first_expert + number}"] = part
    return found


def batch(case: Case, turn: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and which tokens are no padding, of one rank in one pass."""
    size = case.sizes[rank]
    x = numbers(size, LENGTH, IN, seed=100 * turn + rank)
    if case.idle and rank == 0:
        x = torch.zeros_like(x)  # all tokens alike: they choose the same experts
    ends = torch.randint(1, LENGTH + 1, (size, 1), generator=torch.Generator().manual_seed(rank + turn))
    valid = torch.arange(LENGTH) < (ends if case.padded else torch.full_like(ends, LENGTH))
    return x, numbers(size, LENGTH, OUT, seed=999 + turn), valid


def task_loss(out: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """A mean over one rank's tokens."""
    square = (out - target).square().mean(-1) * valid
    return square.sum() / valid.sum().clamp(min=1)


# On the ranks


@cache
def exchange_of(ep_size: int | None, node: int | None) -> ExpertParallel:
    """Kept, since a pool runs many cases."""
    return ExpertParallel(num_experts=EXPERTS, ep_size=ep_size, ranks_per_node=node)


def train_step(rank: int, case: Case) -> Step:
    model = model_of(case, exchange_of(case.ep_size, case.node))
    if case.prepare is not None:
        model = case.prepare(model)
    wrapped = DistributedDataParallel(ignore_experts(model))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    total = 0.0
    for turn in range(case.passes):
        last = turn == case.passes - 1
        with wrapped.no_sync() if case.no_sync and not last else nullcontext():
            loss = rank_loss(wrapped, batch(case, turn, rank))
            loss.backward()
        total += loss.item()
        if case.passes > 1:
            evaluate(wrapped, batch(case, 7, rank))
    optimizer.step()
    return finished(model, total)


def rank_loss(wrapped: nn.Module, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, target, valid = data
    out, losses = wrapped(x, None if valid.all() else valid)
    loss: Tensor = task_loss(out, target, valid) + AUX * losses.balance + Z * losses.z
    return loss


def evaluate(model: nn.Module, data: tuple[Tensor, Tensor, Tensor]) -> None:
    model.eval()
    with torch.no_grad():
        model(data[0])
    model.train()


def finished(model: Model, loss: float) -> Step:
    """What is left behind `optimizer.step()`; moves the bias."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    update_expert_biases(model)
    bias = model.layer.gate.bias
    return Step(
        loss,
        logical(model, {name: gradient.clone() for name, gradient in gradients.items()}),
        logical(model, {name: p.detach().clone() for name, p in model.named_parameters()}),
        [] if bias is None else bias.value_E.tolist(),
    )


# The reference


def reference(case: Case) -> Step:
    model = model_of(replace(case, dispatch="flat"), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    total = 0.0
    for turn in range(case.passes):
        loss = mean_loss(model, case, [batch(case, turn, rank) for rank in range(case.world)])
        loss.backward()
        total += loss.item()
    for parameter in model.parameters():
        if parameter.grad is None:  # a module expert without rows
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return finished(model, total)


def mean_loss(model: Model, case: Case, data: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Capacity counts per rank, so the layer runs by rank; balance is judged over what its group says."""
    made = [(model(x, valid), target, valid) for x, target, valid in data]
    loss = torch.stack([task_loss(out, target, valid) for (out, _), target, valid in made]).mean()
    _, whole = model(torch.cat([x for x, _, _ in data]), torch.cat([valid for _, _, valid in data]))
    balance = whole.balance
    if case.balance == "microbatch":
        counts = torch.stack([valid.sum() for _, _, valid in made])
        balance = (torch.stack([losses.balance for (_, losses), _, _ in made]) * counts).sum() / counts.sum()
    total: Tensor = loss + AUX * balance + Z * whole.z
    return total


def check(ranks: Pools, case: Case) -> list[Step]:
    """Compare with the reference; what several ranks hold must be equal to the bit."""
    steps, wanted = ranks(case.world).run(train_step, case), reference(case)
    assert sum(step.loss for step in steps) / case.world == pytest.approx(wanted.loss, rel=TOLERANCE)
    for what in ("gradients", "parameters"):
        found: Tensors = {}
        for step in steps:
            for name, tensor in getattr(step, what).items():
                assert torch.equal(found.setdefault(name, tensor), tensor), f"{what} of {name} differ by rank"
        expected = getattr(wanted, what)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            difference = float((found[name] - tensor).norm())
            assert difference <= TOLERANCE * max(float(tensor.norm()), 1e-6), (
                f"{what} of {name}: {difference}"
            )
    assert all(step.bias == wanted.bias for step in steps)
    return steps


# Training steps


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(("gate", "order"), ACCEPTED)
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_equals_one_process(ranks: Pools, world: int, gate: str, order: str, dispatch: str) -> None:
    check(ranks, Case(world=world, node=world // 2, gate=gate, order=order, dispatch=dispatch))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ep_size", "node"), [(2, 1, None), (4, 2, None), (4, 2, 1), (4, 1, None)])
@pytest.mark.parametrize(("gate", "order"), ACCEPTED)
def test_replicas_of_experts(
    ranks: Pools, gate: str, order: str, world: int, ep_size: int, node: int | None
) -> None:
    """`check` sees to it that replicas have the same gradients and parameters."""
    for dispatch in DISPATCHES if node else ("flat",):
        check(ranks, Case(world=world, ep_size=ep_size, node=node, gate=gate, order=order, dispatch=dispatch))


@pytest.mark.slow
@pytest.mark.parametrize("balance", ["global", "sequence", "microbatch"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ep_size", [4, 2])
def test_balance_is_judged_over_its_group(
    ranks: Pools, ep_size: int, padded: bool, balance: BalanceGroup
) -> None:
    for gate, order in (("softmax", "sort"), ("sigmoid", "merged"), ("softmax", "index")):
        case = Case(world=4, ep_size=ep_size, gate=gate, order=order, balance=balance, padded=padded)
        check(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["swiglu", "module"])
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("ep_size", [4, 2])
def test_other_experts_and_hooks(ranks: Pools, ep_size: int, hooked: bool, experts: str) -> None:
    for order in ("sort", "einsum") if hooked else ("sort", "merged", "einsum"):
        check(ranks, Case(world=4, ep_size=ep_size, order=order, experts=experts, hooked=hooked))


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["gelu", "module"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_that_idle_on_one_rank_do_not_stop_the_others(
    ranks: Pools, ep_size: int, experts: str
) -> None:
    """A replica without a row takes part in the sum over replicas all the same."""
    for order in ("sort", "merged"):
        check(ranks, Case(world=2, ep_size=ep_size, order=order, experts=experts, idle=(0,)))


@pytest.mark.slow
@pytest.mark.parametrize("samples", [(3, 1, 2, 1), (2, 0, 1, 0)])
@pytest.mark.parametrize("ep_size", [4, 2])
@pytest.mark.parametrize("order", ["sort", "merged"])
def test_ranks_may_have_different_numbers_of_tokens(
    ranks: Pools, order: str, ep_size: int, samples: tuple[int, ...]
) -> None:
    """Or none at all."""
    for dispatch in DISPATCHES if ep_size == 4 else ("flat",):
        check(
            ranks,
            Case(world=4, ep_size=ep_size, node=2, order=order, dispatch=dispatch, samples=samples),
        )


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("ep_size", "experts"), [(4, "gelu"), (2, "module")])
def test_checkpoint_around_the_layer(ranks: Pools, ep_size: int, experts: str, reentrant: bool) -> None:
    for gate, order in ACCEPTED:
        case = Case(world=4, ep_size=ep_size, gate=gate, order=order, experts=experts, reentrant=reentrant)
        check(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("ep_size", [4, 2])
def test_accumulated_passes_and_evaluation_between(ranks: Pools, ep_size: int, no_sync: bool) -> None:
    """The bias moves by what all ranks trained on; DDP, which hands out buffers, must leave the counts."""
    for gate in ("softmax", "sigmoid"):
        steps = check(ranks, Case(world=4, ep_size=ep_size, gate=gate, passes=3, no_sync=no_sync))
        assert (len(set(steps[0].bias)) > 1) == (gate == "sigmoid")


def copied(model: Model) -> Model:
    """A copy behind a pass: hooks on parameters and tags would be lost."""
    model(numbers(1, LENGTH, IN, seed=5))
    return copy.deepcopy(model)


def assigned(model: Model) -> Model:
    """Other parameters in the same places."""
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    return model


def from_nowhere(model: Model) -> Model:
    """From the meta device, as large models are built."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to("meta").to_empty(device="cpu").load_state_dict(state)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [copied, assigned, from_nowhere])
def test_other_parameter_objects_train_alike(ranks: Pools, prepare: Callable[[Model], Model]) -> None:
    for ep_size in (4, 2):
        check(ranks, Case(world=4, ep_size=ep_size, prepare=prepare))


@pytest.mark.slow
def test_one_rank_alone_in_its_group(ranks: Pools) -> None:
    for gate, order in ACCEPTED:
        check(ranks, Case(world=1, gate=gate, order=order))


# What surrounds a step


def replicas_after(rank: int, ep_size: int) -> Tensors:
    """Every rank draws other numbers; DDP and `ignore_experts` see to the rest."""
    case = Case(world=4, ep_size=ep_size, experts="module")
    model = model_of(case, exchange_of(ep_size, None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape, seed=rank))
    for number, expert in enumerate(model.layer.experts.get_submodule("expert_modules").children()):
        expert.register_buffer("seen", torch.tensor([rank, number]))
        expert.register_buffer("on", torch.tensor(rank % 2 == 1))
    wrapped = DistributedDataParallel(ignore_experts(model))
    rank_loss(wrapped, batch(case, 0, rank)).backward()  # a forward hands out buffers
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return logical(model, state)


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [4, 2, 1])
def test_replicas_start_equal_and_experts_do_not(ranks: Pools, ep_size: int) -> None:
    local, found = EXPERTS // ep_size, Tensors()
    for state in ranks(4).run(replicas_after, ep_size):
        for name, tensor in state.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"{name} differs by rank"
    for expert in range(EXPERTS):
        owner = expert // local
        assert found[f"1.experts.expert_modules.seen.{expert}"].tolist() == [owner, expert % local]
        assert bool(found[f"1.experts.expert_modules.on.{expert}"]) is (owner % 2 == 1)
    starts = {str(found[f"1.experts.expert_modules.weight.{first * local}"]) for first in range(ep_size)}
    assert len(starts) == ep_size


def frozen_step(rank: int, what: str) -> Tensors:
    """Gradients where something is not trained; a layer that comes first gets no gradient for its input."""
    del rank
    case = Case(world=2, ep_size=1, experts="module")
    layer = model_of(case, exchange_of(1, None)).layer
    layer.requires_grad_(what != "all")
    if what == "experts":
        layer.experts.requires_grad_(False)
    if what == "half":
        layer.experts.get_submodule("expert_modules.0").requires_grad_(False)
    if what == "gate":
        layer.gate.requires_grad_(False)
    out = layer(numbers(4, HIDDEN, seed=1))
    if what != "all":
        out.sum().backward()
    assert out.requires_grad == (what != "all")
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "names"),
    [("nothing", 2 * 8 + 3), ("experts", 3), ("half", 2 * 7 + 3), ("gate", 2 * 8 + 2), ("all", 0)],
)
def test_what_is_frozen_gets_no_gradient(ranks: Pools, what: str, names: int) -> None:
    assert [len(gradients) for gradients in ranks(2).run(frozen_step, what)] == [names] * 2


def evaluation(rank: int) -> tuple[Tensor, bool]:
    case = Case(world=2, gate="sigmoid")
    model = model_of(case, exchange_of(None, None)).eval()
    with torch.no_grad():
        out, losses = model(batch(case, 0, rank)[0])
    assert model.layer.gate.bias is not None
    assert not model.layer.gate.bias.counted_E.any()
    return out, losses.balance.requires_grad


@pytest.mark.slow
def test_evaluation(ranks: Pools) -> None:
    case = Case(world=2, gate="sigmoid")
    model = model_of(case, None)
    for rank, (out, requires_grad) in enumerate(ranks(2).run(evaluation)):
        torch.testing.assert_close(out, model(batch(case, 0, rank)[0])[0].detach(), rtol=1e-10, atol=1e-12)
        assert not requires_grad


def low_precision(rank: int, ep_size: int, mixed: bool) -> tuple[set[torch.dtype], Tensors]:
    """Gradients of float32 parameters under autocast, or of bfloat16 ones."""
    case = Case(world=4, ep_size=ep_size, gate="sigmoid", experts="swiglu")
    dtype = torch.float32 if mixed else torch.bfloat16
    model = model_of(case, exchange_of(ep_size, None)).to(dtype)
    wrapped = DistributedDataParallel(ignore_experts(model))
    with torch.autocast("cpu", enabled=mixed):
        out, losses = wrapped(batch(case, 0, rank)[0].to(dtype))
        loss = out.sum() + AUX * losses.balance
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {g.dtype for g in gradients.values()} | {out.dtype}, logical(model, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("ep_size", [4, 2])
def test_bfloat16(ranks: Pools, ep_size: int, mixed: bool) -> None:
    """A step works, and ranks agree."""
    found: Tensors = {}
    for types, gradients in ranks(4).run(low_precision, ep_size, mixed):
        assert types == {torch.bfloat16} | ({torch.float32} if mixed else set())
        for name, gradient in gradients.items():
            assert torch.equal(found.setdefault(name, gradient), gradient), name
            assert gradient.isfinite().all()


def ignored(rank: int) -> list[list[str]]:
    """The lists for a model, for a layer by itself, for one that had a list, for one without an exchange."""
    del rank
    with_bias = model_of(Case(world=2, gate="sigmoid"), exchange_of(None, None))
    root = model_of(Case(world=2), exchange_of(None, None)).layer
    listed = model_of(Case(world=2), exchange_of(None, None))
    listed._ddp_params_and_buffers_to_ignore = ["0.bias"]  # type: ignore[assignment]  # where DDP looks
    alone = model_of(Case(world=2, gate="sigmoid"), None)
    models: list[Any] = [ignore_experts(model) for model in (with_bias, root, listed, alone)]
    assert models == [with_bias, root, listed, alone]
    return [model._ddp_params_and_buffers_to_ignore for model in models]


@pytest.mark.slow
def test_what_ddp_ignores(ranks: Pools) -> None:
    experts = ["experts.w_down", "experts.w_up"]
    for lists in ranks(2).run(ignored):
        assert lists == [
            ["1.experts.w_down", "1.experts.w_up", "1.gate.bias.counted_E"],
            experts,
            ["0.bias", *(f"1.{name}" for name in experts)],
            [],
        ]


# What does not fit


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group before"):
        penstock.ExpertParallel(num_experts=8)


def refusal(rank: int, num_experts: int, options: dict[str, int], dispatch: str) -> str:
    """What a rank is told."""
    del rank
    try:
        exchange = ExpertParallel(num_experts=num_experts, **options)
        case = Case(world=4, dispatch=dispatch)
        model_of(case, exchange)
    except ConfigError as error:
        return str(error)
    raise AssertionError("nothing was refused")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_experts", "options", "dispatch", "told"),
    [
        (6, {}, "flat", ("moe.num_experts = 6", "evenly by 4 ranks", "Nearest valid: 8")),
        (8, {"ep_size": 3}, "flat", ("ep_size = 3", "must divide", "Nearest valid: 2")),
        (8, {"ep_size": 0}, "flat", ("ep_size = 0", "Use 1 or more")),
        (8, {"ranks_per_node": 3}, "flat", ("ranks_per_node = 3", "must divide", "Nearest valid: 2")),
        (8, {}, "hierarchical_1d", ("hierarchical_1d", "over several nodes", "Use flat")),
        (8, {"ep_size": 2, "ranks_per_node": 2}, "hierarchical_2d", ("over several nodes", "Use flat")),
        (8, {"ep_size": 1}, "hierarchical_2d", ("over several nodes", "Use flat")),
    ],
)
def test_layouts_that_do_not_fit(
    ranks: Pools, num_experts: int, options: dict[str, int], dispatch: str, told: tuple[str, ...]
) -> None:
    for message in ranks(4).run(refusal, num_experts, options, dispatch):
        assert all(part in message for part in told), message


def mismatched(rank: int, what: str) -> str:
    """A layer whose parts were built for another number of ranks; ranks with different numbers of tokens."""
    exchange = exchange_of(None, None)
    gate, order, local = SoftmaxGate(HIDDEN, EXPERTS, CHOICES), SortOrder(EXPERTS), EXPERTS // 2
    try:
        if what == "experts":
            MoELayer(gate=gate, order=order, expert=GeluExperts(HIDDEN, 5, EXPERTS), exchange=exchange)
        if what == "order":
            merged = MergedOrder(EXPERTS, CHOICES, 1)
            MoELayer(gate=gate, order=merged, expert=GeluExperts(HIDDEN, 5, local), exchange=exchange)
        if what in ("index", "einsum"):
            layer = model_of(Case(world=2, order=what), exchange).layer
            layer(numbers(8 + 8 * rank, HIDDEN, seed=0))
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("experts", ("num_experts = 8", "2 rank(s) with 8 experts each hold 16")),
        ("order", ("MergedOrder was built for ranks = 1", "ranks = 2")),
        ("index", ("different numbers of tokens", "`valid`")),
        ("einsum", ("different numbers of tokens", "`valid`")),
    ],
)
def test_parts_and_batches_that_do_not_fit(ranks: Pools, what: str, told: tuple[str, ...]) -> None:
    for message in ranks(2).run(mismatched, what):
        assert all(part in message for part in told), message
