"""The memory formula, worked out by hand and against what a model really has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.decision import Decision
from penstock.plan import estimate_memory
from penstock.plan.memory import ACTIVATIONS, STATE
from tests.plan.problems import problem


def test_by_hand() -> None:
    """Two MoE layers, one expert of 2 x 128 x 256 per rank, 256 tokens of which each goes to two experts."""
    found = estimate_memory(problem(), Decision())
    weights = 2 * (1 << 20) + 2 * 2 * 128 * 256 * 4
    assert found.weights_bytes == found.gradients_bytes == weights
    assert found.optimizer_bytes == 2 * weights
    layer = 4 * (256 * 8 * 128 + 512 * (4 * 128 + 2 * 256))
    assert found.activations_bytes == 2 * layer + 256 * 64 * 4 * 2
    assert found.buffers_bytes == layer + 2 * 512 * 128 * 4
    assert found.total_bytes == sum(found.parts.values())


def test_microbatches_save_buffers_and_nothing_else() -> None:
    whole, cut = (estimate_memory(problem(), Decision(schedule="flowmoe", microbatches=n)) for n in (1, 4))
    assert whole.activations_bytes == cut.activations_bytes
    assert whole.buffers_bytes == 4 * cut.buffers_bytes


def test_a_larger_batch_makes_activations_dominate() -> None:
    assert next(iter(estimate_memory(problem(batch=1), Decision()).parts)) == STATE
    assert next(iter(estimate_memory(problem(batch=64), Decision()).parts)) == ACTIVATIONS


def test_dense_blocks_and_shared_experts_count() -> None:
    dense = estimate_memory(problem((False,)), Decision())
    assert dense.weights_bytes == 1 << 20
    assert dense.activations_bytes == 4 * 256 * (8 * 128 + 2 * 256) + 256 * 64 * 4 * 2
    each = problem((True,))
    shared = replace(each, workload=replace(each.workload, shared_ffn_hidden_size=64))
    more = (
        estimate_memory(shared, Decision()).activations_bytes
        - estimate_memory(each, Decision()).activations_bytes
    )
    assert more == 4 * 256 * 2 * 64


def test_shards_share_weights_and_tokens() -> None:
    each = problem()
    halves = replace(each, workload=replace(each.workload, shard_size=2))
    whole, half = estimate_memory(each, Decision()), estimate_memory(halves, Decision())
    experts = 2 * 2 * 128 * 256 * 4
    assert whole.weights_bytes - half.weights_bytes == experts // 2
    assert half.activations_bytes == pytest.approx(whole.activations_bytes / 2, rel=0.01)
