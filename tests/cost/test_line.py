"""A cluster in one line has the rates of its devices' data sheets, or the part that is wrong is named."""

from __future__ import annotations

import pytest

from penstock.config import ConfigError
from penstock.cost import ProfiledCluster
from penstock.cost.clusters import find_cluster
from penstock.cost.clusters.line import FABRICS, LINKS, in_line
from penstock.cost.devices import DEVICES, SHARES
from penstock.cost.span import Span


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
    ("rate", "bytes_per_s"),
    [("100gbit", 12.5e9), ("100Gb", 12.5e9), ("100Gb/s", 12.5e9), ("100Gbps", 12.5e9), ("25GB/s", 25e9)],
)
def test_a_rate_is_in_bits_or_bytes_as_its_unit_says(rate: str, bytes_per_s: float) -> None:
    file = find_cluster(f"2x8xA100,net={rate}")
    assert file.rates.link_bytes_per_s == pytest.approx(0.8 * bytes_per_s)
    assert f"network {bytes_per_s / 1e9:g} GB/s per node" in file.source


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


def test_every_device_has_a_whole_data_sheet() -> None:
    assert all(each.memory_gb and each.memory_gb_per_s > 0 and each.link_gb_per_s > 0 for each in DEVICES)
