"""Choices to order, plain loops to compare with, and ranks that exchange rows inside one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from penstock.features.dispatch import FlatDispatch, Place
from penstock.moe.experts import StackedExperts
from penstock.moe.permute.sort import Permutation, PermutationPlan
from penstock.moe.products import Product, grouped_product
from penstock.moe.routers import Choice, ExpertChoice, RouterSums, SoftChoice, TokenChoice
from penstock.routing.routes import RouteMaker, Routes
from penstock.routing.sizes import capacity_slots

HIDDEN = 8  # whole cache lines, as in real models: vector instructions then cut every row alike
NO_SUMS = RouterSums(torch.empty(0), torch.empty(0), torch.empty(0))
chunk_counts = st.integers(1, 9)  # often more than there are tokens or slots


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


@dataclass(frozen=True)
class Capacity:
    """What an order with slots is built with."""

    factor: float = 1.0
    minimum: int = 1

    def slots(self, choice: TokenChoice, num_experts: int) -> int:
        tokens, k = choice.experts_Tk.shape
        return capacity_slots(tokens, num_experts, k, self.factor, self.minimum)


capacities = st.builds(Capacity, st.sampled_from([0.3, 0.5, 1.0, 1.7]), st.integers(1, 4))


@st.composite
def token_choices(
    draw: st.DrawFn, num_experts: int, *, masked: bool | None = None, tokens: int | None = None, k: int = 0
) -> TokenChoice:
    """Random choices, some crowded on few experts, some of padding; the experts of a token are distinct."""
    seed, crowd = draw(st.integers(0, 9999)), draw(st.sampled_from([0.0, 1.0]))
    generator = torch.Generator().manual_seed(seed)
    tokens = draw(st.integers(1, 12)) if tokens is None else tokens
    liking_TE = torch.rand(tokens, num_experts, generator=generator) + crowd * torch.arange(num_experts)
    experts_Tk = liking_TE.topk(k or draw(st.integers(1, num_experts))).indices
    masked = draw(st.booleans()) if masked is None else masked
    if masked:
        padding_T = torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.3, 1.0]))
        experts_Tk[padding_T] = -1
    return TokenChoice(experts_Tk, numbers(*experts_Tk.shape, seed=seed + 1), NO_SUMS, masked)


@st.composite
def expert_choices(draw: st.DrawFn, num_experts: int, tokens: int | None = None) -> ExpertChoice:
    """Each expert takes some tokens; a token may be taken by none or by all."""
    tokens = draw(st.integers(1, 12)) if tokens is None else tokens
    seed, slots = draw(st.integers(0, 9999)), draw(st.integers(1, tokens))
    liking_ET = torch.rand(num_experts, tokens, generator=torch.Generator().manual_seed(seed))
    tokens_ES = liking_ET.topk(slots).indices
    return ExpertChoice(tokens_ES, numbers(num_experts, slots, seed=seed + 1), NO_SUMS, tokens)


@st.composite
def soft_choices(draw: st.DrawFn, num_experts: int) -> SoftChoice:
    samples, length, slots = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape, seed = (samples, length, num_experts, slots), draw(st.integers(0, 9999))
    return SoftChoice(numbers(*shape, seed=seed), numbers(*shape, seed=seed + 1), NO_SUMS)


def tokens_of(choice: Choice) -> int:
    match choice:
        case TokenChoice():
            return len(choice.experts_Tk)
        case ExpertChoice():
            return choice.tokens
        case SoftChoice():
            return choice.mix_BLES.shape[0] * choice.mix_BLES.shape[1]


def first_come(choice: TokenChoice, num_experts: int, slots: int) -> list[tuple[int, int, int, int]]:
    """(expert, slot, token, choice) of all that get a slot: first choices first, then earlier tokens."""
    taken, kept = [0] * num_experts, []
    tokens, k = choice.experts_Tk.shape
    for j in range(k):
        for token in range(tokens):
            expert = int(choice.experts_Tk[token, j])
            if expert >= 0 and taken[expert] < slots:
                kept.append((expert, taken[expert], token, j))
                taken[expert] += 1
    return kept


def row_of_slot(expert: int, slot: int, sizes: Sequence[int], num_experts: int) -> int:
    """Walk over the chunks: chunk by chunk, inside a chunk expert by expert."""
    row = 0
    for size in sizes:
        if slot < size:
            return row + expert * size + slot
        slot -= size
        row += size * num_experts
    raise AssertionError("no such slot")


class Scaling(StackedExperts):
    """Expert e multiplies by e + 2 (e counted over all ranks): who met the wrong expert is seen."""

    def __init__(self, first: int, num_local_experts: int) -> None:
        super().__init__(num_local_experts)
        self.first = first

    def forward(self, rows_RM: Tensor, sizes: Sequence[int], product: Product = grouped_product) -> Tensor:
        del product
        assert sum(sizes) == len(rows_RM)
        factors = [float(self.first + e + 2) for e, size in enumerate(sizes) for _ in range(size)]
        return rows_RM * torch.tensor(factors, dtype=rows_RM.dtype).view(-1, 1)


def scaled_sum(x_TM: Tensor, kept: Sequence[tuple[int, int, Tensor]]) -> Tensor:
    """What experts of `Scaling` make of x, in plain sums. kept: (token, expert, weight)."""
    out = [torch.zeros(x_TM.shape[1], dtype=x_TM.dtype) for _ in x_TM]
    for token, expert, weight in kept:
        out[token] = out[token] + weight * (expert + 2) * x_TM[token]
    return torch.stack(out) + 0 * x_TM  # depends on x even if nothing was kept


def run_ranks(
    order: Permutation, choices: Sequence[Choice], x: Sequence[Tensor], num_experts: int, chunks: int = 1
) -> list[Tensor]:
    """A whole layer on len(x) ranks with a flat all-to-all, in this process; experts are `Scaling`."""
    ranks = range(len(x))
    plans = [order.plan(choice, chunks) for choice in choices]
    local = num_experts // len(x)
    routes = all_routes(order, plans, local)
    rows = [order.permute(*args).split(args[2].chunk_rows) for args in zip(x, choices, plans, strict=True)]
    back: list[list[Tensor]] = [[] for _ in ranks]
    for c in range(chunks):
        sent = [rows[r][c].split(routes[r].slices[c].rows_sent) for r in ranks]
        made = []
        for r in ranks:
            route, experts = routes[r].slices[c], Scaling(r * local, local)
            came = torch.cat([sent[source][r] for source in ranks])
            out = order.run_experts(came, route, experts, grouped_product)
            made.append(out.split(route.rows_received))
        for r in ranks:
            back[r].append(torch.cat([made[target][r] for target in ranks]))
    weights = [order.weights(choice) for choice in choices]
    return [order.unpermute(torch.cat(back[r]), weights[r], plans[r]) for r in ranks]


def all_routes(order: Permutation, plans: Sequence[PermutationPlan], local_experts: int) -> list[Routes]:
    """The routes of every rank, from everybody's plan."""
    ranks = len(plans)
    makers = [RouteMaker(FlatDispatch(), Place(r, ranks, ranks), order.row_counts) for r in range(ranks)]
    if not order.dynamic:
        assert plans[0].slots is not None
        return [maker.even(plans[0].slots, local_experts) for maker in makers]
    tables = []
    for plan in plans:
        assert plan.counts_CN is not None
        tables.append(plan.counts_CN.unflatten(1, (ranks, -1)).transpose(0, 1))
    table = torch.stack(tables).numpy()  # [source, target, chunk, count]
    return [maker.from_pair(table[r], table[:, r]) for r, maker in enumerate(makers)]
