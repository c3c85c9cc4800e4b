"""What every order is: from a gate's choice to rows sorted by chunk, rank and expert, and back.

Shapes: T tokens, M hidden size, C chunks, E experts (total), R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from torch import Tensor

from penstock.moe.accept import ChoiceKind
from penstock.moe.choices import Choice
from penstock.moe.experts.base import Experts
from penstock.moe.experts.product import Product
from penstock.moe.orders.blocks import by_expert, by_source
from penstock.moe.orders.rows import RowPlan
from penstock.moe.routes import ChunkRoute


@dataclass(frozen=True)
class OrderPlan:
    """Where every row of one microbatch goes: integers, no gradient.

    tokens: T. chunk_rows: rows of every chunk. counts_CN: what other ranks must know before they can
    receive, int64, N = columns per rank * ranks; only if sizes depend on the routing.
    slots: rows per expert in every chunk; only if they do not. rows: whatever the order needs to know.
    """

    tokens: int
    chunk_rows: tuple[int, ...]
    counts_CN: Tensor | None
    slots: tuple[int, ...] | None
    rows: Any


class Order(ABC):
    """Brings tokens into rows and outputs back. Deterministic: no sum depends on the order of threads.

    name: what a configuration calls it. kinds: whose choices it can take. dynamic: sizes depend on the
    routing and must be exchanged first. row_counts: whether one row may serve several experts of a rank or
    a node, so that counts per expert do not say how many rows there are.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[ChoiceKind, ...]]
    dynamic: ClassVar[bool]
    row_counts: ClassVar[bool] = False

    @property
    def counts_slots(self) -> bool:
        """Whether an expert takes so many tokens of a rank at most, and so of a batch of one size."""
        return not self.dynamic

    @abstractmethod
    def plan(self, choice: Choice, chunks: int) -> OrderPlan:
        """Decide which row everything takes; a chunk is a range of tokens or of slots."""

    @abstractmethod
    def order(self, x_TM: Tensor, choice: Choice, plan: OrderPlan) -> Tensor:
        """Rows of all chunks one after the other, sorted by rank and expert, [R, M]."""

    @abstractmethod
    def unorder(self, rows_RM: Tensor, weights: Tensor, plan: OrderPlan) -> Tensor:
        """The transpose: every token's outputs, weighted and summed, [T, M]. weights: `self.weights`."""

    def weights(self, choice: Choice) -> Tensor:
        """What `unorder` will multiply with. It stays at home, so it may have any shape."""
        return choice.weights

    def run_experts(self, rows_RM: Tensor, route: ChunkRoute, experts: Experts, product: Product) -> Tensor:
        """At the experts' rank: rows sorted by (source rank, expert) through the experts, same order."""
        sizes = route.rows_per_expert
        out_RM = experts(by_expert(rows_RM, route.received), sizes, product)
        return by_source(out_RM, route.received)

    def seated(self, ranks: int, slots: int) -> Order:
        """The same order for positions of `ranks` with `slots` each, of own experts and of guests.

        Raises ValueError if hosting guests makes no sense with it.
        """
        del ranks, slots
        raise ValueError(
            f"{type(self).__name__} gives every expert a fixed number of rows from every rank, filled with "
            "padding: a host would receive and compute as many. Moving experts needs dropless routing: leave "
            "out moe.capacity_factor, or set placement.experts=none"
        )

    def refused(self, choice: Choice) -> TypeError:
        """What `plan` raises for a choice of another kind."""
        kinds = " or ".join(self.kinds)
        return TypeError(
            f"{type(self).__name__} takes choices of kind {kinds}, not a {type(choice).__name__}"
        )


class RowOrder(Order):
    """An order in which every row is one token: its plan's `rows` are a `RowPlan`."""

    def order(self, x_TM: Tensor, choice: Choice, plan: OrderPlan) -> Tensor:
        del choice
        rows: RowPlan = plan.rows
        return rows.take(x_TM)

    def unorder(self, rows_RM: Tensor, weights: Tensor | None, plan: OrderPlan) -> Tensor:
        rows: RowPlan = plan.rows
        return rows.give(rows_RM, weights)


def chunk_starts(sizes: Sequence[int]) -> list[int]:
    """Where each piece begins, first one (0) left out."""
    return list(accumulate(sizes[:-1]))
