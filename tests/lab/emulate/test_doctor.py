"""`penstock doctor` in real namespaces: a slow link and a cut one are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cost import ClusterConfig, ClusterFile
from penstock.lab.emulate import Cluster, EmulateConfig
from tests.doctor.ranks import doctor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulation")]

THREE = EmulateConfig(
    nodes=3, devices=1, inter_rate_bit_per_s=120e6, intra_rate_bit_per_s=8e9, mtu_bytes=9000
)
ASSUMED = ClusterFile(
    name="three", nodes=3, ranks_per_node=1, rates=ClusterConfig(link_bytes_per_s=9e6, link_rate_of="node")
)


def test_a_link_slower_than_the_plan_assumes_is_named(tmp_path: Path) -> None:
    file = tmp_path / "three.json"
    ASSUMED.save(file)
    with Cluster(THREE) as cluster:
        cluster.set_rate(inter=24e6, node=2)
        told = doctor(3, "--json", "--cluster", str(file), cluster=cluster)
    assert set(told.codes.values()) == {1}, told.errors
    found = json.loads(told.out)
    wrong = {check["name"]: check["findings"] for check in found["checks"] if not check["passed"]}
    assert list(wrong) == ["links"], wrong
    texts = [finding["text"] for finding in wrong["links"]]
    assert [" ".join(text.split()[3:8]) for text in texts] == ["node 0 to node 2", "node 1 to node 2"]
    assert all("three.json assumes 72 Mbit/s: mend it, or measure again" in text for text in texts)
    rates = {tuple(link["pair"]["nodes"]): link["rates"] for link in found["examination"]["links"]}
    assert rates[0, 2]["out_bytes_per_s"] < 4.5e6 < rates[0, 1]["out_bytes_per_s"]
    assert [check["found"] for check in found["checks"] if check["name"] == "ranks"] == [
        "3 of 3 came, on 3 nodes"
    ]


def test_loopback_among_several_machines_is_named() -> None:
    with Cluster(replace(THREE, nodes=2)) as cluster:
        told = doctor(2, cluster=cluster, environ={"GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "80"})
    assert told.codes == {0: 1, 1: 1}, told.errors
    text = " ".join(told.out.split())
    assert "would be reached at a loopback address (GLOO_SOCKET_IFNAME is the loopback interface)" in text
    assert "does not reach" in text and max(map(len, told.out.splitlines())) <= 80


def test_a_rank_behind_a_cut_link_has_not_come() -> None:
    with Cluster(replace(THREE, nodes=2)) as cluster:
        cluster.cut(1)
        told = doctor(2, "--wait", "2", cluster=cluster)
    assert told.codes == {0: 1, 1: 1}
    assert "Rank 1 has not come" in " ".join(told.out.split())
    assert "rank 1 of 2" in told.errors and "nothing answers at 198.18.0.1" in told.errors
