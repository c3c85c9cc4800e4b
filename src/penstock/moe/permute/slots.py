"""Permutations with a number of rows that does not depend on the routing: by slots, or within bounds.

Shapes: T tokens, M hidden size, k choices, E experts (total), N positions (experts of all ranks, by rank), S
slots per expert, C chunks, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from penstock.apportion import Counts
from penstock.device import on_device
from penstock.moe.permute.sort import (
    PermutationPlan,
    RowOrder,
    RowPlan,
    SortPermutation,
    histogram,
    stable_argsort,
)
from penstock.moe.routers import Choice, ExpertChoice, Masked, TokenChoice
from penstock.routing.sizes import capacity_slots, split_sizes

# ---- the index permutation (Tutel, Hwang et al. 2023): slots are found by index, not by products with masks


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

    def arrange(self, positions_Tk: Tensor, sizes: tuple[int, ...], *, masked: Masked) -> PermutationPlan:
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
