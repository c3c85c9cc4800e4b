"""Orders: from the router's choice to rows sorted by chunk, rank and expert.

Shapes: T tokens, k choices, E experts (total), C chunks, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.cost.workload import capacity_slots, split_sizes
from penstock.moe.config import MoEConfig
from penstock.moe.gather import RowPlan


@dataclass(frozen=True)
class Ordered:
    """The order of one microbatch.

    rows: where every token goes. chunk_rows: rows of every chunk (known without looking at data).
    counts_CE: rows for each expert in each chunk, int64; only if sizes depend on the routing.
    slots: rows per expert and chunk; only if they do not.
    tokens_per_expert_E: how often each expert was chosen, before any drop, int64.
    """

    rows: RowPlan
    chunk_rows: tuple[int, ...]
    counts_CE: Tensor | None
    slots: tuple[int, ...] | None
    tokens_per_expert_E: Tensor


class Order(Protocol):
    """Decides which row each (token, choice) takes. `dynamic`: sizes must be exchanged first."""

    dynamic: bool

    def plan(self, experts_Tk: Tensor, chunks: int) -> Ordered: ...


class SortOrder:
    """Dropless: a chunk is a range of tokens, its rows are sorted by expert, nothing is padded."""

    dynamic = True

    def __init__(self, config: MoEConfig) -> None:
        self.num_experts = config.num_experts

    def plan(self, experts_Tk: Tensor, chunks: int) -> Ordered:
        tokens, choices = experts_Tk.shape
        sizes = split_sizes(tokens, chunks)
        chunk_T = _chunk_of_token(sizes, experts_Tk.device)
        key = (chunk_T.unsqueeze(1) * self.num_experts + experts_Tk).reshape(-1)
        choice_of_row_R = key.argsort(stable=True)
        row_of_choice = torch.empty_like(choice_of_row_R)
        row_of_choice[choice_of_row_R] = torch.arange(key.numel(), device=key.device)
        counts_CE = _histogram(key, chunks * self.num_experts).view(chunks, -1)
        return Ordered(
            rows=RowPlan(
                token_of_row_R=choice_of_row_R // choices,
                choice_of_row_R=choice_of_row_R,
                row_of_choice_Tk=row_of_choice.view(tokens, choices),
                padded=False,
            ),
            chunk_rows=tuple(size * choices for size in sizes),
            counts_CE=counts_CE,
            slots=None,
            tokens_per_expert_E=counts_CE.sum(dim=0),
        )


class CapacityOrder:
    """Every expert has the same number of slots; who comes later than the last slot is dropped.

    First choices take slots before second choices, earlier tokens before later ones (GShard). A chunk is
    a range of slots, so which tokens are dropped does not depend on the number of chunks. Sizes are fixed:
    nothing is exchanged, the host never waits, and padding costs its share of traffic and computation.
    """

    dynamic = False

    def __init__(self, config: MoEConfig) -> None:
        assert config.capacity_factor is not None
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.capacity_factor, self.min_capacity = config.capacity_factor, config.min_capacity

    def plan(self, experts_Tk: Tensor, chunks: int) -> Ordered:
        tokens, choices = experts_Tk.shape
        slots = capacity_slots(tokens, self.num_experts, self.top_k, self.capacity_factor, self.min_capacity)
        sizes = split_sizes(slots, chunks)
        slot_kT, counts_E = self._slots(experts_Tk)
        row_of_choice_Tk = self._rows(experts_Tk, slot_kT.t(), sizes)
        total = slots * self.num_experts
        # Row `total` takes all that was dropped and is cut off again: no size depends on data.
        choice_of_row = torch.full((total + 1,), -1, dtype=torch.int64, device=experts_Tk.device)
        flat = row_of_choice_Tk.reshape(-1)
        choice_of_row[torch.where(flat < 0, total, flat)] = torch.arange(flat.numel(), device=flat.device)
        choice_of_row_R = choice_of_row[:total]
        return Ordered(
            rows=RowPlan(
                token_of_row_R=torch.where(choice_of_row_R < 0, -1, choice_of_row_R // choices),
                choice_of_row_R=choice_of_row_R,
                row_of_choice_Tk=row_of_choice_Tk,
                padded=True,
            ),
            chunk_rows=tuple(size * self.num_experts for size in sizes),
            counts_CE=None,
            slots=sizes,
            tokens_per_expert_E=counts_E,
        )

    def _slots(self, experts_Tk: Tensor) -> tuple[Tensor, Tensor]:
        """The place of every choice in the queue of its expert, [k, T], and the queues' lengths [E]."""
        flat = experts_Tk.t().reshape(-1)
        counts_E = _histogram(flat, self.num_experts)
        first_E = counts_E.cumsum(0) - counts_E
        by_expert = flat.argsort(stable=True)
        place = torch.empty_like(flat)
        place[by_expert] = torch.arange(flat.numel(), device=flat.device) - first_E[flat[by_expert]]
        return place.view(experts_Tk.shape[1], -1), counts_E

    def _rows(self, experts_Tk: Tensor, slot_Tk: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Row of each choice: chunk by chunk, inside a chunk expert by expert; -1 if dropped."""
        row_Tk = torch.full_like(experts_Tk, -1)
        first_slot = first_row = 0
        for size in sizes:
            inside = (slot_Tk >= first_slot) & (slot_Tk < first_slot + size)
            row_Tk = torch.where(inside, first_row + experts_Tk * size + slot_Tk - first_slot, row_Tk)
            first_slot += size
            first_row += size * self.num_experts
        return row_Tk


def _histogram(values: Tensor, bins: int) -> Tensor:
    """How often each value occurs, [bins]. Unlike `torch.bincount` it does not wait for a GPU."""
    zeros = torch.zeros(bins, dtype=torch.int64, device=values.device)
    return zeros.scatter_add_(0, values, torch.ones_like(values))


def _chunk_of_token(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """The chunk of every token, [T], computed on the device."""
    token_T = torch.arange(sum(sizes), device=device)
    starts = [sum(sizes[:i]) for i in range(1, len(sizes))]
    return torch.stack([token_T >= start for start in starts]).sum(0) if starts else token_T * 0


def build_order(config: MoEConfig) -> Order:
    """Dropless without a capacity_factor, slots with one."""
    return SortOrder(config) if config.capacity_factor is None else CapacityOrder(config)
