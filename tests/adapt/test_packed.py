"""Documents in one row that are told apart by their lengths, as kernels of flash attention are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

import penstock
from tests.support.adapted import Batch, distance, grads_of, share_of, small, without_labels
from tests.support.ranks import Pools

LENGTHS = ([5, 7], [3, 1, 8])
"""Of the documents in each rank's row."""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **named: Any
) -> tuple[Tensor, None]:
    """Attend to one's own document, by the arguments of kernels alone."""
    assert attention_mask is None and module.is_causal
    places_L = torch.arange(query.shape[2])
    document_L = torch.bucketize(places_L, named["cu_seq_lens_q"], right=True)
    seen_LL = (document_L[:, None] == document_L) & (places_L[:, None] >= places_L)
    out = F.scaled_dot_product_attention(query, key, value, seen_LL, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def told_by_lengths(**changes: Any) -> Any:
    AttentionInterface.register("by_lengths", attend)
    model = small("mixtral", **changes)
    model.set_attn_implementation("by_lengths")
    return model


def row(number: int) -> dict[str, Any]:
    """The row of a rank."""
    bounds = torch.tensor([0, *LENGTHS[number]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    given: dict[str, Any] = Batch().inputs(number, number + 1)
    positions_1L = torch.cat([torch.arange(length) for length in LENGTHS[number]]).unsqueeze(0)
    most = max(LENGTHS[number])
    told = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": most, "max_length_k": most}
    return {**given, "position_ids": positions_1L, **told}


def steps(rank: int, world: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Losses and gradients of a step with labels, of one without, and of one whose layers are recomputed."""
    model = penstock.parallelize(told_by_lengths(), ep_size=world, plan="penstock")
    found = []
    for kind in ("labels", "own loss", "again"):
        model.zero_grad()
        if kind == "again":
            model.gradient_checkpointing_enable()
        given = row(rank)
        loss = (
            model(**without_labels(given)).logits.square().mean()
            if kind == "own loss"
            else model(**given).loss
        )
        loss.backward()
        found.append((loss.item(), grads_of(model)))
    return found


@pytest.mark.slow
def test_documents_in_one_row_are_told_apart_by_their_lengths(ranks: Pools) -> None:
    results = ranks(2).run(steps, 2)
    whole, wanted = told_by_lengths(), []
    labels = sum(int((row(number)["labels"][:, 1:] >= 0).sum()) for number in range(2))
    for own in (False, True, False):
        whole.zero_grad()
        losses = []
        for number in range(2):
            given = {**row(number), "use_cache": False}
            out = whole(**given, num_items_in_batch=labels)
            losses.append(out.logits.square().mean() if own else out.loss)
        ((sum(losses) / 2) if own else sum(losses)).backward()
        wanted.append(
            ([each.item() for each in losses] if own else [sum(losses).item()] * 2, grads_of(whole))
        )
    for rank, found in enumerate(results):
        for (loss, grads), (losses_of_ranks, expected) in zip(found, wanted, strict=True):
            assert loss == pytest.approx(losses_of_ranks[rank], rel=1e-5)
            assert all(
                distance(grad, share_of(expected[name], grad, rank)) < 1e-5 for name, grad in grads.items()
            )


@pytest.mark.slow
def test_documents_in_several_rows_are_refused() -> None:
    model = penstock.parallelize(told_by_lengths())
    given = {**row(0), "input_ids": Batch().inputs()["input_ids"], "labels": Batch().inputs()["labels"]}
    with pytest.raises(
        ValueError, match=r"cu_seq_lens_q, .*packed into one row, and input_ids are \[4, 12\]"
    ):
        model(**{**given, "position_ids": None})
