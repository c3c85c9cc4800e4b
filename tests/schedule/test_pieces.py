"""Gradients in many pieces: work is linear in them, and a limit says what to use instead."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from penstock.config import ConfigError
from penstock.cost import step
from penstock.decision import Decision
from penstock.plan import evaluate
from penstock.plan.published import PUBLISHED
from penstock.plan.tuner import SizeRange
from penstock.routing import sizes
from penstock.runtime import buckets
from penstock.runtime.buckets import FlatGradients
from penstock.schedule.system import MOST_REDUCTIONS, least_chunk_bytes, pieces_of
from tests.plan.problems import problem
from tests.support.work import calls_of

HIDDEN_65536 = 4 * 65536**2 * 4
"""Bytes of one layer's replicated gradients with hidden_size=65536."""


@pytest.mark.parametrize("schedule", ["flowmoe", "penstock", "lina"])
def test_work_is_linear_in_the_pieces(schedule: str) -> None:
    """Function calls to order, simulate and bound 4 times as many pieces: 4 times as many, not 16."""
    each = problem((True, True), all_reduce_bytes=1 << 20)
    choice = partial(Decision, schedule=schedule, priority="critical_path")
    few, many = (
        calls_of(partial(evaluate, each, choice(all_reduce_chunk_bytes=size))) for size in (4096, 1024)
    )
    assert many < 4.5 * few


def test_a_layer_is_cut_once_however_many_its_pieces() -> None:
    """What seconds were lost by: every piece used to cut the whole layer again."""
    each = problem((True, True), all_reduce_bytes=1 << 20)
    with mock.patch.object(step, "part_sizes", wraps=sizes.part_sizes) as cut:
        evaluate(each, Decision(schedule="flowmoe", all_reduce_chunk_bytes=1024))
    assert cut.call_count <= 8


def test_a_bucket_is_cut_once_per_step() -> None:
    bucket, parts = FlatGradients([nn.Parameter(torch.zeros(5000))]), (1,) * 1000
    with mock.patch.object(buckets, "part_sizes", wraps=sizes.part_sizes) as cut:
        bucket.begin()
        pieces = [bucket.piece(index, parts) for index in range(1000)]
        assert cut.call_count == 1
        bucket.piece(0, (1, 2))
        assert cut.call_count == 2
    assert [piece.numel() for piece in pieces] == [5] * 1000
    assert [piece.storage_offset() for piece in pieces] == list(range(0, 5000, 5))


def test_more_pieces_than_a_step_can_have_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        pieces_of((HIDDEN_65536,) * 2, 1 << 20)
    text = str(caught.value)
    assert "all_reduce_chunk_bytes = 1048576" in text and "131,072 all-reduce pieces" in text
    least = least_chunk_bytes((HIDDEN_65536,) * 2)
    assert f"Use {least} or more" in text
    assert sum(pieces_of((HIDDEN_65536,) * 2, least)) <= MOST_REDUCTIONS


@pytest.mark.parametrize("sizes", [(), (0, 0), (1,), (7, 0, 1 << 40), (HIDDEN_65536,) * 1000, (3,) * 70_000])
def test_the_least_size_is_always_allowed(sizes: tuple[int, ...]) -> None:
    least = least_chunk_bytes(sizes)
    assert sum(pieces_of(sizes, least)) <= max(MOST_REDUCTIONS, 2 * len(sizes))


def test_no_size_is_no_division_by_zero() -> None:
    with pytest.raises(ConfigError, match="all_reduce_chunk_bytes = 0"):
        pieces_of((1024,), 0)


def test_planners_and_tuners_ask_for_no_more_pieces_than_there_may_be() -> None:
    """Lina's 30 MiB are 35,000 pieces of sixteen such layers."""
    huge = problem((True,) * 16, all_reduce_bytes=HIDDEN_65536)
    for name in ("lina", "flowmoe"):
        choice = PUBLISHED[name](huge)
        assert sum(huge.cut(choice).pieces["replicated"]) <= MOST_REDUCTIONS, name
    many = (1 << 20,) * 2000
    assert sum(pieces_of(many, SizeRange.of(many).least_bytes)) <= MOST_REDUCTIONS
