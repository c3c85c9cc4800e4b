"""Permutations: from a router's choice to rows sorted by chunk, rank and expert, and back.

Blocks of rows from ranks are put into the order of experts here, too.

Shapes: T tokens, M hidden size, C chunks, E experts (total), R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from penstock.apportion import Counts
from penstock.device import on_device
from penstock.moe.choices import Choice, ExpertChoice, TokenChoice, chunk_tokens
from penstock.moe.config import ChoiceKind
from penstock.moe.permute.rows import RowPlan, histogram, stable_argsort
from penstock.moe.products import Compute, Product, reordered
from penstock.routing.routes import ChunkRoute
from penstock.routing.sizes import capacity_slots, split_sizes


@dataclass(frozen=True)
class PermutationPlan:
    """Places of all rows of one microbatch: integers, no gradient.

    Attributes:
        tokens: T.
        chunk_rows: Rows of every chunk.
        counts_CN: What other ranks must know before they can receive, int64, N = columns per rank * ranks;
            only if sizes depend on the routing.
        slots: Rows per expert in every chunk; only if sizes do not depend on it.
        rows: The permutation's own data.
        wanted_N: Choices of every position, whether they have rows or not, [N] int64, where rows may be
            bounded.
        bounds_CN: Rows of every position in every chunk, the same on all ranks, where they are bounded.
    """

    tokens: int
    chunk_rows: tuple[int, ...]
    counts_CN: Tensor | None
    slots: tuple[int, ...] | None
    rows: Any
    wanted_N: Tensor | None = None
    bounds_CN: Counts | None = None


class Permutation(ABC):
    """Brings tokens into rows and outputs back. Deterministic: no sum depends on the order of threads.

    Attributes:
        name: What a configuration calls it.
        kinds: The kinds of choices that it takes.
        dynamic: Whether sizes depend on the routing and must be exchanged first.
        row_counts: Whether one row may serve several experts of a rank or a node, so that counts per expert
            do not give the number of rows.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[ChoiceKind, ...]]
    dynamic: ClassVar[bool]
    row_counts: ClassVar[bool] = False

    @property
    def beside(self) -> int:
        """Columns of a row on its way out that stand after the hidden state."""
        return 0

    @property
    def counts_slots(self) -> bool:
        """Whether an expert takes a limited number of a rank's tokens, hence of a batch of one size."""
        return not self.dynamic

    @abstractmethod
    def plan(self, choice: Choice, chunks: int) -> PermutationPlan:
        """Assign rows to the choices; a chunk is a range of tokens or of slots."""

    @abstractmethod
    def permute(self, x_TM: Tensor, choice: Choice, plan: PermutationPlan) -> Tensor:
        """Return the rows of all chunks one after the other, sorted by rank and expert, [R, M]."""

    @abstractmethod
    def unpermute(self, rows_RM: Tensor, weights: Tensor, plan: PermutationPlan) -> Tensor:
        """Return every token's outputs, weighted and summed, [T, M]; the transpose of `permute`.

        Args:
            weights: `self.weights`.
        """

    def weights(self, choice: Choice) -> Tensor:
        """Return the weights for `unpermute`. They stay at home, so they may have any shape."""
        return choice.weights

    def run_experts(self, rows_RM: Tensor, route: ChunkRoute, experts: Compute, product: Product) -> Tensor:
        """Run rows sorted by (source rank, expert) through the experts, at their rank.

        Returns rows in the same order.
        """
        sizes = route.rows_per_expert
        out_RM = experts(by_expert(rows_RM, route.received), sizes, product)
        return by_source(out_RM, route.received)

    def with_slots(self, ranks: int, slots: int) -> Permutation:
        """Return this permutation for positions of `ranks` with `slots` each, of own experts and of replicas.

        Raises:
            ValueError: If replicas make no sense with this permutation.
        """
        del ranks, slots
        raise ValueError(
            f"{type(self).__name__} gives every expert a fixed number of rows from every rank, filled with "
            "padding: a replica would compute as many. Moving experts needs dropless routing: leave "
            "out moe.capacity_factor, or set placement.experts=none"
        )

    def refused(self, choice: Choice) -> TypeError:
        """Return the error that `plan` raises for a choice of another kind."""
        kinds = " or ".join(self.kinds)
        return TypeError(
            f"{type(self).__name__} takes choices of kind {kinds}, not a {type(choice).__name__}"
        )


