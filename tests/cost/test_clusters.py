"""The cluster files that come with Penstock, and those that somebody wrote by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from penstock.config import ConfigError, from_dict
from penstock.cost import ClusterConfig, ProfiledCluster, Span, StepCost
from penstock.cost.cluster_file import (
    ClusterFile,
    Fit,
    KernelModel,
    LinkModel,
    Machine,
    StepFit,
    TaskModel,
    mismatch,
)
from penstock.cost.clusters import find_cluster, names
from penstock.features.build import build_graph
from penstock.graph import Lane, Phase
from penstock.mesh import Group
from penstock.ops import OPS
from penstock.step import StepShape
from tests.cost.test_step import workload
from tests.steps import cut_by

HERE = Machine(
    host="here", date="2026-11-21", processor="p", device="cpu", python="3", torch="2", penstock="0"
)
MEASURED = ClusterFile(
    name="measured",
    nodes=2,
    ranks_per_node=1,
    rates=ClusterConfig(flops_per_s=1e11),
    links=(
        LinkModel(
            collective="all_to_all",
            group="ep",
            lane="inter",
            ranks=2,
            alpha_s=1e-4,
            beta_s_per_byte=1e-8,
            in_steps=1.1,
            contended=1.3,
            fit=Fit(r2=0.99, residual=0.02, points=((1024.0, 1e-3), (2048.0, 1.4e-3), (4096.0, 2e-3))),
        ),
    ),
    tasks=(TaskModel(op="AT", phase="F", alpha_s=1e-4, scale=1.5, contended=1.1),),
    kernels=(KernelModel(name="copy", unit="byte", alpha_s=0.0, beta_s_per_unit=1e-10),),
    contended_transfers=1.2,
    jitter=0.05,
    steps=StepFit(ratio=1.05, low=1.0, high=1.1, steps=9),
    doubts=("X F is not corrected by real steps",),
    slowness=(1.0, 1.5),
    memory_bytes=8 << 30,
    measured=HERE,
)

LINK = {
    "collective": "all_to_all",
    "group": "ep",
    "lane": "inter",
    "ranks": 2,
    "alpha_s": 0.0,
    "beta_s_per_byte": 1e-9,
}
TASK = {"op": "AT", "phase": "F", "alpha_s": 0.0, "scale": 1.0}
KERNEL = {"name": "copy", "unit": "byte", "alpha_s": 0.0, "beta_s_per_unit": 1e-10}


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cluster.json"
    MEASURED.save(path)
    assert find_cluster(str(path)) == MEASURED
    assert list(path.parent.iterdir()) == [path], "nothing half-written is left"


def test_all_published_clusters_are_there() -> None:
    assert names() == (
        "flowmoe-cluster-1",
        "flowmoe-cluster-2",
        "fsmoe-testbed-a",
        "fsmoe-testbed-b",
        "netmoe-a800",
        "parm-testbed-a",
        "parm-testbed-b",
        "pro-prophet-hpnv",
        "pro-prophet-hpwnv",
        "pro-prophet-lpwnv",
    )


@pytest.mark.parametrize("name", names())
def test_every_shipped_cluster_prices_a_step(name: str) -> None:
    file = find_cluster(name)
    assert file.name == name and file.source and file.measured is None
    assert file.memory_bytes is not None and file.memory_bytes >= 11 << 30
    shape = StepShape(moe_layers=(True, False), pieces={"replicated": (2, 2)})
    cut = cut_by("flowmoe", shape)
    cost = StepCost(cut, workload(cut), ProfiledCluster.build(file))
    assert all(0 <= cost(task) < 10 for task in build_graph(cut).tasks)
    assert sum(map(cost, build_graph(cut).tasks)) > 0


@pytest.mark.parametrize("name", ["fsmoe-testbed-a", "fsmoe-testbed-b"])
def test_fsmoe_start_ups_are_those_of_the_paper(name: str) -> None:
    """Milliseconds of a product, an all-to-all between the nodes, and an all-gather in one."""
    product, between, inside = {
        "fsmoe-testbed-a": (4.26e-2, 2.87e-1, 3.37e-1),
        "fsmoe-testbed-b": (9.24e-2, 1.75e-1, 3.20e-2),
    }[name]
    file = find_cluster(name)
    assert file.rates.task_overhead_s * 1e3 == pytest.approx(product)
    assert file.rates.all_to_all(file.nodes).alpha_s * 1e3 == pytest.approx(between, rel=1e-4)
    gather = file.rates.inside("all_gather", file.ranks_per_node)
    assert gather.alpha_s * 1e3 == pytest.approx(inside, rel=1e-4)


@pytest.mark.parametrize("name", names())
def test_no_shipped_card_is_faster_than_the_paper_says(name: str) -> None:
    """Gbit/s between nodes, of one node; 800 for NetMoE's 100 GB/s."""
    said = {"flowmoe-cluster-2": 10, "fsmoe-testbed-a": 200, "netmoe-a800": 800, "parm-testbed-a": 252}
    rates = find_cluster(name).rates
    assert rates.link_rate_of == "node"
    assert rates.link_bytes_per_s <= said.get(name, 100) * 1e9 / 8


