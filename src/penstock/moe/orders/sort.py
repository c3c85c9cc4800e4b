"""The sort order: dropless, rows sorted by expert, nothing padded (MegaBlocks, Gale et al. 2023).

Shapes: T tokens, M hidden size, k choices, N = T * k, E experts (total), C chunks, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.moe.choices import Choice, TokenChoice, chunk_tokens
from penstock.moe.orders.bags import histogram, stable_argsort
from penstock.moe.orders.base import OrderPlan, RowOrder, chunk_starts
from penstock.moe.orders.rows import RowPlan


class SortOrder(RowOrder):
    """An order in which every choice is a row. A chunk is a range of tokens.

    The number of rows that an expert gets depends on the data. num_experts: E.
    """

    name, kinds, dynamic = "sort", ("token",), True

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def plan(self, choice: Choice, chunks: int) -> OrderPlan:
        if not isinstance(choice, TokenChoice):
            raise self.refused(choice)
        sizes = chunk_tokens(len(choice.experts_Tk), chunks, choice.inseparable)
        return self.arrange(choice.experts_Tk, sizes, masked=choice.masked)

    def arrange(self, positions_Tk: Tensor, sizes: tuple[int, ...], *, masked: bool) -> OrderPlan:
        """Make the plan from the positions alone. sizes: tokens of every chunk. masked: whether any is -1."""
        tokens, choices = positions_Tk.shape
        chunks = len(sizes)
        bin_Tk = bins(positions_Tk, sizes, self.num_experts)
        counts_CE = histogram(bin_Tk.flatten(), chunks * self.num_experts + 1)[:-1].view(chunks, -1)
        # Padding has no rows. Device-to-host sync: how many rows there are depends on the mask.
        rows = counts_CE.sum(dim=1).cpu().tolist() if masked else [size * choices for size in sizes]
        return OrderPlan(
            tokens, tuple(rows), counts_CE, None, sorted_rows(bin_Tk, chunks * self.num_experts, sum(rows))
        )

    def with_slots(self, ranks: int, slots: int) -> SortOrder:
        return SortOrder(ranks * slots)


def bins(parts_Tk: Tensor, sizes: tuple[int, ...], parts: int) -> Tensor:
    """Return the number of the pair (chunk, part), C * parts for part -1. sizes: tokens of every chunk."""
    chunk_T1 = chunk_of_token(sizes, parts_Tk.device).unsqueeze(1)
    return torch.where(parts_Tk < 0, len(sizes) * parts, chunk_T1 * parts + parts_Tk)


def sorted_rows(bin_Tk: Tensor, parts: int, rows: int) -> RowPlan:
    """Make one row for each of the `rows` choices of smallest bin, sorted by bin, then token, then choice.

    parts: the largest bin, which is that of padding.
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
