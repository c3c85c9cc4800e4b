"""Around a step with ExpertParallel: first values, frozen parts, evaluation, precision, what DDP ignores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from penstock.partial_state import without_marks
from penstock.runtime.expert_parallel.exchange import ignore_experts
from tests.support.close import check_all_close
from tests.support.exchange import (
    AUX,
    EXPERTS,
    HIDDEN,
    Case,
    Tensors,
    batch,
    exchange_of,
    logical,
    model_of,
    numbers,
    rank_loss,
)
from tests.support.ranks import Pools


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
    state = {name: each.detach().clone() for name, each in without_marks(model.state_dict()).items()}
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


def in_one_place(rank: int, order: str, world: int) -> Tensors:
    """What autocast makes of a layer whose tokens, in float32, all choose experts of rank 0."""
    case = Case(world=2, order=order, experts="module")
    layer = model_of(case, exchange_of(None, None) if world > 1 else None).layer.float()
    with torch.no_grad():
        layer.gate.get_parameter("weight").copy_(torch.linspace(1, -1, EXPERTS).unsqueeze(1))
    x = numbers(16, HIDDEN, seed=rank).abs().float().requires_grad_()
    with torch.autocast("cpu"):
        out = layer(x)
    out.float().square().sum().backward()
    assert x.grad is not None
    return {"out": out.detach().float(), "x": x.grad}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["sort", "merged"])
def test_a_rank_whose_experts_get_no_row_expects_the_type_that_others_send(ranks: Pools, order: str) -> None:
    for rank, found in enumerate(ranks(2).run(in_one_place, order, 2)):
        check_all_close(found, in_one_place(rank, order, 1), 0.02, "of", least=1e-6)


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
