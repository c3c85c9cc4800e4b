"""Permutations: from a router's choice to rows sorted by chunk, rank and expert, and back; the dropless one.

Rows are moved by sums over bags, with the same bits every time. Blocks of rows from ranks are put into the
order of experts here, too.

Shapes: T tokens, M hidden size, k choices, C chunks, E experts (total), R rows (all chunks one after the
other), B bags, N entries of bags, or weights: [T, k] where tokens choose, [E, S] where experts do; numbered
as if flat.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.apportion import Counts
from penstock.device import device_of
from penstock.moe.config import ChoiceKind
from penstock.moe.products import Compute, Product, reordered
from penstock.moe.routers import Choice, Masked, TokenChoice, chunk_tokens
from penstock.routing.routes import ChunkRoute

# ---- sums over bags ----------------------------------------------------------------------------------------
#
# PyTorch's embedding_bag adds bag by bag, in the order in which entries are given, in one pass over memory;
# nothing is scattered with atomics. On a CPU in float32 it is some ten times as fast as segment_reduce and
# three times as fast as index_add_.


@dataclass(frozen=True)
class Bags:
    """The entries to sum: out[b] is the sum of weight * source[index] over the entries of bag b.

    Attributes:
        index_N: Entries, bag after bag.
        starts_B: First entry of each bag.
        spare: Whether the last bag is not summed; it takes the entries that are not counted where only the
            device knows their number.
    """

    index_N: Tensor
    starts_B: Tensor
    spare: bool = False

    def sum(self, source: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """Sum the bags. Returns [B, M], or [B - 1, M] with a spare bag."""
        bags = len(self.starts_B) - self.spare
        if 0 in source.shape:  # no token or no row at all
            return source.new_zeros(bags, *source.shape[1:])
        if source.stride(1) != 1:  # a gradient may be a single number, expanded, which is slow
            source = source.contiguous()
        sums = F.embedding_bag(self.index_N, source, self.starts_B, mode="sum", per_sample_weights=weights_N)
        return sums[:bags] if self.spare else sums


def fill_bags(bag_N: Tensor, index_N: Tensor, bags: int, kept: int | None) -> tuple[Bags, Tensor]:
    """Make bags of entries in any order, and return which entry went where.

    Entries for bag `bags` do not count.

    Never waits for a GPU.

    Args:
        kept: Number of entries that count; None if the host does not know.
    """
    entry_N = stable_argsort(bag_N, bags)[:kept]
    counts = histogram(bag_N, bags + 1)
    starts_B = (counts.cumsum(0) - counts)[: bags + (kept is None)]
    return Bags(index_N[entry_N].clamp(min=0), starts_B, kept is None), entry_N


def stable_argsort(values: Tensor, largest: int) -> Tensor:
    """Return `values.argsort(stable=True)` for integers from 0 to `largest`."""
    if device_of(values).is_cpu and largest <= torch.iinfo(torch.int16).max:
        # For 16 bits NumPy sorts by counting, which is four times as fast as by comparison.
        return torch.from_numpy(values.to(torch.int16).numpy().argsort(kind="stable"))
    return values.argsort(stable=True)


def histogram(values: Tensor, bins: int) -> Tensor:
    """Count how often each value occurs, [bins] int64. Unlike `torch.bincount` it does not wait for a GPU."""
    zeros = torch.zeros(bins, dtype=torch.int64, device=values.device)
    return zeros.scatter_add_(0, values, torch.ones_like(values))


# ---- moving rows between token order and expert order, found by index (Tutel, MegaBlocks) -----------------
#
# Both directions are sums over bags, and each is the transpose of the other: a token is the bag of its
# rows; a row is a bag of one token, or of none where it is padding. So backward scatters no more than
# forward.


@dataclass(frozen=True)
class RowPlan:
    """The token of every row, and the weight that its output will have there.

    Attributes:
        token_of_row_R, weight_of_row_R: -1 in a row that is padding.
        row_of_weight: In the shape of the weights, -1 if dropped.
        padded: Whether any row can be padding.
        to_rows, to_tokens: The two directions.
        weight_of_entry_N: The weight of each entry of to_tokens.
        weighted: to_rows for a product with weights, where padding may name any token, as its weight is 0.
    """

    token_of_row_R: Tensor
    weight_of_row_R: Tensor
    row_of_weight: Tensor
    padded: bool
    to_rows: Bags
    to_tokens: Bags
    weight_of_entry_N: Tensor
    weighted: Bags

    @staticmethod
    def make(row_of_weight: Tensor, token_N: Tensor, tokens: int, rows: int, *, padded: bool) -> RowPlan:
        """Make a plan from the row and the token of every weight. Never waits for a GPU.

        Args:
            padded: Whether rows can be padding; without it each row has a weight.
        """
        row_N = row_of_weight.reshape(-1)
        weight_of_row = torch.full((rows + 1,), -1, dtype=torch.int64, device=row_N.device)
        # Row `rows` takes everything that was dropped and is cut off again: no size depends on data.
        weight_of_row[torch.where(row_N < 0, rows, row_N)] = torch.arange(len(row_N), device=row_N.device)
        weight_of_row_R = weight_of_row[:rows]
        token_of_row_R = take_rows(token_N, weight_of_row_R, padded, nothing=-1)
        # Entries are sorted by token, then by weight: chunks do not change the order of a sum.
        bag_N = torch.where(row_N < 0, tokens, token_N)
        to_tokens, weight_of_entry_N = fill_bags(bag_N, row_N, tokens, None if padded else rows)
        row_R = torch.arange(rows, device=row_N.device)
        weighted = to_rows = Bags(token_of_row_R.clamp(min=0), row_R)
        if padded:
            bag_R = torch.where(token_of_row_R < 0, rows, row_R)
            to_rows, _ = fill_bags(bag_R, token_of_row_R, rows, None)
        return RowPlan(
            token_of_row_R=token_of_row_R,
            weight_of_row_R=weight_of_row_R,
            row_of_weight=row_of_weight,
            padded=padded,
            to_rows=to_rows,
            to_tokens=to_tokens,
            weight_of_entry_N=weight_of_entry_N,
            weighted=weighted,
        )

    @staticmethod
    def of_choices(row_Tk: Tensor, weight_of_row_R: Tensor) -> RowPlan:
        """Make a plan where tokens choose and every row has a weight, without the sorting of `make`."""
        tokens, choices = row_Tk.shape
        rows = len(weight_of_row_R)
        if rows < row_Tk.numel():
            token_N = torch.arange(row_Tk.numel(), device=row_Tk.device) // choices
            return RowPlan.make(row_Tk, token_N, tokens, rows, padded=False)
        token_R = weight_of_row_R // choices
        to_rows = Bags(token_R, torch.arange(rows, device=row_Tk.device))
        starts_T = torch.arange(0, rows, choices, device=row_Tk.device)
        return RowPlan(
            token_of_row_R=token_R,
            weight_of_row_R=weight_of_row_R,
            row_of_weight=row_Tk,
            padded=False,
            to_rows=to_rows,
            to_tokens=Bags(row_Tk.reshape(-1), starts_T),
            weight_of_entry_N=torch.arange(rows, device=row_Tk.device),
            weighted=to_rows,
        )

    def take(self, x_TM: Tensor) -> Tensor:
        """Order rows: return the token of every row, zeros in padding, [R, M]."""
        return _Take.apply(x_TM, self)  # type: ignore[no-any-return]  # apply is untyped in torch

    def give(self, rows_RM: Tensor, weights: Tensor | None) -> Tensor:
        """Unpermute rows: return every token's rows, weighted and summed, [T, M]; padding is never read.

        Args:
            weights: None means 1 for all.
        """
        return _Give.apply(rows_RM, weights, self)  # type: ignore[no-any-return]  # as above


class _Take(torch.autograd.Function):
    """x_TM -> rows_RM; its transpose adds the rows of each token."""

    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, plan: RowPlan) -> Tensor:
        ctx.plan = plan
        return plan.to_rows.sum(x_TM)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.plan.to_tokens.sum(grads[0]), None


class _Give(torch.autograd.Function):
    """rows_RM, weights -> weighted sums out_TM; its transpose spreads the gradient over the rows."""

    @staticmethod
    def forward(ctx: Any, rows_RM: Tensor, weights: Tensor | None, plan: RowPlan) -> Tensor:
        ctx.plan = plan
        if weights is None:
            return plan.to_tokens.sum(rows_RM)
        ctx.save_for_backward(rows_RM, weights)
        weights_N = weights.reshape(-1)[plan.weight_of_entry_N].to(rows_RM.dtype)
        return plan.to_tokens.sum(rows_RM, weights_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (grad_TM,) = grads
        plan: RowPlan = ctx.plan
        saved = ctx.saved_tensors  # once: under a checkpoint every access recomputes
        if not saved:
            return plan.to_rows.sum(grad_TM), None, None
        rows_RM, weights = saved
        weights_R = take_rows(weights.reshape(-1), plan.weight_of_row_R, plan.padded).to(rows_RM.dtype)
        for_pairs = device_of(rows_RM).is_cpu and rows_RM.dtype in (torch.float32, torch.float64)
        if for_pairs and 0 not in grad_TM.shape and 0 not in rows_RM.shape:
            grad_RM, grad_weights = plan.weighted.sum(grad_TM, weights_R), _products(rows_RM, grad_TM, plan)
            return grad_RM, grad_weights.to(weights.dtype).view_as(weights), None
        grad_RM, product_R = _spread(grad_TM, weights_R, rows_RM, plan.weighted)
        grad_weights = take_rows(product_R, plan.row_of_weight.reshape(-1), padded=True)
        return grad_RM, grad_weights.to(weights.dtype).view_as(weights), None


def _products(rows_RM: Tensor, grad_TM: Tensor, plan: RowPlan) -> Tensor:
    """Return the product of each weight's row and its token's gradient, summed over M, [N]. On a CPU."""
    # Row by row, gradients would be read out of order, so this goes token by token; MKL's dot would be slow.
    bags = plan.to_tokens
    kept = int(bags.starts_B[-1]) if bags.spare else len(bags.index_N)
    ends_B = bags.starts_B if bags.spare else F.pad(bags.starts_B, (0, 1), value=kept)
    shape, nothing = (len(grad_TM), len(rows_RM)), rows_RM.new_zeros(kept)
    _pass_over_warning()
    pairs = torch.sparse_csr_tensor(ends_B, bags.index_N[:kept], nothing, shape, check_invariants=False)
    product_N = torch.sparse.sampled_addmm(pairs, grad_TM.contiguous(), rows_RM.t(), beta=0.0).values()
    zeros_N = rows_RM.new_zeros(plan.row_of_weight.numel())
    return zeros_N.index_copy_(0, plan.weight_of_entry_N[:kept], product_N)


@cache
def _pass_over_warning() -> None:
    """Suppress torch's warning, given once per process, that sparse tensors are in beta state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


