"""What is to be mended, from findings that are made up: every sentence names ranks, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.cost import ClusterConfig, ClusterFile
from penstock.doctor import Examination, Facts, Finding, Wanted, judge
from penstock.doctor.examine import Link, Pair, nodes_of, rounds_of
from penstock.doctor.facts import Folder
from penstock.doctor.wire import Clock, Rates

GIB = 1 << 30


def facts(rank: int) -> Facts:
    return Facts(
        rank=rank,
        local_rank=0,
        host=f"node{rank}",
        machine=f"machine {rank}",
        versions={"penstock": "0.1.0", "source": "aaaa", "torch": "2.9"},
        host_ip=f"10.0.0.{rank}",
        interface="eth0",
        address=f"10.0.0.{rank}",
        problem="",
        memory_bytes=8 * GIB,
        folders=[Folder(path="runs", free_bytes=100 * GIB)],
        open_files=(65536, 65536),
        cores=8,
        gpus=0,
    )


def dealt(places: Sequence[tuple[str, int]]) -> dict[int, Facts]:
    """Facts of ranks, of each its machine and its local rank."""
    return {
        rank: replace(facts(rank), machine=machine, local_rank=local)
        for rank, (machine, local) in enumerate(places)
    }


def link(first: int, second: int, rate: float, *, problem: str = "") -> Link:
    rates = None if problem else Rates(out_bytes_per_s=rate, back_bytes_per_s=rate, round_trip_s=1e-4)
    return Link(pair=Pair(asks=first, answers=second, nodes=(first, second)), rates=rates, problem=problem)


FINE = Examination(
    size=3,
    reference=0,
    facts={rank: facts(rank) for rank in range(3)},
    clocks={rank: Clock(offset_s=1e-3, round_trip_s=1e-4) for rank in (1, 2)},
    links=[link(0, 1, 50e6), link(0, 2, 50e6), link(1, 2, 50e6)],
    gone=(),
    exchange="",
    shared={"runs": (0, 1, 2)},
)
ASSUMED = ClusterFile(
    name="c", nodes=3, ranks_per_node=1, rates=ClusterConfig(link_bytes_per_s=50e6, link_rate_of="node")
)


def changed(**rank_2: object) -> Examination:
    return replace(FINE, facts={**FINE.facts, 2: replace(FINE.facts[2], **rank_2)})  # type: ignore[arg-type]


def mended(found: Examination, wanted: Wanted | None = None) -> dict[str, Sequence[Finding]]:
    checks = judge(found, wanted or Wanted())
    assert all(check.passed is not any(each.mend for each in check.findings) for check in checks)
    return {check.name: check.findings for check in checks if not check.passed}


def test_what_is_fine_needs_nothing() -> None:
    assert mended(FINE, Wanted(assumed=ASSUMED, cluster_name="c", rank_bytes=7 * GIB)) == {}


@pytest.mark.parametrize(
    ("found", "check", "text"),
    [
        (changed(versions={**facts(2).versions, "source": "bb"}), "versions", "other source code"),
        (changed(versions={"penstock": "0.1.0", "source": "aaaa"}), "versions", "has no torch, and the rest"),
        (changed(host_ip="127.0.1.1", interface=""), "host names", "node2 resolves to 127.0.1.1"),
        (changed(host_ip="", interface=""), "host names", "its own name node2 does not resolve"),
        (changed(problem="has no IPv4 on ib0"), "interface", r"rank 2 \(node2\) has no IPv4"),
        (changed(address="127.0.0.1"), "interface", "would be reached at a loopback address"),
        (changed(open_files=(256, 4096)), "open files", r"may open 256 files .*ulimit -n 304"),
        (changed(folders=[Folder(path="runs", free_bytes=1, problem="read-only")]), "disk", "another"),
        (replace(FINE, clocks={2: Clock(offset_s=-3.0, round_trip_s=0.01)}), "clocks", "3.00 s behind"),
        (replace(FINE, gone=(1,)), "ranks", r"Rank 1 \(node1\) came and then did not answer"),
        (replace(FINE, exchange="connection refused"), "exchange", "connection refused"),
        (replace(FINE, links=[link(0, 1, 0, problem="no route")]), "links", r"Rank 0 .* does not reach"),
        (
            replace(FINE, links=[link(0, 1, 50e6), link(0, 2, 5e6), link(1, 2, 50e6)]),
            "links",
            r"node 0 to node 2 carries 40 Mbit/s, half of the links 400 Mbit/s or more",
        ),
    ],
)  # fmt: skip
def test_one_thing_that_is_wrong_is_one_sentence(found: Examination, check: str, text: str) -> None:
    findings = mended(found)
    assert list(findings) == [check]
    (finding,) = findings[check]
    assert re.search(text, finding.text), finding.text
    assert finding.text.endswith(".") and ": " in finding.text


def test_clocks_are_as_sure_as_the_network_is_quick() -> None:
    assert mended(replace(FINE, clocks={1: Clock(offset_s=0.3, round_trip_s=0.6)})) == {}


def test_clocks_that_nobody_could_ask_are_not_said_to_be_one() -> None:
    (clocks,) = (check for check in judge(replace(FINE, clocks={}), Wanted()) if check.name == "clocks")
    assert clocks.found.startswith("not compared")


def test_room_is_what_the_run_needs() -> None:
    wanted = Wanted(rank_bytes=9 * GIB, disk_bytes=200 * GIB, disk="runs")
    found = mended(FINE, wanted)
    assert list(found) == ["memory", "disk"] and len(found["memory"]) == 3
    assert "has 8.00 GiB of free memory, and its 1 rank need 9.00 GiB" in found["memory"][0].text
    assert "has 100.0 GiB left, and checkpoints take 200.0 GiB" in found["disk"][0].text


def test_a_faster_network_than_assumed_is_worth_knowing() -> None:
    quick = replace(FINE, links=[link(0, 1, 500e6)])
    checks = judge(quick, Wanted(assumed=ASSUMED, cluster_name="c.json"))
    (finding,) = next(check.findings for check in checks if check.name == "links")
    assert not finding.mend and "c.json assumes 400 Mbit/s" in finding.text


def test_tcp_is_not_compared_with_what_nccl_carries() -> None:
    """But where GPUs exchange by way of TCP, and ranks with each other."""
    rates = replace(ASSUMED.rates, link_bytes_per_s=1e9)
    wanted = Wanted(assumed=replace(ASSUMED, rates=rates), cluster_name="c")
    gpus = {rank: replace(each, gpus=8) for rank, each in FINE.facts.items()}
    found = replace(FINE, facts=gpus)
    assert mended(found, wanted) == {} and list(mended(FINE, wanted)) == ["links"]
    assert list(mended(found, replace(wanted, staged=True))) == ["links"]
    slower = replace(found, links=[link(0, 1, 50e6), link(0, 2, 5e6), link(1, 2, 50e6)])
    assert list(mended(slower, wanted)) == ["links"]


def test_ranks_of_one_node_are_compared_with_its_own_links() -> None:
    one = ClusterFile(name="c", nodes=1, ranks_per_node=3, rates=ClusterConfig(intra_bytes_per_s=50e6))
    inside = Link(pair=Pair(asks=0, answers=1, nodes=(0, 0)), rates=FINE.links[0].rates)
    assert mended(replace(FINE, links=[inside]), Wanted(assumed=one, cluster_name="c")) == {}


def test_nobody_is_in_two_measurements_at_once_and_all_nodes_meet() -> None:
    for count in range(1, 8):
        nodes = nodes_of(dealt([(f"node{rank // 2}", rank % 2) for rank in range(2 * count)]))
        assert nodes == [[2 * node, 2 * node + 1] for node in range(count)]
        inside, *rounds = rounds_of(nodes)
        assert [pair.nodes for pair in inside] == [(node, node) for node in range(count)]
        met = sorted(pair.nodes for pairs in rounds for pair in pairs)
        assert met == [(a, b) for a in range(count) for b in range(a + 1, count)]
        for pairs in rounds:
            busy = [node for pair in pairs for node in pair.nodes]
            assert len(busy) == len(set(busy))


@pytest.mark.parametrize(
    ("places", "nodes"),
    [
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [[0, 2], [1, 3]]),  # dealt in turn
        ([("a i", 0), ("a j", 0), ("a i", 1), ("a j", 1)], [[0, 2], [1, 3]]),  # to containers of one machine
        ([("a", 0), ("a", 1), ("a", 0), ("a", 1)], [[0, 1], [2, 3]]),  # two launchers on one machine
        ([("a i", 0), ("a j", 1), ("a k", 0), ("a l", 1)], [[0, 1], [2, 3]]),  # emulated nodes
        ([("a", 0), ("a", 1), ("b", 1), ("b", 2)], [[0, 1], [2, 3]]),  # the first rank there has not come
    ],
)
def test_ranks_of_a_node_share_a_machine(places: list[tuple[str, int]], nodes: list[list[int]]) -> None:
    assert nodes_of(dealt(places)) == nodes


def test_checkpoints_need_a_shared_folder() -> None:
    apart = replace(FINE, shared={"runs": (0, 1)})
    assert mended(apart) == {}, "without a run nothing is written there"
    found = mended(apart, Wanted(disk="runs", disk_bytes=1))
    assert "Rank 2 (node2) does not see what rank 0 writes to runs" in found["disk"][0].text