class RowOrder(Permutation):
    """A permutation in which every row is one token: the `rows` of its plan are a `RowPlan`."""

    def permute(self, x_TM: Tensor, choice: Choice, plan: PermutationPlan) -> Tensor:
        del choice
        rows: RowPlan = plan.rows
        return rows.take(x_TM)

    def unpermute(self, rows_RM: Tensor, weights: Tensor | None, plan: PermutationPlan) -> Tensor:
        rows: RowPlan = plan.rows
        return rows.give(rows_RM, weights)


def chunk_starts(sizes: Sequence[int]) -> list[int]:
    """Return where each piece but the first (which begins at 0) begins."""
    return list(accumulate(sizes[:-1]))


def by_expert(rows_RM: Tensor, received: Sequence[Sequence[int]]) -> Tensor:
    """Reorder rows sorted by (source rank, expert) to rows sorted by (expert, source rank). One copy."""
    return _transpose_blocks(rows_RM, received)


def by_source(rows_RM: Tensor, received: Sequence[Sequence[int]]) -> Tensor:
    """Undo `by_expert`: rows sorted by (source rank, expert) again."""
    return _transpose_blocks(rows_RM, list(zip(*received, strict=True)))


def _transpose_blocks(rows_RM: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    outer, inner = len(sizes), len(sizes[0])
    if outer == 1 or inner == 1:  # already in the wanted order: no copy
        return rows_RM
    flat = [size for row in sizes for size in row]
    return reordered(rows_RM, flat, [o * inner + i for i in range(inner) for o in range(outer)])


# ---- the sort permutation: dropless, rows sorted by expert, nothing padded (MegaBlocks, Gale et al. 2023) -
#
# Shapes: T tokens, M hidden size, k choices, N = T * k, E experts (total), C chunks, R rows.


class SortPermutation(RowOrder):
    """A permutation in which every choice is a row. A chunk is a range of tokens.

    The number of rows that an expert gets depends on the data.

    Attributes:
        num_experts: E.
    """

    name, kinds, dynamic = "sort", ("token",), True

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def plan(self, choice: Choice, chunks: int) -> PermutationPlan:
        if not isinstance(choice, TokenChoice):
            raise self.refused(choice)
        sizes = chunk_tokens(len(choice.experts_Tk), chunks, choice.inseparable)
        return self.arrange(choice.experts_Tk, sizes, masked=choice.masked)

    def arrange(self, positions_Tk: Tensor, sizes: tuple[int, ...], *, masked: bool) -> PermutationPlan:
        """Make the plan from the positions alone.

        Args:
            sizes: Tokens of every chunk.
            masked: Whether any is -1.
        """
        tokens, choices = positions_Tk.shape
        chunks = len(sizes)
        bin_Tk = bins(positions_Tk, sizes, self.num_experts)
        counts_CE = histogram(bin_Tk.flatten(), chunks * self.num_experts + 1)[:-1].view(chunks, -1)
        # Padding has no rows. Device-to-host sync: how many rows there are depends on the mask.
        rows = counts_CE.sum(dim=1).cpu().tolist() if masked else [size * choices for size in sizes]
        return PermutationPlan(
            tokens, tuple(rows), counts_CE, None, sorted_rows(bin_Tk, chunks * self.num_experts, sum(rows))
        )

    def with_slots(self, ranks: int, slots: int) -> SortPermutation:
        return SortPermutation(ranks * slots)


def bins(parts_Tk: Tensor, sizes: tuple[int, ...], parts: int) -> Tensor:
    """Return the number of the pair (chunk, part), C * parts for part -1.

    Args:
        sizes: Tokens of every chunk.
    """
    chunk_T1 = chunk_of_token(sizes, parts_Tk.device).unsqueeze(1)
    return torch.where(parts_Tk < 0, len(sizes) * parts, chunk_T1 * parts + parts_Tk)


def sorted_rows(bin_Tk: Tensor, parts: int, rows: int) -> RowPlan:
    """Make one row for each of the `rows` choices of smallest bin, sorted by bin, then token, then choice.

    Args:
        parts: The largest bin, which is that of padding.
    """
    weight_of_row_R = stable_argsort(bin_Tk.flatten(), parts)[:rows]
    row_of_weight = torch.full_like(bin_Tk, -1).view(-1)
    row_of_weight[weight_of_row_R] = torch.arange(rows, device=bin_Tk.device)
    return RowPlan.of_choices(row_of_weight.view_as(bin_Tk), weight_of_row_R)


def chunk_of_token(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the chunk of every token, [T], computed on the device."""
    token_T = torch.arange(sum(sizes), device=device)
    starts = chunk_starts(sizes)
    return torch.stack([token_T >= start for start in starts]).sum(0) if starts else token_T * 0


# ---- the index permutation (Tutel, Hwang et al. 2023): slots are found by index, not by products with masks
#
# Shapes: T tokens, M hidden size, k choices, E experts (total), S slots per expert, C chunks, R rows.


class IndexPermutation(RowOrder):
    """Slots are filled in turn; choices that come after the last slot is filled are dropped.

    First choices take slots before second choices, earlier tokens before later ones (GShard). A chunk is a
    range of slots, so which tokens are dropped does not depend on the number of chunks. Sizes are fixed:
    nothing is exchanged, the host never waits, and padding costs its share of traffic and computation. Where
    experts choose, they have filled their slots themselves and nothing is dropped; a token then has any
    number of rows.

    Attributes:
        num_experts: E. capacity_factor f, min_capacity: where tokens choose, an expert has ceil(f k T / E)
            slots, or min_capacity if that is more.
    """

    name, kinds, dynamic = "index", ("token", "expert"), False

    def __init__(self, num_experts: int, *, capacity_factor: float = 1.0, min_capacity: int = 4) -> None:
        self.num_experts = num_experts
        self.capacity_factor, self.min_capacity = capacity_factor, min_capacity

    def plan(self, choice: Choice, chunks: int) -> PermutationPlan:
        match choice:
            case TokenChoice():
                tokens, choices = choice.experts_Tk.shape
                slots = capacity_slots(
                    choice.counted, self.num_experts, choices, self.capacity_factor, self.min_capacity
                )
                sizes = split_sizes(slots, chunks)
                row_Tk = slot_rows(
                    choice.experts_Tk, places(choice.experts_Tk, self.num_experts), sizes, self.num_experts
                )
                token_N = torch.arange(row_Tk.numel(), device=row_Tk.device) // choices
                rows = RowPlan.make(row_Tk, token_N, tokens, slots * self.num_experts, padded=True)
                return PermutationPlan(tokens, chunk_rows(sizes, self.num_experts), None, sizes, rows)
            case ExpertChoice():
                experts, slots = choice.tokens_ES.shape
                sizes = split_sizes(slots, chunks)
                expert_E, slot_S = (torch.arange(n, device=choice.tokens_ES.device) for n in (experts, slots))
                expert_ES, slot_ES = expert_E.unsqueeze(1).expand(-1, slots), slot_S.expand(experts, -1)
                row_ES = slot_rows(expert_ES, slot_ES, sizes, experts)
                rows = RowPlan.make(
                    row_ES, choice.tokens_ES.reshape(-1), choice.tokens, row_ES.numel(), padded=False
                )
                return PermutationPlan(choice.tokens, chunk_rows(sizes, experts), None, sizes, rows)
            case _:
                raise self.refused(choice)


def chunk_rows(sizes: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    """Return the rows of every chunk, from the slots of one expert in it."""
    return tuple(size * num_experts for size in sizes)


def places(experts_Tk: Tensor, num_experts: int) -> Tensor:
    """Return the place of every choice in the queue of its expert, [T, k]; meaningless for padding."""
    return queues(experts_Tk, num_experts)[0]


def queues(experts_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the place of every choice in the queue of its expert, [T, k], and the length of each queue, [E].

    First choices come before second choices, earlier tokens before later ones. Places of padding (-1) mean
    nothing.
    """
    flat = experts_Tk.t().reshape(-1)
    flat = torch.where(flat < 0, num_experts, flat)
    counts = histogram(flat, num_experts + 1)
    first = counts.cumsum(0) - counts
    in_queue = stable_argsort(flat, num_experts)
    place = torch.empty_like(flat)
    place[in_queue] = torch.arange(flat.numel(), device=flat.device) - first[flat[in_queue]]
    return place.view(experts_Tk.shape[1], -1).t(), counts[:num_experts]


def slot_rows(experts: Tensor, place: Tensor, sizes: tuple[int, ...], num_experts: int) -> Tensor:
    """Return the row of each slot: by chunk, inside a chunk by expert, inside an expert by slot.

    Args:
        experts, place: Of one shape, which is that of the result; the result is -1 where the place is beyond
            the last slot or the expert is -1.
        sizes: Slots of one expert in every chunk.
    """
    row = torch.full_like(experts, -1)
    first_slot = first_row = 0
    for size in sizes:
        inside = (place >= first_slot) & (place < first_slot + size) & (experts >= 0)
        row = torch.where(inside, first_row + experts * size + place - first_slot, row)
        first_slot += size
        first_row += size * num_experts
    return row


# ---- the bounded permutation: dropless rows whose sizes are known before the gate has chosen --------------
#
# Shapes: T tokens, k choices, N positions (experts of all ranks, by rank), C chunks, R rows.


class BoundedPermutation(SortPermutation):
    """A sort permutation whose steps may bound the rows of every position, instead of counting them.

    Inside `bounded` each position has as many rows as its bound, from every rank and in every microbatch, the
    same on all ranks: counts are not exchanged and the host never waits. Rows that nothing fills are padding,
    which travels and is computed. Choices beyond a bound have no row; so whoever sets bounds compares them
    with `PermutationPlan.wanted_N`, and runs what exceeds them again, counted. Rows are counted outside of
    it. A chunk of bounded rows is a range of the places at every position.

    Args:
        num_experts: Positions.
        factor: The bound of a position, over the most rows that it had in earlier steps.
    """

    def __init__(self, num_experts: int, factor: float) -> None:
        super().__init__(num_experts)
        self.factor = factor
        self._bounds: Bounds | None = None

    @contextmanager
    def bounded(self, bounds: Bounds | None) -> Iterator[None]:
        """Bound the rows of all plans that are made inside; None: count them."""
        before, self._bounds = self._bounds, bounds
        try:
            yield
        finally:
            self._bounds = before

    def arrange(self, positions_Tk: Tensor, sizes: tuple[int, ...], *, masked: bool) -> PermutationPlan:
        if self._bounds is not None:
            return self._bounds.plan(positions_Tk, len(sizes))
        counted = super().arrange(positions_Tk, sizes, masked=masked)
        assert counted.counts_CN is not None, "a sort permutation counts"
        return replace(counted, wanted_N=counted.counts_CN.sum(dim=0))

    def with_slots(self, ranks: int, slots: int) -> SortPermutation:
        del ranks, slots
        raise ValueError(
            "moe.bound_factor bounds the rows of experts by those of earlier steps, and homes of replicas "
            "would change from step to step: set moe.bound_factor=none, or placement.experts=none"
        )


class Bounds:
    """Bounds of the rows of every position in one layer, and where these rows lie.

    Attributes:
        rows_N: The bounds.
    """

    def __init__(self, rows_N: Sequence[int]) -> None:
        self.rows_N = np.asarray(rows_N, dtype=np.int64)
        self._cut: dict[tuple[int, torch.device], _Cut] = {}

    def plan(self, positions_Tk: Tensor, chunks: int) -> PermutationPlan:
        """Give every choice the row of its place at its position; -1 where that is beyond the bound."""
        place = (chunks, positions_Tk.device)
        if place not in self._cut:
            self._cut[place] = _Cut(self.rows_N, *place)
        cut = self._cut[place]
        tokens, choices = positions_Tk.shape
        place_Tk, wanted_N = queues(positions_Tk, len(self.rows_N))
        row_Tk = torch.full_like(positions_Tk, -1)
        for begin_N, end_N, ahead_N in cut.on_device:
            inside_Tk = (place_Tk >= begin_N[positions_Tk]) & (place_Tk < end_N[positions_Tk])
            row_Tk = torch.where(inside_Tk, place_Tk + ahead_N[positions_Tk], row_Tk)
        row_Tk = row_Tk.masked_fill(positions_Tk < 0, -1)
        token_F = torch.arange(row_Tk.numel(), device=row_Tk.device) // choices
        rows = RowPlan.make(row_Tk, token_F, tokens, int(cut.rows_CN.sum()), padded=True)
        return PermutationPlan(tokens, cut.chunk_rows, None, None, rows, wanted_N, cut.rows_CN)


class _Cut:
    """Bounded rows in chunks: the places of a position that are in each chunk, and its first row there."""

    def __init__(self, rows_N: Counts, chunks: int, device: torch.device) -> None:
        self.rows_CN: Counts = np.array([split_sizes(int(rows), chunks) for rows in rows_N]).T.copy()
        self._device = device

    @cached_property
    def chunk_rows(self) -> tuple[int, ...]:
        """The rows of every chunk."""
        return tuple(self.rows_CN.sum(axis=1).tolist())

    @cached_property
    def on_device(self) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
        """For every chunk its first place and its last but one at each position, and what added to a place
        gives its row; copied once for all steps with these bounds."""
        end_CN = self.rows_CN.cumsum(axis=0)
        begin_CN = end_CN - self.rows_CN
        first_CN = (self.rows_CN.ravel().cumsum() - self.rows_CN.ravel()).reshape(self.rows_CN.shape)
        table = on_device(
            np.stack([begin_CN, end_CN, first_CN - begin_CN], axis=1).tolist(), self._device, torch.int64
        )
        return [(begin_N, end_N, ahead_N) for begin_N, end_N, ahead_N in table]
