"""What ranks that share attention must have alike, or as parts: refused by name before numbers are wrong."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from penstock.device import Cpu, using
from penstock.models import ModelConfig, MoEDecoder
from penstock.models.decoder import TensorShard, VocabularyShard
from penstock.runtime import PipelinedStack
from penstock.runtime.batch import check_vocabulary
from penstock.runtime.machinery import silent
from penstock.topology import ParallelConfig
from penstock.topology.faults import reason
from penstock.train.assemble import build_machinery, build_stack, first_plan
from tests.runtime.test_layout_call_orders import case_of
from tests.support.parity import Case, machinery_of, stack_of
from tests.support.ranks import Pools

CASE: Case = replace(case_of("gather"), world_size=2, ep_size=1, etp_size=1)


def whole_model(rank: int, case: Case) -> None:
    """A stack of a model that is not sharded."""
    machinery = machinery_of(rank, case)
    layout = machinery.layout
    model = MoEDecoder(case.model, case.moe, ep_size=layout.ep_size, ep_rank=layout.ep_rank)
    PipelinedStack(model, model, case.moe, machinery, lambda *args: first_plan(case.config, layout, *args))


def batch_of_another_size(rank: int, case: Case) -> None:
    stack = stack_of(rank, case)
    tokens = torch.zeros(2 - rank, case.model.seq_len, dtype=torch.int64)
    stack(tokens, tokens)


def unknown(rank: int, case: Case, token: int, label: int) -> None:
    """On connections of its own, since the failure of a task cuts them."""
    layout = machinery_of(rank, case).layout
    machinery = build_machinery(layout, torch.device("cpu"), ParallelConfig(), "float32")
    stack = build_stack(case.config, machinery, case.dtype)
    tokens, labels = (torch.zeros(2, case.model.seq_len, dtype=torch.int64) for _ in range(2))
    tokens[1, 2], labels[0, 1] = token, label
    stack(tokens, labels)


def runs_in_silence(rank: int, case: Case) -> float:
    """As a profile does: every rank with samples of its own, and nothing is sent."""
    moe = replace(case.moe, capacity_factor=1.0)
    stack = build_stack(replace(case.config, moe=moe), silent(machinery_of(rank, case)))
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(32, (2, case.model.seq_len), generator=generator)
    loss = stack(tokens, tokens, largest_batch=2)
    loss.backward()
    stack.close()
    return float(loss)


def test_a_model_that_was_not_cut_is_refused(ranks: Pools) -> None:
    for words in ranks(2).told(ValueError, whole_model, CASE):
        assert words.startswith("layer 0 has no part of a shared parameter, and tp_size = 2 ranks share")
        assert "shard=TensorShard(layout.tp_rank, layout.tp_size)" in words


def test_batches_of_other_sizes_are_refused_on_all_ranks(ranks: Pools) -> None:
    for words in ranks(2).told(ValueError, batch_of_another_size, CASE):
        assert "ranks 0 and 1 share attention (tp_size = 2)" in words
        assert "batches of [2, 5] and [1, 5] tokens" in words


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("token", "label", "said"),
    [
        (32, 0, "token 32 is out of bounds: the vocabulary is 0 to 31"),
        (-1, 0, "token -1 is out of bounds"),
        (0, 32, "label 32 is out of bounds: the vocabulary is 0 to 31, or -100"),
        (0, -1, "label -1 is out of bounds"),
    ],
)
def test_what_is_no_token_is_refused(token: int, label: int, said: str, tp_size: int, ranks: Pools) -> None:
    """The rank that is second may hear of it from the first."""
    found = ranks(2).told(RuntimeError, unknown, replace(CASE, tp_size=tp_size), token, label)
    assert all(found) and any(said in words for words in found), found


class OnGpu(Cpu):
    """Says of tensors of the CPU that a GPU has them; there a check of the device raises at once."""

    is_gpu = True


@pytest.mark.parametrize(("label", "known"), [(-100, True), (0, True), (31, True), (32, False), (-1, False)])
def test_on_a_gpu_the_device_compares_labels(label: int, known: bool) -> None:
    labels = torch.tensor([[3, label]])
    with (
        using(OnGpu()),
        nullcontext() if known else pytest.raises(RuntimeError, match="label is"),
    ):
        check_vocabulary("label", labels, 32, besides=-100)


@pytest.mark.parametrize(("token", "known"), [(0, True), (31, True), (32, False), (-100, False)])
def test_on_a_gpu_the_device_compares_tokens(token: int, known: bool) -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_len=5, vocab_size=32)
    embedding = VocabularyShard(model, TensorShard(1, 2))
    with (
        using(OnGpu()),
        nullcontext() if known else pytest.raises(RuntimeError, match="token is"),
    ):
        embedding(torch.tensor([[token]]))


def test_what_has_failed_on_a_device_is_explained_where_it_is_noticed() -> None:
    said = reason(RuntimeError("CUDA error: device-side assert triggered\nSearch for more"))
    assert said.startswith("CUDA error: device-side assert triggered") and "standard error" in said


def test_a_step_that_sends_nothing_compares_nothing(ranks: Pools) -> None:
    assert all(loss > 0 for loss in ranks(2).run(runs_in_silence, CASE))
