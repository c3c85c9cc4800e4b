"""The index order (Tutel, Hwang et al. 2023): slots are found by index, not by products with masks.

Shapes: T tokens, M hidden size, k choices, E experts (total), S slots per expert, C chunks, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.moe.choices import Choice, ExpertChoice, TokenChoice
from penstock.moe.orders.bags import histogram, stable_argsort
from penstock.moe.orders.base import OrderPlan, RowOrder
from penstock.moe.orders.rows import RowPlan
from penstock.routing.sizes import capacity_slots, split_sizes


class IndexOrder(RowOrder):
    """Slots are filled in turn; choices that come after the last slot is filled are dropped.

    First choices take slots before second choices, earlier tokens before later ones (GShard). A chunk is
    a range of slots, so which tokens are dropped does not depend on the number of chunks. Sizes are fixed:
    nothing is exchanged, the host never waits, and padding costs its share of traffic and computation.
    Where experts choose, they have filled their slots themselves and nothing is dropped; a token then has
    any number of rows.
    num_experts: E. capacity_factor f, min_capacity: where tokens choose, an expert has ceil(f k T / E)
    slots, or min_capacity if that is more.
    """

    name, kinds, dynamic = "index", ("token", "expert"), False

    def __init__(self, num_experts: int, *, capacity_factor: float = 1.0, min_capacity: int = 4) -> None:
        self.num_experts = num_experts
        self.capacity_factor, self.min_capacity = capacity_factor, min_capacity

    def plan(self, choice: Choice, chunks: int) -> OrderPlan:
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
                return OrderPlan(tokens, chunk_rows(sizes, self.num_experts), None, sizes, rows)
            case ExpertChoice():
                experts, slots = choice.tokens_ES.shape
                sizes = split_sizes(slots, chunks)
                expert_E, slot_S = (torch.arange(n, device=choice.tokens_ES.device) for n in (experts, slots))
                expert_ES, slot_ES = expert_E.unsqueeze(1).expand(-1, slots), slot_S.expand(experts, -1)
                row_ES = slot_rows(expert_ES, slot_ES, sizes, experts)
                rows = RowPlan.make(
                    row_ES, choice.tokens_ES.reshape(-1), choice.tokens, row_ES.numel(), padded=False
                )
                return OrderPlan(choice.tokens, chunk_rows(sizes, experts), None, sizes, rows)
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

    experts, place: of one shape, which is that of the result; the result is -1 where the place is beyond the
    last slot or the expert is -1. sizes: slots of one expert in every chunk.
    """
    row = torch.full_like(experts, -1)
    first_slot = first_row = 0
    for size in sizes:
        inside = (place >= first_slot) & (place < first_slot + size) & (experts >= 0)
        row = torch.where(inside, first_row + experts * size + place - first_slot, row)
        first_slot += size
        first_row += size * num_experts
    return row