RATES = {"flops_per_s": 1e13, "memory_bytes_per_s": 1e11, "intra_bytes_per_s": 1e10}


@pytest.mark.parametrize("measured", [None, HERE])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_described_cluster_says_whose_rate_it_is(
    tmp_path: Path, nodes: int, measured: Machine | None
) -> None:
    """A file of before has a device's share; a measured one of before means a device's rate."""
    path = tmp_path / "cluster.json"
    replace(MEASURED, nodes=nodes, slowness=(), measured=measured).save(path)
    table = json.loads(path.read_text())
    assert table["rates"].pop("link_rate_of") == "device"
    path.write_text(json.dumps(table))
    if nodes == 1 or measured:
        assert find_cluster(str(path)).rates.link_rate_of == "device"
        return
    with pytest.raises(ConfigError, match="link_rate_of: is missing") as caught:
        find_cluster(str(path))
    assert 'Write "node"' in caught.value.hint and '"device"' in caught.value.hint
    path.write_text(json.dumps(table | {"rates": table["rates"] | {"link_rate_of": "rack"}}))
    with pytest.raises(ConfigError, match="link_rate_of"):
        find_cluster(str(path))


def test_a_described_cluster_says_in_which_precision_it_computes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    table = {"name": "mine", "nodes": 1, "ranks_per_node": 2, "rates": RATES}
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as caught:
        find_cluster(str(path))
    assert caught.value.key == f"{path}.precision"
    for precision in ("float32", "bfloat16", None):
        path.write_text(json.dumps({**table, "precision": precision}))
        assert find_cluster(str(path)).precision == precision


