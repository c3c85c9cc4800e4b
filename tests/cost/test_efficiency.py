"""Kernels by their sizes: what fills no tile is lost, small ones start, and the rest moves bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.cost import ClusterFile, ProfiledCluster
from penstock.cost.cluster_file import TaskModel
from penstock.cost.clusters import find_cluster
from penstock.cost.devices import DEVICES, KERNEL_S, SHARES, Efficiency
from penstock.graph import Phase
from penstock.ops import Op, Work
from penstock.ops.work import Kernels, Product

PEAK = 989e12
HOPPER = Efficiency(
    shares=SHARES["Hopper"],
    units=132,
    peak_flops_per_s=PEAK,
    memory_bytes_per_s=2.7e12,
    element_bytes=2,
)


def share(rows: float, inner: float, columns: float, groups: int = 1) -> float:
    """The share of the peak that a product reaches forward."""
    kernels = Kernels(products=(Product(rows, inner, columns, groups),))
    return float(2 * rows * inner * columns * groups / HOPPER.seconds(kernels, Phase.FORWARD) / PEAK)


def test_large_products_reach_most_and_experts_with_few_rows_little() -> None:
    large, *experts = share(16384, 8192, 8192), *(share(rows, 2048, 1536, 16) for rows in (2048, 256, 16))
    assert 0.6 < large <= SHARES["Hopper"].products
    assert large > experts[0] > experts[1] > experts[2]
    assert experts[2] < 0.1


def test_a_wave_of_tiles_more_takes_as_long_as_a_whole_one() -> None:
    """132 units compute 132 tiles at once; 133 take twice as long as 132."""
    full, more = (
        HOPPER.seconds(Kernels(products=(Product(256 * tiles, 4096, 128),)), Phase.FORWARD)
        for tiles in (132, 133)
    )
    assert full < more <= 2 * full


def test_backward_makes_two_gradients_which_split_phases_make_apart() -> None:
    kernels = Kernels(
        products=(Product(16384, 8192, 8192),), score_flops=1e9, score_width=128, moved_bytes=1e6
    )
    seconds = {phase: HOPPER.seconds(kernels, phase) for phase in Phase}
    assert seconds[Phase.RECOMPUTE] == seconds[Phase.FORWARD]
    assert seconds[Phase.BACKWARD] == pytest.approx(seconds[Phase.INPUT] + seconds[Phase.WEIGHT])
    assert seconds[Phase.BACKWARD] > 2 * seconds[Phase.FORWARD]


def test_a_small_kernel_takes_as_long_as_its_start_and_a_narrow_one_as_its_bytes() -> None:
    assert HOPPER.seconds(Kernels(products=(Product(1, 8, 8),)), Phase.FORWARD) == KERNEL_S
    narrow = HOPPER.seconds(Kernels(products=(Product(1 << 20, 8, 1024),)), Phase.FORWARD)
    assert narrow >= 2 * (1 << 20) * 1024 / 2.7e12
    moved = Kernels(moved_bytes=2.7e9)
    assert HOPPER.seconds(moved, Phase.FORWARD) == pytest.approx(1e-3)


def test_every_rank_has_its_own_load() -> None:
    kernels = Kernels(products=(Product(512, 1024, 1024, 8),), moved_bytes=1e8)
    load = np.array([0.5, 1.0, 2.0])
    alone = [HOPPER.seconds(kernels, Phase.FORWARD, each) for each in load.tolist()]
    assert HOPPER.seconds(kernels, Phase.FORWARD, load) == pytest.approx(alone)


def test_what_was_measured_goes_before_what_is_usual() -> None:
    """And a file that is written by hand has its rates alone."""
    file = find_cluster("8xH100")
    work = Work(flops=1e12, copied_bytes=1e6, kernels=Kernels(products=(Product(64, 8192, 8192, 128),)))
    usual = ProfiledCluster.build(file).task_s(Op.EXPERTS, Phase.FORWARD, work)
    by_rates = ProfiledCluster.build(replace(file, kernels_of="rates"))
    assert usual != by_rates.task_s(Op.EXPERTS, Phase.FORWARD, work)
    model = TaskModel(op=Op.EXPERTS, phase=Phase.FORWARD, alpha_s=1.0, scale=1.0)
    measured = ProfiledCluster.build(replace(file, tasks=(model,)))
    assert measured.task_s(Op.EXPERTS, Phase.FORWARD, work) > 1.0
    assert ClusterFile(name="by hand", nodes=1, ranks_per_node=2, device="H100").kernels_of == "rates"


def test_a_device_twice_as_fast_takes_half_as_long() -> None:
    cluster = ProfiledCluster.build(find_cluster("8xMI300X"))
    work = Work(kernels=Kernels(products=(Product(8192, 4096, 4096),), score_flops=1e13, score_width=128))
    before, after = (
        each.task_s(Op.ATTENTION, Phase.FORWARD, work) for each in (cluster, cluster.faster(compute=2))
    )
    assert after == pytest.approx(before / 2, rel=0.02), "what lies between kernels is the host's"


def test_products_of_others_in_float8_are_faster_and_attention_is_not() -> None:
    products, scores = (
        Work(kernels=Kernels(products=(Product(8192, 8192, 8192),))),
        Work(kernels=Kernels(score_flops=1e12, score_width=128)),
    )
    ours, others = (ProfiledCluster.build(find_cluster(f"8xB200{more}")) for more in ("", ",products=float8"))
    for work, least in ((products, 1.5), (scores, 1.0)):
        times = [each.task_s(Op.ATTENTION, Phase.FORWARD, work) for each in (ours, others)]
        assert least <= times[0] / times[1] < 2


def test_every_device_has_units_of_an_architecture() -> None:
    assert all(each.units > 0 and each.architecture in SHARES for each in DEVICES)
