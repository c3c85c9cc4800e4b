"""A small model with an MoE layer over ranks, or whole in one process, as the tests of exchanges use it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.features.dispatch import DISPATCHES
from penstock.moe import (
    EinsumPermutation,
    ExpertBias,
    ExpertChoiceRouter,
    Experts,
    GeluExperts,
    Hook,
    IndexPermutation,
    MergedPermutation,
    ModuleExperts,
    MoELayer,
    Permutation,
    Router,
    SharedExpert,
    SigmoidRouter,
    SoftmaxRouter,
    SortPermutation,
    SwiGLUExperts,
)
from penstock.moe.config import BalanceGroup
from penstock.moe.layer import LayerLosses
from penstock.runtime.expert_parallel.exchange import ExpertParallel

IN, HIDDEN, OUT, EXPERTS, CHOICES = 4, 6, 3, 8, 3
SAMPLES, LENGTH = 2, 5
AUX, Z, RATE = 0.3, 0.07, 0.25
CAPACITY = {"capacity_factor": 0.75, "min_capacity": 1}
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step, or two.

    ep_size: none = all ranks. node: ranks per node, for hierarchical dispatches. passes: accumulated before
    a step. samples: of each rank, if not all have equally many. alike: all tokens of the first rank are, and
    choose the same experts. prepare: done to the model before it is wrapped. clip: what is given to
    `clip_grad_norm_` in two steps; "" = one step is not clipped.
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
    alike: bool = False
    prepare: Callable[[Model], Model] | None = None
    wrap: str = "ddp"
    clip: str = ""
    norm_type: float = 2.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of every rank."""
        return self.samples or (SAMPLES,) * self.world


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


def gate_of(case: Case) -> Router:
    if case.gate == "expert_choice":
        return ExpertChoiceRouter(HIDDEN, EXPERTS, top_k=CHOICES, **CAPACITY)  # type: ignore[arg-type]
    if case.gate == "sigmoid":
        return SigmoidRouter(HIDDEN, EXPERTS, CHOICES, bias=ExpertBias(EXPERTS, RATE))
    return SoftmaxRouter(HIDDEN, EXPERTS, CHOICES)


def order_of(case: Case, ep_size: int, ep_rank: int) -> Permutation:
    if case.dispatch == "node_once":
        assert case.order in ("merged", "index"), "rows for one expert cannot be joined"
        slots = CAPACITY if case.order == "index" else {}
        joined = partial(MergedPermutation, EXPERTS, CHOICES, ep_size, node_size=case.node or 1, rank=ep_rank)
        return joined(**slots)  # type: ignore[arg-type]  # a table of settings
    if case.order == "merged":
        return MergedPermutation(EXPERTS, CHOICES, ep_size)
    if case.order == "sort":
        return SortPermutation(EXPERTS)
    made = IndexPermutation if case.order == "index" else EinsumPermutation
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
        permutation=order_of(case, ep_size, 0 if exchange is None else exchange.ep_rank),
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
        found.update(model.layer.by_number(name, tensor))
    return found


def batch(case: Case, turn: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and which tokens are no padding, of one rank in one pass."""
    size = case.sizes[rank]
    x = numbers(size, LENGTH, IN, seed=100 * turn + rank)
    if case.alike and rank == 0:
        x = torch.zeros_like(x)
    ends = torch.randint(1, LENGTH + 1, (size, 1), generator=torch.Generator().manual_seed(rank + turn))
    valid = torch.arange(LENGTH) < (ends if case.padded else torch.full_like(ends, LENGTH))
    return x, numbers(size, LENGTH, OUT, seed=999 + turn), valid


def task_loss(out: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """A mean over one rank's tokens."""
    square = (out - target).square().mean(-1) * valid
    return square.sum() / valid.sum().clamp(min=1)


@cache
def exchange_of(ep_size: int | None, node: int | None) -> ExpertParallel:
    """Kept, since a pool runs many cases."""
    return ExpertParallel(num_experts=EXPERTS, ep_size=ep_size, ranks_per_node=node)


def rank_loss(wrapped: nn.Module, data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, target, valid = data
    out, losses = wrapped(x, None if valid.all() else valid)
    loss: Tensor = task_loss(out, target, valid) + AUX * losses.balance + Z * losses.z
    return loss


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
