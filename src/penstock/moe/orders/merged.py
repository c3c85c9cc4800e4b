"""One copy per rank: a token that goes to several experts of a rank travels there once, and comes back as
one partial sum (DeepSeek-V3 dispatches once per node in this way; here once per rank).

A row on its way out is M columns of the token, k columns with the local expert number of each choice that
lives at the destination (else -1), and k columns with the weights of those choices (else 0); all in the
token's precision. On its way back it has M columns.
Shapes: T tokens, M hidden size, k choices, P ranks, E experts (total), L experts per rank, C chunks, R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.cost.workload import split_sizes
from penstock.moe.choices import Choice, TokenChoice
from penstock.moe.experts.base import Experts
from penstock.moe.experts.product import Product
from penstock.moe.orders.bags import histogram
from penstock.moe.orders.base import Order, OrderPlan
from penstock.moe.orders.rows import RowPlan
from penstock.moe.orders.sort import bins, sorted_rows
from penstock.moe.routes import ChunkRoute
from penstock.placement import ExpertPlacement

MOST_LOCAL_EXPERTS = 256
"""Numbers up to here are exact in bfloat16, whose significand has eight bits."""


class MergedOrder(Order):
    """A row for every rank that a token goes to, sorted by chunk, rank and token. Dropless.

    A chunk is a range of tokens. Weights are rounded to the rows' precision, as in every other order; sums
    over the experts of a rank are made there, so outputs differ from the sort order's by rounding.

    num_experts: E. top_k: k. ep_size: P.
    """

    name, kinds, dynamic, row_counts = "sort", ("token",), True, True

    def __init__(self, num_experts: int, top_k: int, ep_size: int) -> None:
        slots = ExpertPlacement.even(num_experts, ep_size).slots
        if slots > MOST_LOCAL_EXPERTS:
            raise ValueError(
                f"num_experts / ep_size = {slots}: expert numbers travel with the rows and "
                f"are exact up to {MOST_LOCAL_EXPERTS} per rank; use more ranks or one_copy_per_rank = false"
            )
        self.num_experts, self.ranks, self.local_experts = num_experts, ep_size, slots
        self.choices = top_k

    def plan(self, choice: Choice, chunks: int) -> OrderPlan:
        if not isinstance(choice, TokenChoice):
            raise self.refused(choice)
        tokens, choices = choice.experts_Tk.shape
        assert choices == self.choices, "gate and order were built for the same top_k"
        sizes = split_sizes(tokens, chunks)
        bin_TP = bins(_ranks_used(choice.experts_Tk, self.ranks, self.local_experts), sizes, self.ranks)
        rows_CP = histogram(bin_TP.flatten(), chunks * self.ranks + 1)[:-1].view(chunks, self.ranks)
        bin_Tk = bins(choice.experts_Tk, sizes, self.num_experts)
        inputs_CE = histogram(bin_Tk.flatten(), chunks * self.num_experts + 1)[:-1]
        inputs_CPL = inputs_CE.view(chunks, self.ranks, self.local_experts)
        counts_CN = torch.cat([inputs_CPL, rows_CP.unsqueeze(2)], dim=2).flatten(1)
        chunk_rows = tuple(rows_CP.sum(dim=1).tolist())  # device-to-host sync: who shares a rank is data
        return OrderPlan(
            tokens, chunk_rows, counts_CN, None, sorted_rows(bin_TP, chunks * self.ranks, sum(chunk_rows))
        )

    def seated(self, ranks: int, slots: int) -> MergedOrder:
        return MergedOrder(ranks * slots, self.choices, ranks)

    def weights(self, choice: Choice) -> Tensor:
        """None: they travel in the rows."""
        return choice.weights.new_empty(0).detach()

    def order(self, x_TM: Tensor, choice: Choice, plan: OrderPlan) -> Tensor:
        assert isinstance(choice, TokenChoice), choice
        rows: RowPlan = plan.rows
        rank_R1 = rows.weight_of_row_R.unsqueeze(1) % self.ranks  # its "weights" are the pairs (token, rank)
        expert_Rk = choice.experts_Tk[rows.token_of_row_R]
        there_Rk = expert_Rk.div(self.local_experts, rounding_mode="floor") == rank_R1
        local_Rk = torch.where(there_Rk, expert_Rk % self.local_experts, -1)
        weights_Rk = rows.take(choice.weights.to(x_TM.dtype)).masked_fill(~there_Rk, 0)
        return torch.cat([rows.take(x_TM), local_Rk.to(x_TM.dtype), weights_Rk], dim=1)

    def unorder(self, rows_RM: Tensor, weights: Tensor, plan: OrderPlan) -> Tensor:
        del weights
        rows: RowPlan = plan.rows
        return rows.give(rows_RM, None)

    def run_experts(self, rows_RM: Tensor, route: ChunkRoute, experts: Experts, product: Product) -> Tensor:
        """Rows in any order, with all columns, through the experts named in them; partial sums [R, M]."""
        columns = [rows_RM.shape[1] - 2 * self.choices, self.choices, self.choices]
        x_RM, local_Rk, weights_Rk = rows_RM.split(columns, dim=1)
        sizes = route.rows_per_expert
        bin_Rk = bins(local_Rk.detach().long(), (len(rows_RM),), self.local_experts)
        inputs = sorted_rows(bin_Rk, self.local_experts, sum(sizes))  # counts say how many there are: no sync
        weights_Rk = weights_Rk.contiguous()  # or what is kept for backward would be all columns
        return inputs.give(experts(inputs.take(x_RM), sizes, product), weights_Rk)


def _ranks_used(experts_Tk: Tensor, ranks: int, local_experts: int) -> Tensor:
    """[T, P]: p where token t goes to rank p, else -1."""
    rank_Tk = torch.where(experts_Tk < 0, ranks, experts_Tk.div(local_experts, rounding_mode="floor"))
    used_TQ = torch.zeros(len(experts_Tk), ranks + 1, dtype=torch.bool, device=experts_Tk.device)
    used_TP = used_TQ.scatter_(1, rank_Tk, True)[:, :ranks]  # the last column is where padding went
    return torch.where(used_TP, torch.arange(ranks, device=experts_Tk.device), -1)
