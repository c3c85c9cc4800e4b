"""The precision that a plan is for follows the device, and so do its operations per second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cost import ClusterConfig, ClusterFile
from penstock.cost.cluster_file import Machine
from penstock.cost.clusters import find_cluster, names
from penstock.cost.devices import Computing, find_device

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