def _spread(grad_TM: Tensor, weights_R: Tensor, rows_RM: Tensor, to_rows: Bags) -> tuple[Tensor, Tensor]:
    """Return weight times token gradient of every row [R, M], and row times gradient, summed over M [R]."""
    if 0 in grad_TM.shape or 0 in rows_RM.shape:
        return torch.zeros_like(rows_RM), torch.zeros_like(weights_R)
    if grad_TM.dtype == torch.bfloat16 and not device_of(grad_TM).is_cpu:
        # On GPUs embedding_bag has no derivative by weights in this type. A product of matrices adds in
        # float32; the gradients of rows are written and read once more.
        taken_RM = grad_TM.index_select(0, to_rows.index_N)
        product_R = torch.bmm(taken_RM.unsqueeze(1), rows_RM.unsqueeze(2)).flatten()
        return taken_RM * weights_R.unsqueeze(1), product_R
    # The second result is the derivative of the first by the weights, in the direction of the rows. For it
    # autograd needs one pass over the rows; to multiply and to sum would write and read all products.
    with torch.enable_grad():
        grad_RM = to_rows.sum(grad_TM, weights_R.requires_grad_())
    (product_R,) = torch.autograd.grad(grad_RM, weights_R, rows_RM)
    return grad_RM.detach(), product_R


