"""Operations of a model for one token, worked out by hand, and the peak that they are held against."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cost import ClusterFile
from penstock.cost.cluster_file import Fit, KernelModel
from penstock.cost.devices import Computing
from penstock.cost.model_flops import ModelFlops
from tests.plan.problems import problem

WORK = replace(
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
    flops = ModelFlops.of(WORK, (True, False, True), None)
    assert flops.per_token == pytest.approx(3 * (2 * SPARSE + DENSE + HEAD))
    assert flops.utilisation(1e6) is None, "nothing was measured"


def test_a_soft_gate_computes_its_slots() -> None:
    """Three slots of every expert for four tokens: three rows for each token."""
    soft = ModelFlops.of(replace(WORK, slots_per_sample=3), (True,), None)
    assert soft.per_token == pytest.approx(3 * (SPARSE + (3 - 2) * (2 * 3 * 8 * 6) + HEAD))


def test_the_peak_is_the_fastest_product_of_all_ranks() -> None:
    flops = ModelFlops.of(WORK, (True,), measured((1e6, 1e-3), (4e6, 2e-3), (0.0, 0.0)))
    assert flops.peak_per_s == 2e9 * WORK.world_size
    assert flops.utilisation(1000.0) == pytest.approx(1000 * flops.per_token / (2e9 * WORK.world_size))
    assert flops.peak_words == "0.002 TFLOP/s per rank (fastest product measured)"
    assert ClusterFile(name="by hand", nodes=1, ranks_per_node=2).peak_flops_per_s is None


@pytest.mark.parametrize(("precision", "tflops"), [("bfloat16", 989), ("float32", 67)])
def test_the_peak_of_a_known_device_is_that_of_its_data_sheet(precision: Computing, tflops: int) -> None:
    """With or without a measurement; a device without such units is held against what was measured."""
    for file in (None, measured((1e6, 1e-3))):
        flops = ModelFlops.of(WORK, (True,), file, "NVIDIA H100 80GB HBM3", precision)
        assert flops.peak_per_s == tflops * 1e12 * WORK.world_size
        assert flops.peak_words == f"{tflops} TFLOP/s per rank (data sheet of NVIDIA H100 80GB HBM3)"
    old = ModelFlops.of(WORK, (True,), measured((1e6, 1e-3)), "Tesla V100", "bfloat16")
    assert old.peak_per_s == 1e9 * WORK.world_size
