"""What the parts of a model ask of a device's kernels: products by their sizes, heads, and bytes in memory.

Bytes are those that kernels read and write where each makes one pass over what it must: norms, rotations,
activations, sums and permutations are fused as libraries fuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.ops.work import Kernels, Part, Product

if TYPE_CHECKING:
    from penstock.cost.workload import Workload

NORM, RESIDUAL, ADDED = 2, 4, 3
"""Passes over hidden states: a norm; a sum with the residual stream and its norm; a sum."""

SCATTERED = 1.33
"""Time of bytes that are permuted, over that of as many in a row."""

LOGIT_BYTES, PROBABILITY_BYTES = 14, 16
"""Bytes of a token and word of the vocabulary in the loss, which are cast to float32 and turned into
probabilities there; and of a token and expert in the router."""


def _attention(work: Workload, tokens: float, shares: int) -> Kernels:
    heads = work.heads
    hidden = (NORM + RESIDUAL) * work.hidden_size
    return Kernels(
        products=tuple(
            Product(tokens, rows, columns / shares, number=number) for rows, columns, number in heads.matrices
        ),
        score_flops=tokens * heads.score_flops(work.seq_len) / shares,
        score_width=heads.width,
        moved_bytes=tokens * work.element_bytes * (hidden + heads.moved / shares),
    )


def _rows(work: Workload) -> float:
    """Return the rows of a token that leave: one for each of its experts, or for each rank that has any."""
    return work.top_k * (work.joined_share(between=False) if work.one_copy_per_rank else 1.0)


def _router(work: Workload, tokens: float, shares: int) -> Kernels:
    """Return the work of the gate and of the permutation after it."""
    del shares
    permuted = 2 * SCATTERED * _rows(work) * work.hidden_size * work.element_bytes
    return Kernels(
        products=(Product(tokens, work.hidden_size, work.num_experts),),
        moved_bytes=tokens * (permuted + PROBABILITY_BYTES * work.num_experts),
    )


def _feed_forward(work: Workload, tokens: float, width: float, matrices: int) -> Kernels:
    hidden = work.hidden_size
    inward, outward = (hidden, (matrices - 1) * width), (width, hidden)
    return Kernels(
        products=(Product(tokens, *inward), Product(tokens, *outward)) if width else (),
        moved_bytes=tokens * work.element_bytes * (matrices * width + ADDED * hidden),
    )


def _dense(work: Workload, tokens: float, shares: int) -> Kernels:
    return _feed_forward(work, tokens, work.dense_ffn_hidden_size / shares, 3)


def _shared(work: Workload, tokens: float, shares: int) -> Kernels:
    return _feed_forward(work, tokens, work.shared_ffn_hidden_size / shares, work.expert_matrices)


def _experts(work: Workload, rows: float, shares: int) -> Kernels:
    """Return the work of a rank's experts: grouped products, and rows put in their order and back."""
    groups, hidden = work.placement.slots, work.hidden_size
    width, inner = work.ffn_hidden_size / shares, work.expert_matrices - 1
    group_rows = rows / groups
    sorting = 2 * hidden * (1 + _rows(work) / work.top_k) if groups > 1 and work.ep_size > 1 else 0
    return Kernels(
        products=(
            Product(group_rows, hidden, inner * width, groups=groups),
            Product(group_rows, width, hidden, groups=groups),
        ),
        moved_bytes=rows * work.element_bytes * (work.expert_matrices * width + sorting),
    )


def _home(work: Workload, tokens: float, shares: int) -> Kernels:
    """Return the work of adding a token's rows to the residual stream."""
    del shares
    return Kernels(
        moved_bytes=tokens * work.element_bytes * work.hidden_size * (SCATTERED * (work.top_k + 1) + ADDED)
    )


def _head(work: Workload, tokens: float, shares: int) -> Kernels:
    return Kernels(
        products=(Product(tokens, work.hidden_size, work.vocab_size / shares),),
        moved_bytes=tokens * work.element_bytes * NORM * work.hidden_size,
    )


def _loss(work: Workload, tokens: float, shares: int) -> Kernels:
    return Kernels(moved_bytes=tokens * LOGIT_BYTES * work.vocab_size / shares)


def _hidden(work: Workload, tokens: float, shares: int) -> Kernels:
    """Return the work of one pass that reads and writes hidden states."""
    del shares
    return Kernels(moved_bytes=tokens * work.element_bytes * 2 * work.hidden_size)


PARTS: Final[dict[Part, Callable[[Workload, float, int], Kernels]]] = {
    "attention": _attention,
    "router": _router,
    "dense": _dense,
    "shared": _shared,
    "experts": _experts,
    "home": _home,
    "head": _head,
    "loss": _loss,
    "hidden": _hidden,
}
"""Every part by name, for tokens (experts: rows) of a rank; shares: the ranks that divide its width."""


def kernels_of(
    work: Workload, amount: float, *parts: Part, shares: int = 1, beside_bytes: float = 0.0
) -> Kernels:
    """Return the forward kernels of some parts of a model together, see `Sizes.kernels`."""
    by_part = [PARTS[part](work, amount, shares) for part in parts]
    return Kernels(
        products=tuple(product for of_part in by_part for product in of_part.products),
        score_flops=sum(of_part.score_flops for of_part in by_part),
        score_width=max(of_part.score_width for of_part in by_part),
        moved_bytes=beside_bytes + sum(of_part.moved_bytes for of_part in by_part),
    )
