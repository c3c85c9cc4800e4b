"""The precision that a plan is for follows the device, and so do its operations per second."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.config import ConfigError
from penstock.cost import ClusterConfig, ClusterFile, ProfiledCluster, StepCost
from penstock.cost.cluster_file import Machine, TaskModel
from penstock.cost.clusters import find_cluster, names
from penstock.cost.clusters.line import FABRICS, LINKS, in_line
from penstock.cost.devices import DEVICES, KERNEL_S, SHARES, Computing, Efficiency, find_device
from penstock.cost.span import Span
from penstock.features.build import build_graph
from penstock.graph import Phase
from penstock.ops import Op, Work
from penstock.ops.work import Kernels, Product
from tests.plan.problems import problem, with_sharing

RATES = ClusterConfig(flops_per_s=1e13)
HERE = Machine(host="a", date="b", processor="c", device="cpu", python="3", torch="2", penstock="0")


def cluster(device: str | None, precision: Computing | None = None) -> ClusterFile:
    return ClusterFile(
        name="mine", nodes=2, ranks_per_node=2, rates=RATES, device=device, precision=precision
    )


@pytest.mark.parametrize(
    ("name", "device", "usual"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", "bfloat16"),
        ("NVIDIA H100 PCIe", "H100 PCIe", "bfloat16"),
        ("NVIDIA A100-SXM4-80GB", "A100", "bfloat16"),
        ("A10", "A10", "bfloat16"),
        ("RTX3090", "RTX 3090", "bfloat16"),
        ("Tesla V100-SXM2-32GB", "V100", "float32"),
        ("Tesla T4", "T4", "float32"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti", "float32"),
        ("cpu", None, "float32"),
        ("NVIDIA A1000", None, "bfloat16"),
        (None, None, "float32"),
    ],
)
def test_a_name_says_what_a_device_computes_in(
    name: str | None, device: str | None, usual: Computing
) -> None:
    """Also if the name is that of a measurement. What is only assumed says so."""
    known = find_device(name or "")
    assert (known and known.name) == device
    measured = replace(cluster(None), measured=replace(HERE, device=name)) if name else cluster(None)
    for file in (cluster(name), measured):
        precision, why = file.usual_precision
        assert precision == usual
        assert ("assumed" in why) is (device is None and name != "cpu")


def test_what_a_profile_was_computed_in_holds_for_a_device_that_is_not_known() -> None:
    assert cluster("NVIDIA X1", "float32").usual_precision[0] == "float32"


def test_operations_per_second_are_those_of_the_precision() -> None:
    """In the same share of the published peaks; once, however often it is asked for."""
    exact = cluster("A100", "float32")
    rounded = exact.computing_in("bfloat16")
    assert rounded.rates.flops_per_s == pytest.approx(1e13 * 312 / 19.5)
    assert rounded.computing_in("bfloat16") is rounded
    assert rounded.computing_in("float32").rates.flops_per_s == pytest.approx(1e13)
    assert rounded.rates.link_bytes_per_s == exact.rates.link_bytes_per_s
    for file in (cluster("V100", "float32"), cluster("X1", "float32"), cluster("A100"), cluster(None)):
        assert file.computing_in("bfloat16") is file


def test_shipped_clusters_name_a_known_device_and_the_precision_of_their_rates() -> None:
    for name in names():
        file = find_cluster(name)
        assert find_device(file.device_name) is not None and file.precision == "float32"


# ---- kernels by their sizes --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("line", ["", "2x4xH100,net=25GB/s"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_else_is_done_to_rows_takes_its_time(tp_size: int, line: str) -> None:
    """They are encoded and decoded, or bring the residual stream to the experts; by rates, and by kernels."""
    each = with_sharing(problem(), tp_size, 1)
    cluster = ProfiledCluster.build(find_cluster(line)) if line else ClusterConfig()
    plain = StepCost(each.shape, each.workload, cluster)
    coded = replace(plain, workload=each.workload.compressed("int8"), shared={})
    packed = replace(each.shape, moves_samples=True, carries_residual=True)
    carrying = replace(plain, shape=packed, shared={})
    coding = (Op.ATTENTION if tp_size == 1 else Op.GATE, Op.EXPERTS, Op.UNPERMUTE)
    computed = [task for task in build_graph(each.shape).tasks if task.lane.computes]
    assert {task.op for task in computed} > set(coding)
    for task in computed:
        assert (coded(task) > plain(task)) is (task.op in coding), task
        assert (carrying(task) > plain(task)) is (task.op == Op.EXPERTS), task


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


def test_every_device_has_a_whole_data_sheet() -> None:
    for each in DEVICES:
        assert each.units > 0 and each.architecture in SHARES
        assert each.memory_gb and each.memory_gb_per_s > 0 and each.link_gb_per_s > 0


# ---- a cluster in one line ---------------------------------------------------------------------------------


def test_a_node_shares_its_card_and_devices_have_their_own() -> None:
    shared = find_cluster("4x8xA100-80GB,net=100gbit")
    assert (shared.nodes, shared.ranks_per_node, shared.device) == (4, 8, "A100")
    assert shared.rates.link_rate_of == "node"
    assert shared.rates.link_bytes_per_s == pytest.approx(FABRICS[""] * 12.5e9)
    assert shared.rates.flops_per_s == pytest.approx(SHARES["Ampere"].products * 312e12)
    assert shared.rates.intra_bytes_per_s == pytest.approx(LINKS["NVLink"] * 300e9)
    own = find_cluster("2x8xH100,net=8x400gbit")
    assert own.rates.link_rate_of == "device"
    assert own.rates.link_bytes_per_s == pytest.approx(FABRICS[""] * 50e9)
    double = find_cluster("2x4xH100,net=2x25GB/s")
    assert double.rates.link_rate_of == "node"
    assert double.rates.link_bytes_per_s == pytest.approx(FABRICS[""] * 50e9)


@pytest.mark.parametrize(
    ("line", "memory_gb", "precision"),
    [
        ("8xrtx4090", 24, "bfloat16"),
        ("8xA100-40GB", 40, "bfloat16"),
        ("8xA100", 80, "bfloat16"),
        ("1x4xNVIDIA H100 PCIe", 80, "bfloat16"),
        ("4xRTX 2080 Ti,inside=10gb/s", 11, "float32"),
        ("8xMI300X", 192, "bfloat16"),
    ],
)
def test_a_device_has_the_memory_that_is_sold(line: str, memory_gb: int, precision: str) -> None:
    file = find_cluster(line)
    assert file.memory_bytes is not None
    assert 0.7 * memory_gb * 1e9 < file.memory_bytes < 0.95 * memory_gb * 1e9
    assert file.precision == precision and file.nodes == 1


@pytest.mark.parametrize(
    "line",
    [
        "4x8xA100",
        "2x8xA100,net=100gbit,fabric=token-ring",
        "4x4xGB200,net=4x400gbit,nvlink=6",
        f"4x4xGB200,net=4x400gbit,nvlink={'8' * 5000}",
        "3x4xGB200,net=4x400gbit,nvlink=8",
        "4x4xGB200,nvlink=8",
        "8xA100,products=float8",
        "8xH100,products=bfloat16",
        "2x8xA200,net=100gbit",
        "8xA100-60GB",
        "2x8xA100,net=fast",
        "2x8xA100,net=100gbit,net=25gbit",
        "2x8xA100,speed=100gbit",
        "0x8xA100,net=1gbit",
        "2x8xA100,net=0gbit",
        "999999x8xA100,net=1gbit",
        "2x8xA100,net=100gb",
        "2x8xA100,net=100mbit",
        "8xA100,net=100gbit",
    ],
)
def test_what_a_line_lacks_is_named(line: str) -> None:
    with pytest.raises(ConfigError):
        find_cluster(line)


@pytest.mark.parametrize(
    ("rate", "gbit"),
    [("100gbit", 100), ("100Gb", 100), ("100Gb/s", 100), ("12.5Gbps", 12.5), ("25GB/s", 200)],
)
def test_a_rate_is_in_bits_or_bytes_as_its_unit_says(rate: str, gbit: float) -> None:
    file = find_cluster(f"2x8xA100,net={rate}")
    assert file.rates.link_bytes_per_s == pytest.approx(0.8 * gbit * 1e9 / 8)
    assert f"network {gbit:g} Gbit/s per node" in file.source


def test_links_may_join_the_devices_of_several_nodes() -> None:
    """The tray of a rack has 4 devices and as many cards; NVLink joins all 72 in it."""
    file = find_cluster("36x4xGB200,net=4x400gbit,fabric=ib,nvlink=72")
    assert (file.nodes, file.ranks_per_node, file.rates.link_rate_of) == (2, 72, "device")
    assert file.rates.link_bytes_per_s == pytest.approx(FABRICS["ib"] * 50e9)
    assert find_cluster("18x4xGB200,nvlink=72").nodes == 1


def test_start_ups_of_many_ranks_do_not_add_up() -> None:
    """A tree has the logarithm of as many steps, and messages to all peers are in flight at once."""
    cluster = ProfiledCluster.build(find_cluster("32x8xH100,net=8x400gbit"))
    few, many = Span.regular(2, 8), Span.regular(32, 8)
    one_s = cluster.link_latency_s
    assert cluster.all_to_all(many).alpha_s < 16 * one_s < 240 * one_s
    assert (
        cluster.all_reduce(few).alpha_s
        < cluster.all_reduce(many).alpha_s
        < 4 * cluster.all_reduce(few).alpha_s
    )
    assert cluster.all_to_all(Span.regular(1, 1)).alpha_s == 0


def test_a_name_is_no_line() -> None:
    assert in_line("fsmoe-testbed-b") is None and in_line("runs/tiny/cluster.json") is None
