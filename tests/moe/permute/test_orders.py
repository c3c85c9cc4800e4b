"""What every order has to do: whole layers on one and on several ranks against plain sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.moe.permute.einsum import EinsumPermutation
from penstock.moe.permute.merged import MergedPermutation
from penstock.moe.permute.slots import IndexPermutation
from penstock.moe.permute.sort import Permutation, SortPermutation
from penstock.moe.routers import Choice, ExpertChoice, SoftChoice, TokenChoice
from tests.moe.permute.support import (
    HIDDEN,
    NO_SUMS,
    Capacity,
    capacities,
    chunk_counts,
    expert_choices,
    first_come,
    numbers,
    run_ranks,
    scaled_sum,
    token_choices,
    tokens_of,
)

Kept = Sequence[tuple[int, int, Tensor]]


@dataclass(frozen=True)
class Case:
    """An order and, for every rank, a choice for it."""

    order: Permutation
    choices: tuple[Choice, ...]
    num_experts: int
    capacity: Capacity

    def kept(self, choice: Choice) -> Kept:
        """(token, expert, weight) of everything that is not dropped."""
        if isinstance(choice, ExpertChoice):
            pairs = [(e, s) for e in range(self.num_experts) for s in range(choice.tokens_ES.shape[1])]
            return [(int(choice.tokens_ES[e, s]), e, choice.weights[e, s]) for e, s in pairs]
        assert isinstance(choice, TokenChoice)
        slots = 10**9 if self.order.dynamic else self.capacity.slots(choice, self.num_experts)
        found = first_come(choice, self.num_experts, slots)
        return [(token, expert, choice.weights[token, j]) for expert, _, token, j in found]

    def run(self, chunks: int = 1) -> list[Tensor]:
        """Outputs of all ranks, then gradients of x and weights."""
        x = [numbers(tokens_of(choice), HIDDEN, seed=r) for r, choice in enumerate(self.choices)]
        return _with_gradients(
            run_ranks(self.order, self.choices, x, self.num_experts, chunks), x, self.choices
        )

    def expected(self) -> list[Tensor]:
        x = [numbers(tokens_of(choice), HIDDEN, seed=r) for r, choice in enumerate(self.choices)]
        out = [scaled_sum(x_TM, self.kept(c)) for x_TM, c in zip(x, self.choices, strict=True)]
        return _with_gradients(out, x, self.choices)


def _with_gradients(out: list[Tensor], x: list[Tensor], choices: Sequence[Choice]) -> list[Tensor]:
    towards = [numbers(*part.shape, seed=99 + r).detach() for r, part in enumerate(out)]
    inputs = [*x, *(choice.weights for choice in choices)]
    grads = torch.autograd.grad(out, inputs, towards, allow_unused=True, materialize_grads=True)
    return [part.detach() for part in out] + list(grads)


@st.composite
def cases(draw: st.DrawFn, name: str, kind: str) -> Case:
    ranks, local = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_experts, capacity = ranks * local, draw(capacities)
    k = draw(st.integers(1, num_experts))
    options = {"capacity_factor": capacity.factor, "min_capacity": capacity.minimum}
    order: Permutation = {
        "sort": lambda: SortPermutation(num_experts),
        "merged": lambda: MergedPermutation(num_experts, k, ranks),
        "index": lambda: IndexPermutation(num_experts, **options),  # type: ignore[arg-type]  # int or float
        "einsum": lambda: EinsumPermutation(num_experts, **options),  # type: ignore[arg-type]  # as above
    }[name]()
    # Fixed sizes: all ranks have equally many tokens.
    tokens = None if order.dynamic else draw(st.integers(1, 12))
    if kind == "token":
        choice = token_choices(num_experts, tokens=tokens, k=k)
        choices: list[Choice] = [draw(choice) for _ in range(ranks)]
    else:
        first = draw(expert_choices(num_experts, tokens=tokens))
        choices = [first, *[_reversed(first)] * (ranks - 1)]
    return Case(order, tuple(choices), num_experts, capacity)


def _reversed(choice: ExpertChoice) -> ExpertChoice:
    """Another choice of as many tokens and slots."""
    weights = numbers(*choice.weights.shape, seed=7)
    return ExpertChoice(choice.tokens - 1 - choice.tokens_ES, weights, NO_SUMS, choice.tokens)


PAIRS = [
    ("sort", "token"),
    ("merged", "token"),
    ("index", "token"),
    ("index", "expert"),
    ("einsum", "token"),
    ("einsum", "expert"),
]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
@given(data=st.data(), chunks=chunk_counts)
def test_outputs_and_gradients_are_those_of_plain_sums(
    name: str, kind: str, data: st.DataObject, chunks: int
) -> None:
    case = data.draw(cases(name, kind))
    torch.testing.assert_close(case.run(chunks), case.expected())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), PAIRS)
@given(data=st.data(), chunks=chunk_counts)
def test_neither_chunks_nor_a_second_run_change_a_bit(
    name: str, kind: str, data: st.DataObject, chunks: int
) -> None:
    case = data.draw(cases(name, kind))
    first, again, cut = case.run(), case.run(), case.run(chunks)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, cut, strict=True))


@pytest.mark.parametrize(
    "order",
    [SortPermutation(2), MergedPermutation(2, 2, 1), IndexPermutation(2), EinsumPermutation(2)],
    ids=lambda o: type(o).__name__,
)
def test_no_tokens_at_all(order: Permutation) -> None:
    choice = TokenChoice(torch.empty(0, 2, dtype=torch.int64), numbers(0, 2), NO_SUMS)
    x_0M = numbers(0, HIDDEN)
    (out,) = run_ranks(order, [choice], [x_0M], 2, chunks=2)
    assert out.shape == (0, HIDDEN)
    (grad_x,) = torch.autograd.grad(out.sum(), x_0M)
    assert grad_x.shape == (0, HIDDEN)


token = TokenChoice(torch.zeros(2, 1, dtype=torch.int64), numbers(2, 1), NO_SUMS)
expert = ExpertChoice(torch.zeros(1, 2, dtype=torch.int64), numbers(1, 2), NO_SUMS, 2)
soft = SoftChoice(numbers(1, 2, 1, 1), numbers(1, 2, 1, 1), NO_SUMS)


@pytest.mark.parametrize(
    "order", [SortPermutation(1), MergedPermutation(1, 1, 1), IndexPermutation(1), EinsumPermutation(1)]
)
@pytest.mark.parametrize(("kind", "choice"), [("token", token), ("expert", expert), ("soft", soft)])
def test_an_order_takes_its_kinds_and_refuses_the_others(
    order: Permutation, kind: str, choice: Choice
) -> None:
    if kind in order.kinds:
        assert order.plan(choice, 1).tokens == 2
    else:
        with pytest.raises(TypeError, match=f"takes choices of kind token.*not a {type(choice).__name__}"):
            order.plan(choice, 1)
