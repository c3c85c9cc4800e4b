"""Links as traffic meets them: rates, who shares what, changes under load.

Rates are compared with what TCP can carry, 1448 of every 1514 bytes: 95.6 % of the link's rate. They are low:
the buffers of sockets keep such a link busy while other programs have the processors.
"""

# ruff: noqa: TID251 - what has passed is at most what a rate allows in the time; none may answer

from __future__ import annotations

import socket
import time

import pytest

from penstock.lab.emulate import Cluster, EmulateConfig
from penstock.lab.emulate.links import _tbf
from tests.lab.emulate.traffic import connect, flowing, rates_bit_per_s, wait_until_near
from tests.support.patience import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("emulation")]

MBIT = 1e6


def test_flows_share_the_rate_of_an_uplink() -> None:
    config = EmulateConfig(nodes=2, devices=1, inter_rate_bit_per_s=90 * MBIT)
    with Cluster(config) as cluster, flowing(cluster, [(0, 1)] * 4) as running:
        wait_until_near(lambda: sum(rates_bit_per_s(running)), 90 * MBIT)


def test_a_fast_uplink_is_no_faster_than_it_should_be() -> None:
    """How near it comes depends on the processors; its bucket lasts as long as the kernel's timers need."""
    rate_bit_per_s = 2000 * MBIT
    config = EmulateConfig(nodes=2, devices=1, inter_rate_bit_per_s=rate_bit_per_s)
    with Cluster(config) as cluster, flowing(cluster, [(0, 1)] * 2):
        start_s, first_bytes = time.perf_counter(), cluster.bytes_sent()[0].sent_bytes
        wait_for(lambda: cluster.bytes_sent()[0].sent_bytes > first_bytes + 100e6)
        crossed_bytes = cluster.bytes_sent()[0].sent_bytes - first_bytes
        took_s = time.perf_counter() - start_s
        assert [each.rate_bit_per_s for each in cluster.uplinks()] == [rate_bit_per_s] * 2
        uplink = cluster.wiring.uplink(0)[0]
        bucket_bytes = _tbf(uplink.namespace)[uplink.interface]["options"]["burst"]
    assert 1e-3 * rate_bit_per_s / 8 <= 1.001 * bucket_bytes < 2e-3 * rate_bit_per_s / 8
    assert crossed_bytes < 1.01 * took_s * rate_bit_per_s / 8 + bucket_bytes


def test_each_direction_has_the_rate() -> None:
    config = EmulateConfig(nodes=2, devices=1, inter_rate_bit_per_s=30 * MBIT)
    with Cluster(config) as cluster, flowing(cluster, [(0, 1), (1, 0)]) as running:
        wait_until_near(lambda: min(rates_bit_per_s(running)), 30 * MBIT)


def test_a_device_link_has_its_rate_and_the_uplink_sees_nothing_of_it() -> None:
    config = EmulateConfig(nodes=2, devices=2, intra_rate_bit_per_s=40 * MBIT)
    with Cluster(config) as cluster, flowing(cluster, [(0, 1)]) as running:
        wait_until_near(lambda: rates_bit_per_s(running)[0], 40 * MBIT)
        assert running[0].received_bytes > 1e6
        # Who has which address is asked of everybody: some packets of 42 bytes.
        assert all(each.sent_bytes + each.received_bytes < 5000 for each in cluster.bytes_sent())


@pytest.mark.soak
def test_devices_of_a_node_share_its_uplink() -> None:
    config = EmulateConfig(nodes=3, devices=2, inter_rate_bit_per_s=40 * MBIT)
    with Cluster(config) as cluster, flowing(cluster, [(0, 2), (1, 4)]) as running:  # node 0 to nodes 1 and 2
        wait_until_near(lambda: sum(rates_bit_per_s(running)), 40 * MBIT)


