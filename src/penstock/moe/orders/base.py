"""Base classes of orders: from a gate's choice to rows sorted by chunk, rank and expert, and back.

Blocks of rows from ranks are put into the order of experts here, too.

Shapes: T tokens, M hidden size, C chunks, E experts (total), R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from torch import Tensor

from penstock.apportion import Counts
from penstock.moe.choices import Choice
from penstock.moe.config import ChoiceKind
from penstock.moe.experts.base import Experts
from penstock.moe.experts.product import Product
from penstock.moe.orders.rows import RowPlan
from penstock.moe.sizes import reordered
from penstock.routing.routes import ChunkRoute


@dataclass(frozen=True)
class OrderPlan:
    """Places of all rows of one microbatch: integers, no gradient.

    tokens: T. chunk_rows: rows of every chunk. counts_CN: what other ranks must know before they can
    receive, int64, N = columns per rank * ranks; only if sizes depend on the routing.
    slots: rows per expert in every chunk; only if sizes do not depend on it. rows: the order's own data.
    wanted_N: choices of every position, whether they have rows or not, [N] int64, where rows may be bounded.
    bounds_CN: rows of every position in every chunk, the same on all ranks, where they are bounded.
    """

    tokens: int
    chunk_rows: tuple[int, ...]
    counts_CN: Tensor | None
    slots: tuple[int, ...] | None
    rows: Any
    wanted_N: Tensor | None = None
    bounds_CN: Counts | None = None


class Order(ABC):
    """Brings tokens into rows and outputs back. Deterministic: no sum depends on the order of threads.

    name: what a configuration calls it. kinds: the kinds of choices that it takes. dynamic: whether sizes
    depend on the routing and must be exchanged first. row_counts: whether one row may serve several experts
    of a rank or a node, so that counts per expert do not give the number of rows.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[ChoiceKind, ...]]
    dynamic: ClassVar[bool]
    row_counts: ClassVar[bool] = False

    @property
    def counts_slots(self) -> bool:
        """Whether an expert takes a limited number of a rank's tokens, hence of a batch of one size."""
        return not self.dynamic

    @abstractmethod
    def plan(self, choice: Choice, chunks: int) -> OrderPlan:
        """Assign rows to the choices; a chunk is a range of tokens or of slots."""

    @abstractmethod
    def order(self, x_TM: Tensor, choice: Choice, plan: OrderPlan) -> Tensor:
        """Return the rows of all chunks one after the other, sorted by rank and expert, [R, M]."""

    @abstractmethod
    def unorder(self, rows_RM: Tensor, weights: Tensor, plan: OrderPlan) -> Tensor:
        """Return every token's outputs, weighted and summed, [T, M]; the transpose of `order`.

        weights: `self.weights`.
        """

    def weights(self, choice: Choice) -> Tensor:
        """Return the weights for `unorder`. They stay at home, so they may have any shape."""
        return choice.weights

    def run_experts(self, rows_RM: Tensor, route: ChunkRoute, experts: Experts, product: Product) -> Tensor:
        """Run rows sorted by (source rank, expert) through the experts, at their rank.

        Returns the same order.
        """
        sizes = route.rows_per_expert
        out_RM = experts(by_expert(rows_RM, route.received), sizes, product)
        return by_source(out_RM, route.received)

    def with_slots(self, ranks: int, slots: int) -> Order:
        """Return this order for positions of `ranks` with `slots` each, of own experts and of replicas.

        Raises ValueError if replication replicas makes no sense with this order.
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


class RowOrder(Order):
    """An order in which every row is one token: the `rows` of its plan are a `RowPlan`."""

    def order(self, x_TM: Tensor, choice: Choice, plan: OrderPlan) -> Tensor:
        del choice
        rows: RowPlan = plan.rows
        return rows.take(x_TM)

    def unorder(self, rows_RM: Tensor, weights: Tensor | None, plan: OrderPlan) -> Tensor:
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