@pytest.mark.parametrize("left_out", [*RATES, "link_bytes_per_s"])
def test_rates_of_a_described_cluster_are_not_those_of_a_processor(tmp_path: Path, left_out: str) -> None:
    path = tmp_path / "cluster.json"
    rates = {**RATES, "link_bytes_per_s": 1e9, "link_rate_of": "device"}
    table = {"name": "mine", "nodes": 2, "ranks_per_node": 2, "precision": None, "rates": rates}
    path.write_text(json.dumps(table))
    assert find_cluster(str(path)).memory_bytes is None
    path.write_text(json.dumps(table | {"device": "H100"}))
    assert find_cluster(str(path)).memory_bytes == 74_000_000_000
    rates.pop(left_out)
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError) as caught:
        find_cluster(str(path))
    assert caught.value.key == f"{path}.rates.{left_out}"


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "missing",
        "2x0xH100,net=1gbit",
        "0x8xH100",
        "2x8xH100,net=0.000000001gbit",
        f"{'9' * 5000}x8xH100",
        f"2x8xH100,net={'9' * 5000}",
    ],
)
def test_what_names_no_cluster_is_refused_by_its_key(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_cluster(name, "--cluster")
    assert caught.value.key == "--cluster"


def test_four_nodes_of_four_with_one_card_each() -> None:
    """64 MiB. All-to-all of 16 devices that share 12.5 GB/s by fours: 4 x 12/16 x 67.1 MB = 201.3 MB in
    16.11 ms. All-reduce: 2 x 3/4 x 67.1 MB in 8.05 ms, and not 2 x 15/16 x 67.1 MB at a quarter of the card's
    rate, 40.3 ms."""
    text = {
        "name": "4x4",
        "nodes": 4,
        "ranks_per_node": 4,
        "rates": {"link_bytes_per_s": 12.5e9, "link_rate_of": "node", "intra_bytes_per_s": 31.5e9},
    }
    cluster = ProfiledCluster.build(from_dict(ClusterFile, text, "4x4"))
    group = Span.regular(4, 4)
    assert cluster.all_to_all(group).beta_s_per_byte * (64 << 20) == pytest.approx(16.106e-3, rel=1e-3)
    assert cluster.all_reduce(group).beta_s_per_byte * (64 << 20) == pytest.approx(8.053e-3, rel=1e-3)


def test_a_file_of_the_first_version_is_read_and_saved_as_the_present_one(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    MEASURED.save(path)
    now = json.loads(path.read_text())
    old = {**now, "version": 1}
    for key in ("steps", "doubts"):
        del old[key]
    old["links"] = [
        {k: v for k, v in link.items() if k not in ("in_steps", "contended")} for link in now["links"]
    ]
    path.write_text(json.dumps(old))
    file = ClusterFile.read(path)
    links = (replace(MEASURED.links[0], in_steps=1.0, contended=None),)
    assert file == replace(MEASURED, steps=None, doubts=(), links=links)
    file.save(path)
    assert json.loads(path.read_text())["version"] == now["version"] == 2


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        find_cluster("fsmoe-testbed-c")
    assert "fsmoe-testbed-c" in str(caught.value) and "Nearest: fsmoe-testbed-" in str(caught.value)
    assert all(name in str(caught.value) for name in names())


@pytest.mark.parametrize(
    ("change", "key", "hint"),
    [
        ({"version": 99}, "version", ""),
        ({"nodes": "two"}, "nodes", ""),
        ({"colour": 1}, "colour", ""),
        ({"rates": {"flops_per_s": 0}}, "rates.flops_per_s", ""),
        ({"links": [LINK | {"collective": "all_to_many"}]}, "links[0].collective", ""),
        ({"links": [LINK | {"beta_s_per_byte": 0.0}]}, "links[0].beta_s_per_byte", ""),
        ({"links": [LINK | {"alpha_s": math.nan}]}, "links[0].alpha_s", ""),
        ({"kernels": [KERNEL | {"alpha_s": math.inf}]}, "kernels[0].alpha_s", ""),
        ({"tasks": [TASK | {"scale": -1.0}]}, "tasks[0].scale", ""),
        ({"jitter": -0.1}, "jitter", ""),
        ({"slowness": [1.0]}, "slowness", ""),
        ({"slowness": [1.0, math.inf]}, "slowness[1]", ""),
        # Other work makes no task shorter: bounds are of tasks that run alone.
        ({"contended_transfers": 0.5}, "contended_transfers", ""),
        ({"links": [LINK | {"contended": 0.9}]}, "links[0].contended", ""),
        ({"tasks": [TASK | {"contended": 0.0}]}, "tasks[0].contended", ""),
        ({"memory_bytes": 0}, "memory_bytes", ""),
        # A misspelt name would match nothing, and the plan would rest on the rates instead.
        ({"links": [LINK | {"group": "worlds"}]}, "links[0].group", "Nearest: world."),
        ({"links": [LINK | {"lane": "Inter"}]}, "links[0].lane", "Nearest: inter."),
        ({"links": [LINK | {"op": "DD"}]}, "links[0].op", "Nearest: D."),
        ({"tasks": [TASK | {"op": "ATT"}]}, "tasks[0].op", "Nearest: AT."),
        ({"tasks": [TASK | {"op": ""}]}, "tasks[0].op", "Nearest: "),
        ({"tasks": [TASK | {"phase": "f"}]}, "tasks[0].phase", "All: F, B, I, W, R."),
    ],
)
def test_a_bad_file_is_refused_by_name_and_key(
    tmp_path: Path, change: dict[str, object], key: str, hint: str
) -> None:
    path = tmp_path / "bad.json"
    MEASURED.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError) as caught:
        find_cluster(str(path))
    assert caught.value.key.endswith(f"{path}.{key}") and hint in caught.value.hint


def test_every_name_that_a_profile_writes_is_taken() -> None:
    for group, lane, op in product(Group.NAMES, Lane, ("", *OPS)):
        link = replace(MEASURED.links[0], group=group, lane=str(lane), op=op)
        assert replace(MEASURED, links=(link,)).links == (link,)
    for op, phase in product(OPS, Phase):
        replace(MEASURED.tasks[0], op=op, phase=str(phase))


# ---- on other machines -------------------------------------------------------------------------------------


def test_the_machine_it_was_measured_on_fits_on_any_day() -> None:
    assert mismatch(MEASURED, HERE, ranks=2, nodes=2) is None
    assert mismatch(MEASURED, replace(HERE, date="2030-01-01"), ranks=2, nodes=2) is None


@pytest.mark.parametrize("key", ["host", "processor", "device", "python", "torch", "penstock"])
def test_every_other_fact_is_named(key: str) -> None:
    text = mismatch(MEASURED, replace(HERE, **{key: "another"}), ranks=2, nodes=2)
    assert text is not None and f"{key} {getattr(HERE, key)} (here another)" in text
    assert "penstock profile" in text and "\n" not in text


@pytest.mark.parametrize(
    ("ranks", "nodes", "shown"), [(4, 2, "ranks 2 (here 4)"), (2, 1, "nodes 2 (here 1)")]
)
def test_the_layout_is_compared(ranks: int, nodes: int, shown: str) -> None:
    text = mismatch(MEASURED, HERE, ranks=ranks, nodes=nodes)
    assert text is not None and shown in text


def test_files_written_by_hand_are_never_compared() -> None:
    assert mismatch(find_cluster("netmoe-a800"), HERE, ranks=2, nodes=2) is None
