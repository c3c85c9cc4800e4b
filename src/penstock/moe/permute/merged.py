"""One copy per rank, or per node: a token with several experts there travels once, and one sum returns.

DeepSeek-V3 dispatches once per node. A row on its way out is M columns of the token, k columns with the
number of each choice among the experts of the destination (else -1), and k columns with the weights of those
choices (else 0); all in the token's precision. On its way back it has M columns. A destination that is a node
has several ranks, and inside the node a row goes to those that have one of its experts.
Shapes: T tokens, M hidden size, k choices, P ranks, E experts (total), L experts per rank, C chunks, R rows,
N destinations of G ranks, S sets of places in one (see `penstock.routing.joined`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.config import ConfigError
from penstock.mesh import num_nodes, place_in_node
from penstock.moe.permute.slots import places
from penstock.moe.permute.sort import Permutation, PermutationPlan, RowPlan, bins, histogram, sorted_rows
from penstock.moe.products import Compute, Product
from penstock.moe.routers import Choice, TokenChoice
from penstock.placement import ExpertPlacement
from penstock.routing.joined import MOST_NODE_SIZE, num_sets
from penstock.routing.routes import ChunkRoute
from penstock.routing.sizes import capacity_slots, split_sizes

MOST_EXPERTS_THERE = 256
"""Whole numbers up to this one are exact in bfloat16, whose significand has eight bits."""


@dataclass(frozen=True)
class MergedRows:
    """The token of every row, and the experts that will see it: -1 for padding and drops."""

    rows: RowPlan
    experts_Tk: Tensor


class MergedPermutation(Permutation):
    """A row for every destination of a token, sorted by chunk, destination, set of places and token.

    A chunk is a range of tokens. Weights are rounded to the rows' precision, as in every other permutation;
    sums over the experts of a destination are made there, so outputs differ from the sort permutation's by
    rounding.

    Rows are never padded: only the choices that were kept travel.

    Attributes:
        num_experts: E.
        top_k: k.
        ep_size: P.
        node_size: G, 1 = one copy per rank.
        rank: This rank's place among P.
        capacity_factor, min_capacity: Which choices are dropped, as in `IndexPermutation`; none without a
            factor.
    """

    name, kinds, dynamic, row_counts = "sort", ("token",), True, True

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        ep_size: int,
        *,
        node_size: int = 1,
        rank: int = 0,
        capacity_factor: float | None = None,
        min_capacity: int = 4,
    ) -> None:
        slots = ExpertPlacement.even(num_experts, ep_size).slots
        self.num_experts, self.ranks, self.local_experts = num_experts, ep_size, slots
        self.choices, self.node_size, self.rank = top_k, node_size, rank
        self.capacity_factor, self.min_capacity = capacity_factor, min_capacity
        self.nodes, self.row_kinds = num_nodes(ep_size, node_size), num_sets(node_size)
        of_nodes, there = node_size > 1, self.local_experts * node_size
        key, value = ("moe.dispatch", "node_once") if of_nodes else ("moe.one_copy_per_rank", True)
        if there > MOST_EXPERTS_THERE:
            why = (
                f"numbers of experts travel with the rows and are exact up to {MOST_EXPERTS_THERE}, and a "
                f"{'node' if of_nodes else 'rank'} has {there} experts"
            )
            other = "moe.dispatch=flat" if of_nodes else "false"
            raise ConfigError(key, value, why, f"Spread the experts over more ranks, or use {other}.")
        if node_size > MOST_NODE_SIZE:
            why = (
                "ranks tell each other rows for every set of places in a node, which are "
                f"{self.row_kinds} numbers for {node_size} ranks; at most {MOST_NODE_SIZE} ranks"
            )
            raise ConfigError(key, value, why, "Use moe.dispatch=hierarchical_2d.")

    @property
    def beside(self) -> int:
        return 2 * self.choices

    @property
    def counts_slots(self) -> bool:
        return self.capacity_factor is not None

    def plan(self, choice: Choice, chunks: int) -> PermutationPlan:
        if not isinstance(choice, TokenChoice):
            raise self.refused(choice)
        experts_Tk = choice.experts_Tk
        if self.capacity_factor is not None:  # -1 for choices that come after the last slot of their expert
            slots = capacity_slots(
                choice.counted, self.num_experts, self.choices, self.capacity_factor, self.min_capacity
            )
            experts_Tk = experts_Tk.masked_fill(places(experts_Tk, self.num_experts) >= slots, -1)
        tokens, choices = experts_Tk.shape
        assert choices == self.choices, "gate and permutation were built for the same top_k"
        sizes = split_sizes(tokens, chunks)
        parts = self.nodes * self.row_kinds
        # The number of the pair (node, places in it where token t goes); -1 for none.
        device = experts_Tk.device
        rank_Tk = torch.where(
            experts_Tk < 0, self.ranks, experts_Tk.div(self.local_experts, rounding_mode="floor")
        )
        used_TQ = torch.zeros(tokens, self.ranks + 1, dtype=torch.int64, device=device)
        used_TP = used_TQ.scatter_(1, rank_Tk, 1)[:, : self.ranks]  # the last column is where padding went
        bit_G = 2 ** torch.arange(self.node_size, device=device)
        set_TN = (used_TP.view(tokens, self.nodes, self.node_size) * bit_G).sum(dim=2) - 1
        first_N = torch.arange(self.nodes, device=device) * self.row_kinds
        bin_TN = bins(torch.where(set_TN < 0, -1, set_TN + first_N), sizes, parts)
        rows_CX = histogram(bin_TN.flatten(), chunks * parts + 1)[:-1].view(chunks, parts)
        bin_Tk = bins(experts_Tk, sizes, self.num_experts)
        inputs_CE = histogram(bin_Tk.flatten(), chunks * self.num_experts + 1)[:-1]
        # Device-to-host sync: how many rows there are depends on the data. A second run is spared `cpu()`.
        chunk_rows = tuple(rows_CX.sum(dim=1).cpu().tolist())
        rows = sorted_rows(bin_TN, chunks * parts, sum(chunk_rows))
        inputs_CPL = inputs_CE.view(chunks, -1).unflatten(1, (self.ranks, self.local_experts))
        rows_CNS = rows_CX.unflatten(1, (self.nodes, self.row_kinds))
        rows_CPS = rows_CNS.repeat_interleave(self.node_size, dim=1)  # every rank of a node is told all
        counts_CN = torch.cat([inputs_CPL, rows_CPS], dim=2).flatten(1)
        return PermutationPlan(tokens, chunk_rows, counts_CN, None, MergedRows(rows, experts_Tk))

    def with_slots(self, ranks: int, slots: int) -> MergedPermutation:
        if self.counts_slots:
            return super().with_slots(ranks, slots)  # type: ignore[return-value]  # which raises
        return MergedPermutation(ranks * slots, self.choices, ranks, node_size=self.node_size, rank=self.rank)

    def weights(self, choice: Choice) -> Tensor:
        """Return an empty tensor: the weights travel in the rows."""
        return choice.weights.new_empty(0).detach()

    def permute(self, x_TM: Tensor, choice: Choice, plan: PermutationPlan) -> Tensor:
        found: MergedRows = plan.rows
        rows, here = found.rows, self.local_experts * self.node_size
        node_R1 = rows.weight_of_row_R.unsqueeze(1) % self.nodes  # its "weights" are the pairs (token, node)
        expert_Rk = found.experts_Tk[rows.token_of_row_R]
        there_Rk = expert_Rk.div(here, rounding_mode="floor") == node_R1
        local_Rk = torch.where(there_Rk, expert_Rk % here, -1)
        weights_Rk = rows.take(choice.weights.to(x_TM.dtype)).masked_fill(~there_Rk, 0)
        return torch.cat([rows.take(x_TM), local_Rk.to(x_TM.dtype), weights_Rk], dim=1)

    def unpermute(self, rows_RM: Tensor, weights: Tensor, plan: PermutationPlan) -> Tensor:
        del weights
        found: MergedRows = plan.rows
        return found.rows.give(rows_RM, None)

    def run_experts(self, rows_RM: Tensor, route: ChunkRoute, experts: Compute, product: Product) -> Tensor:
        """Run rows in any order, with all columns, through the experts named in them; returns sums [R, M]."""
        columns = [rows_RM.shape[1] - 2 * self.choices, self.choices, self.choices]
        x_RM, there_Rk, weights_Rk = rows_RM.split(columns, dim=1)
        sizes = route.rows_per_expert
        first = place_in_node(self.rank, self.node_size) * self.local_experts
        local_Rk = there_Rk.detach().long() - first
        local_Rk = local_Rk.masked_fill_(local_Rk >= self.local_experts, -1).clamp_(min=-1)
        bin_Rk = bins(local_Rk, (len(rows_RM),), self.local_experts)
        inputs = sorted_rows(bin_Rk, self.local_experts, sum(sizes))  # counts say how many there are: no sync
        weights_Rk = weights_Rk.contiguous()  # otherwise all columns would be kept for backward
        return inputs.give(experts(inputs.take(x_RM), sizes, product), weights_Rk)