@pytest.mark.parametrize(
    ("mtu_bytes", "least", "most"),
    [(1500, 1.03, 1.1), pytest.param(9000, 1.004, 1.06, marks=pytest.mark.soak)],
)
def test_bytes_are_counted_where_they_cross(mtu_bytes: int, least: float, most: float) -> None:
    """Headers are: 66 bytes for every 1448 of payload, or for every 8948."""
    with Cluster(EmulateConfig(nodes=3, devices=1, mtu_bytes=mtu_bytes)) as cluster:
        with flowing(cluster, [(0, 1)]) as running:
            wait_for(lambda: running[0].received_bytes > 20e6)
        payload_bytes = running[0].received_bytes
        sender, receiver, idle = cluster.bytes_sent()
        assert sender.sent_bytes == pytest.approx(receiver.received_bytes, rel=0.01)
        assert least * payload_bytes < receiver.received_bytes < most * payload_bytes
        assert receiver.sent_bytes < 0.05 * payload_bytes
        assert idle.sent_bytes + idle.received_bytes < 5000


def test_a_rate_changes_under_load_and_counters_go_on() -> None:
    config = EmulateConfig(nodes=2, devices=1, inter_rate_bit_per_s=150 * MBIT)
    with Cluster(config) as cluster, flowing(cluster, [(0, 1)]) as running:
        wait_for(lambda: running[0].received_bytes > 1e6)
        cluster.set_rate(inter=50 * MBIT)
        assert cluster.bytes_sent()[0].sent_bytes > 1e6
        assert [each.rate_bit_per_s for each in cluster.uplinks()] == [50 * MBIT] * 2
        wait_until_near(lambda: rates_bit_per_s(running)[0], 50 * MBIT)
        cluster.set_rate(inter=30 * MBIT, intra=15 * MBIT, node=1)
        assert [each.rate_bit_per_s for each in cluster.uplinks()] == [50 * MBIT, 30 * MBIT]
        wait_until_near(lambda: rates_bit_per_s(running)[0], 15 * MBIT)


def test_a_cut_stops_a_node_alone_and_a_restored_one_goes_on() -> None:
    config = EmulateConfig(nodes=2, devices=2, inter_rate_bit_per_s=40 * MBIT)
    with Cluster(config) as cluster, flowing(cluster, [(0, 2), (0, 1)]) as (across, inside):
        cluster.cut(0)
        assert [each.is_up for each in cluster.uplinks()] == [False, True]
        time.sleep(0.2)  # the kernel delivers what had crossed, whatever the processors do
        across_bytes, inside_bytes = across.arrived_bytes, inside.received_bytes
        wait_for(lambda: inside.received_bytes > inside_bytes + 50e6)
        assert across.arrived_bytes == across_bytes
        cluster.restore(0)
        assert all(each.is_up for each in cluster.uplinks())
        wait_for(lambda: across.received_bytes > across_bytes + 1e6)


def test_two_clusters_do_not_meet() -> None:
    one, other = EmulateConfig(nodes=2, devices=1), EmulateConfig(nodes=1, devices=2)
    with Cluster(one) as first, Cluster(other) as second:
        assert first.address(1) == second.address(1) and first.name != second.name
        with flowing(first, [(0, 1)]) as a, flowing(second, [(0, 1)]) as b:
            wait_for(lambda: min(a[0].received_bytes, b[0].received_bytes) > 10e6)
        address = first.address(1)
        with first.run_inside(1, lambda: socket.create_server((address, 5000))), pytest.raises(OSError):
            second.run_inside(0, lambda: socket.create_connection((address, 5000), timeout=5))


@pytest.mark.soak
def test_it_works_after_many_times_in_a_row() -> None:
    for _ in range(5):
        with Cluster(EmulateConfig(nodes=2, devices=1)) as cluster:
            flow = connect(cluster, 0, 1)
            flow.sender.sendall(b"x")
            assert flow.receiver.recv(1) == b"x"
            flow.start()
            flow.stop()
