"""Backward through an exchange: on ranks whose tokens need no gradient, too, and only once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support.close import check_close
from tests.support.exchange import (
    HIDDEN,
    IN,
    LENGTH,
    Case,
    Model,
    Tensors,
    exchange_of,
    logical,
    model_of,
    numbers,
)
from tests.support.ranks import Pools

WORLD = 2


@dataclass(frozen=True, kw_only=True)
class Tape:
    """samples: of the last rank, whose tokens need no gradient. frozen: the experts are."""

    samples: int
    frozen: bool = False
    dispatch: str = "flat"
    node: int | None = None

    @property
    def case(self) -> Case:
        return Case(world=WORLD, dispatch=self.dispatch, node=self.node)


def hidden_of(model: Model, tape: Tape, rank: int) -> Tensor:
    """The layer's input: on the last rank a constant."""
    if rank == WORLD - 1:
        return numbers(tape.samples, LENGTH, HIDDEN, seed=3)
    hidden: Tensor = model[0](numbers(2, LENGTH, IN, seed=rank))
    return hidden


def loss_of(model: Model, hidden: Tensor) -> Tensor:
    out: Tensor = model.layer(hidden)
    return out.square().sum()


def own_gradients(model: Model) -> Tensors:
    """Those that are finished after backward: of the experts, and of what is below the layer."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad for name, grad in logical(model, found).items() if name.startswith(("0.", "1.expert"))}


def one_rank(rank: int, tape: Tape) -> Tensors:
    model = model_of(tape.case, exchange_of(None, tape.node))
    model.layer.experts.requires_grad_(not tape.frozen)
    loss_of(model, hidden_of(model, tape, rank)).backward()
    return own_gradients(model)


@pytest.mark.parametrize(
    "tape",
    [
        Tape(samples=0),
        Tape(samples=3),
        Tape(samples=0, frozen=True),
        Tape(samples=1, dispatch="hierarchical_1d", node=1),
    ],
)
def test_a_rank_whose_tokens_need_no_gradient_takes_part_in_backward(ranks: Pools, tape: Tape) -> None:
    whole = model_of(Case(world=WORLD), None)
    whole.layer.experts.requires_grad_(not tape.frozen)
    losses = [loss_of(whole, hidden_of(whole, tape, rank)) for rank in range(WORLD)]
    (losses[0] / WORLD + losses[1] / WORLD).backward()
    wanted, found = own_gradients(whole), ranks(WORLD).run(one_rank, tape)
    assert wanted.keys() == found[0].keys() | found[1].keys()
    assert any(".experts." in name for name in wanted) is not tape.frozen
    for rank in range(WORLD):
        for name, gradient in found[rank].items():  # below the layer a rank has its own, not yet averaged
            check_close(gradient, wanted[name] * (WORLD if name.startswith("0.") else 1), 1e-10, name)


def frozen(rank: int, trained: bool) -> bool:
    """Whether what comes out of a frozen model needs a gradient. trained: one expert of the last rank is."""
    model = model_of(Case(world=WORLD), exchange_of(None, None)).requires_grad_(False)
    if trained and rank == WORLD - 1:
        next(model.layer.experts.parameters()).requires_grad_()
    out: Tensor = model.layer(numbers(2, LENGTH, HIDDEN, seed=rank))
    if out.requires_grad:
        out.sum().backward()
    return out.requires_grad


@pytest.mark.parametrize("trained", [False, True])
def test_what_needs_no_gradient_on_any_rank_has_no_backward(ranks: Pools, trained: bool) -> None:
    """Or frozen layers would keep what they have computed, and send it back."""
    assert ranks(WORLD).run(frozen, trained) == [trained] * WORLD


def penalty(rank: int) -> tuple[float, str]:
    """A penalty on gradients of the tokens, and what its backward says."""
    model = model_of(Case(world=WORLD), exchange_of(None, None))
    x = numbers(2, LENGTH, HIDDEN, seed=rank).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        gradient.square().sum().backward()
    return gradient.square().sum().item(), str(caught.value)


def test_gradients_that_have_crossed_ranks_are_not_differentiated_again(ranks: Pools) -> None:
    model = model_of(Case(world=WORLD), None)
    for rank, (value, said) in enumerate(ranks(WORLD).run(penalty)):
        x = numbers(2, LENGTH, HIDDEN, seed=rank).requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model, x), x)
        assert value == pytest.approx(gradient.square().sum().item(), rel=1e-10)
        assert "have crossed ranks and cannot be differentiated again (create_graph=True" in said
