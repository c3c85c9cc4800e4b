"""The sizes of a step: pieces add up, and slots follow the capacity rule."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cost import ClusterFile
from penstock.cost.cluster_file import Fit, KernelModel
from penstock.cost.devices import Computing
from penstock.cost.model_flops import ModelFlops
from penstock.routing.sizes import capacity_slots, split_sizes
from tests.plan.problems import problem

counts = st.integers(1, 64)

WORK = replace(problem().workload, batch=6, seq_len=10, min_capacity=4, ep_size=2, node_size=0)


@given(st.integers(0, 300), counts)
def test_pieces_are_those_of_tensor_split(total: int, pieces: int) -> None:
    split = torch.tensor_split(torch.empty(total), pieces)
    assert split_sizes(total, pieces) == tuple(len(piece) for piece in split)


@given(st.integers(0, 10**5), counts, st.integers(1, 8), st.integers(1, 32), st.integers(0, 16))
def test_capacity_is_the_share_of_an_expert_rounded_up(
    tokens: int, num_experts: int, top_k: int, eighths: int, minimum: int
) -> None:
    share = Fraction(eighths, 8) * top_k * tokens / num_experts
    slots = capacity_slots(tokens, num_experts, top_k, eighths / 8, minimum)
    assert slots == max(minimum, math.ceil(share))


@given(counts, counts, st.integers(1, 16), st.integers(1, 16))
def test_tokens_and_rows_do_not_depend_on_the_cut(
    batch: int, seq_len: int, microbatches: int, chunks: int
) -> None:
    work = replace(WORK, batch=batch, seq_len=seq_len)
    tokens = [work.tokens(m, microbatches) for m in range(microbatches)]
    rows = [work.rows(m, microbatches, c, chunks) for m in range(microbatches) for c in range(chunks)]
    assert sum(tokens) == batch * seq_len
    assert sum(rows) == batch * seq_len * work.top_k


@given(counts, counts, st.integers(1, 16), st.sampled_from([0.5, 1.0, 1.25, 2.0]))
def test_with_capacity_every_slot_is_sent_whatever_the_chunks(
    batch: int, seq_len: int, chunks: int, factor: float
) -> None:
    work = replace(WORK, batch=batch, seq_len=seq_len, capacity_factor=factor)
    slots = capacity_slots(batch * seq_len, work.num_experts, work.top_k, factor, work.min_capacity)
    assert sum(work.rows(0, 1, c, chunks) for c in range(chunks)) == slots * work.num_experts


def test_with_capacity_each_microbatch_has_its_own_slots() -> None:
    work = replace(WORK, capacity_factor=1.0)
    assert work.rows(0, 1, 0, 1) == 4 * math.ceil(2 * 60 / 4)
    assert [work.rows(m, 4, 0, 1) for m in range(4)] == [40, 40, 20, 20]  # 20, 20, 10, 10 tokens
    assert replace(work, min_capacity=7).rows(3, 4, 0, 1) == 4 * 7


@given(counts, st.sampled_from([None, 0.5, 1.25]), st.integers(1, 9), st.integers(1, 4))
def test_ranks_with_the_same_tokens_deal_the_slots_of_all_of_them(
    seq_len: int, factor: float | None, minimum: int, dealt: int
) -> None:
    """Ranks that cut samples count slots for their own tokens, each at least the minimum."""
    work = replace(WORK, batch=2, seq_len=seq_len, capacity_factor=factor, min_capacity=minimum)
    unit = work.top_k if factor is None else work.num_experts
    assert work.rows(0, 1, 0, 1, 1, dealt) == math.ceil(work.rows(0, 1, 0, 1) / unit / dealt) * unit
    assert work.rows(0, 1, 0, 1, dealt) >= (factor is not None) * minimum * unit


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        ({"world_size": 8, "devices_per_node": 4}, 2),
        ({"world_size": 6, "devices_per_node": 4}, 2),
        ({"world_size": 4, "devices_per_node": 4}, 1),
        ({"world_size": 4, "devices_per_node": 8}, 1),
        ({"world_size": 4, "devices_per_node": 1}, 4),
        ({"world_size": 8, "ep_size": 4, "node_size": 2}, 4),
        ({"world_size": 8}, 1),
    ],
)
def test_nodes_of_the_world(sizes: dict[str, int], nodes: int) -> None:
    assert replace(WORK, **sizes).world_nodes == nodes  # type: ignore[arg-type]  # sizes are numbers


# ---- operations for one token ------------------------------------------------------------------------------


WITH_EXPERTS = replace(
    problem().workload,
    hidden_size=8,
    ffn_hidden_size=6,
    dense_ffn_hidden_size=32,
    shared_ffn_hidden_size=5,
    seq_len=4,
    vocab_size=11,
    num_experts=4,
    top_k=2,
    expert_matrices=3,
    slots_per_sample=0,
)
ATTENTION = 2 * 4 * 8 * 8 + 2 * 2 * 8 * (4 / 2)
"""Four square matrices; scores and values with half of the four tokens on average."""
SPARSE = ATTENTION + 2 * 8 * 4 + 2 * (2 * 3 * 8 * 6) + 2 * 3 * 8 * 5
"""With the router, two experts of three matrices, and shared experts of width 5."""
DENSE = ATTENTION + 2 * 3 * 8 * 32
HEAD = 2 * 8 * 11


def measured(*points: tuple[float, float]) -> ClusterFile:
    """A file in which a product of so many operations took so many seconds."""
    fit = Fit(r2=0.9, residual=0.1, points=points)
    kernel = KernelModel(name="matmul", unit="flop", alpha_s=0.0, beta_s_per_unit=1e-9, fit=fit)
    return ClusterFile(name="measured", nodes=1, ranks_per_node=2, kernels=(kernel,))


def test_forward_once_and_backward_twice() -> None:
    flops = ModelFlops.of(WITH_EXPERTS, (True, False, True), None)
    assert flops.per_token == pytest.approx(3 * (2 * SPARSE + DENSE + HEAD))
    assert flops.utilisation(1e6) is None, "nothing was measured"


def test_a_soft_gate_computes_its_slots() -> None:
    """Three slots of every expert for four tokens: three rows for each token."""
    soft = ModelFlops.of(replace(WITH_EXPERTS, slots_per_sample=3), (True,), None)
    assert soft.per_token == pytest.approx(3 * (SPARSE + (3 - 2) * (2 * 3 * 8 * 6) + HEAD))


def test_the_peak_is_the_fastest_product_of_all_ranks() -> None:
    flops = ModelFlops.of(WITH_EXPERTS, (True,), measured((1e6, 1e-3), (4e6, 2e-3), (0.0, 0.0)))
    assert flops.peak_per_s == 2e9 * WITH_EXPERTS.world_size
    assert flops.utilisation(1000.0) == pytest.approx(
        1000 * flops.per_token / (2e9 * WITH_EXPERTS.world_size)
    )
    assert flops.peak_words == "2 GFLOP/s per rank (fastest product measured)"
    assert ClusterFile(name="by hand", nodes=1, ranks_per_node=2).peak_flops_per_s is None


@pytest.mark.parametrize(("precision", "tflops"), [("bfloat16", 989), ("float32", 67)])
def test_the_peak_of_a_known_device_is_that_of_its_data_sheet(precision: Computing, tflops: int) -> None:
    """With or without a measurement; a device without such units is held against what was measured."""
    for file in (None, measured((1e6, 1e-3))):
        flops = ModelFlops.of(WITH_EXPERTS, (True,), file, "NVIDIA H100 80GB HBM3", precision)
        assert flops.peak_per_s == tflops * 1e12 * WITH_EXPERTS.world_size
        assert flops.peak_words == f"{tflops} TFLOP/s per rank (data sheet of NVIDIA H100 80GB HBM3)"
    old = ModelFlops.of(WITH_EXPERTS, (True,), measured((1e6, 1e-3)), "Tesla V100", "bfloat16")
    assert old.peak_per_s == 1e9 * WITH_EXPERTS.world_size
