"""The bounded order: dropless rows whose sizes are known before the gate has chosen.

Shapes: T tokens, k choices, N positions (experts of all ranks, by rank), C chunks, R rows.
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
from penstock.moe.orders.base import OrderPlan
from penstock.moe.orders.index import queues
from penstock.moe.orders.rows import RowPlan
from penstock.moe.orders.sort import SortOrder
from penstock.routing.sizes import split_sizes


class BoundedOrder(SortOrder):
    """A sort order whose steps may bound the rows of every position, instead of counting them.

    Inside `bounded` each position has as many rows as its bound, from every rank and in every microbatch, the
    same on all ranks: counts are not exchanged and the host never waits. Rows that nothing fills are padding,
    which travels and is computed. Choices beyond a bound have no row; so whoever sets bounds compares them
    with `OrderPlan.wanted_N`, and runs what exceeds them again, counted. Rows are counted outside of it.
    A chunk of bounded rows is a range of the places at every position.

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

    def arrange(self, positions_Tk: Tensor, sizes: tuple[int, ...], *, masked: bool) -> OrderPlan:
        if self._bounds is not None:
            return self._bounds.plan(positions_Tk, len(sizes))
        counted = super().arrange(positions_Tk, sizes, masked=masked)
        assert counted.counts_CN is not None, "a sort order counts"
        return replace(counted, wanted_N=counted.counts_CN.sum(dim=0))

    def with_slots(self, ranks: int, slots: int) -> SortOrder:
        del ranks, slots
        raise ValueError(
            "moe.bound_factor bounds the rows of experts by those of earlier steps, and homes of replicas "
            "would change from step to step: set moe.bound_factor=none, or placement.experts=none"
        )


class Bounds:
    """Bounds of the rows of every position in one layer, and where these rows lie. rows_N: the bounds."""

    def __init__(self, rows_N: Sequence[int]) -> None:
        self.rows_N = np.asarray(rows_N, dtype=np.int64)
        self._cut: dict[tuple[int, torch.device], _Cut] = {}

    def plan(self, positions_Tk: Tensor, chunks: int) -> OrderPlan:
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
        return OrderPlan(tokens, cut.chunk_rows, None, None, rows, wanted_N, cut.rows_CN)


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