def take_rows(source: Tensor, index: Tensor, padded: bool, nothing: int = 0) -> Tensor:
    """Return source[index] along dimension 0, with `nothing` where index is -1."""
    if not padded:
        return source.index_select(0, index)
    if source.shape[0] == 0:
        return source.new_full((index.shape[0], *source.shape[1:]), nothing)
    taken = source.index_select(0, index.clamp(min=0))
    dead = (index < 0).view(-1, *[1] * (source.dim() - 1))
    return taken.masked_fill_(dead, nothing)


# ---- permutations, and the blocks of rows that they put in order -------------------------------------------


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
        out_RM = experts(_transposed(rows_RM, route.received), sizes, product)
        return _transposed(out_RM, list(zip(*route.received, strict=True)))

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


def _transposed(rows_RM: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Reorder rows that are sorted by (outer, inner), with these sizes, to rows sorted by (inner, outer)."""
    outer, inner = len(sizes), len(sizes[0])
    if outer == 1 or inner == 1:  # already in the wanted order: no copy
        return rows_RM
    flat = [size for row in sizes for size in row]
    return reordered(rows_RM, flat, [o * inner + i for i in range(inner) for o in range(outer)])


# ---- the sort permutation: dropless, rows sorted by expert, nothing padded (MegaBlocks, Gale et al. 2023) -


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

    def arrange(self, positions_Tk: Tensor, sizes: tuple[int, ...], *, masked: Masked) -> PermutationPlan:
        """Make the plan from the positions alone.

        Args:
            sizes: Tokens of every chunk.
            masked: Whether any is -1, as a choice says it.
        """
        tokens, choices = positions_Tk.shape
        chunks = len(sizes)
        bin_Tk = bins(positions_Tk, sizes, self.num_experts)
        counts_CE = histogram(bin_Tk.flatten(), chunks * self.num_experts + 1)[:-1].view(chunks, -1)
        if callable(masked):  # padding has no rows
            parts = np.split(masked(), [*accumulate(sizes[:-1])])
            rows = [choices * int(part.sum()) for part in parts]
        elif masked:  # Device-to-host sync: how many rows there are depends on the choice.
            rows = counts_CE.sum(dim=1).cpu().tolist()
        else:
            rows = [size * choices for size in sizes]
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
    token_T1 = torch.arange(sum(sizes), device=parts_Tk.device).unsqueeze(1)
    begun = [token_T1 >= start for start in accumulate(sizes[:-1])]  # each chunk but the first
    chunk_T1 = torch.stack(begun).sum(0) if begun else token_T1 * 0
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
