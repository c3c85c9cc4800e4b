"""Transports on real ranks: what arrives is what was sent, and a failure wakes everybody."""

# ruff: noqa: TID251 - lets others enter; they fail at the entrance just the same

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from penstock.mesh import Axes, Group
from penstock.runtime.groups import LocalTransport
from penstock.runtime.sockets import Sockets, native_threads, wait_their_turn
from penstock.runtime.transport import GlooTransport
from penstock.topology import Layout, lane_groups
from tests.support.draws import draws
from tests.support.parity import machinery
from tests.support.ranks import Pools

NEVER_S = 3600.0
"""A timeout far beyond that of the pool: who waits for it fails the test."""


def layout_of(rank: int, world_size: int, ep_size: int) -> Layout:
    return Layout(world_size=world_size, ep_size=ep_size, rank=rank)


def new_transport(rank: int, world_size: int) -> GlooTransport:
    """With groups of its own: those of a transport that was aborted are dead."""
    return GlooTransport(lambda: lane_groups(layout_of(rank, world_size, world_size), NEVER_S))


# ---- send buffers ------------------------------------------------------------------------------------------


def buffers_of_new_connections(rank: int, world_size: int, limit_bytes: int) -> list[int]:
    """SO_SNDBUF of every connection that a new transport opens."""
    before = Sockets.now()
    GlooTransport(lambda: lane_groups(layout_of(rank, world_size, world_size), NEVER_S), limit_bytes)
    sizes: list[int] = []
    connections = Sockets.now().since(before)
    connections._each(lambda s: sizes.append(s.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)))
    return sizes


def test_every_connection_of_a_transport_gets_the_limit(ranks: Pools) -> None:
    for sizes in ranks(2).run(buffers_of_new_connections, 2, 65536):
        assert sizes and set(sizes) == {2 * 65536}, "Linux doubles what is asked, for its own book-keeping"


def test_without_a_limit_the_system_decides(ranks: Pools) -> None:
    for sizes in ranks(2).run(buffers_of_new_connections, 2, 0):
        assert sizes and 2 * 65536 not in sizes


def pair_of_connections() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def connections_of_others(rank: int, world_size: int) -> tuple[str, bool]:
    """What a connection carries that another thread has opened while a transport did, after the transport's
    abort; and whether its buffer has become smaller."""
    others: list[tuple[socket.socket, socket.socket]] = []

    def open_another() -> None:
        thread = threading.Thread(target=lambda: others.append(pair_of_connections()))
        thread.start()
        thread.join()
        others[-1][1].set_inheritable(True)
        selector.register(others[-1][1], selectors.EVENT_READ)

    def make_groups() -> dict[Axes, dist.ProcessGroup]:
        open_another()
        groups = lane_groups(layout_of(rank, world_size, world_size), NEVER_S)
        open_another()
        return groups

    with selectors.DefaultSelector() as selector:
        transport = GlooTransport(make_groups, 32768)
        dist.barrier()
        transport.abort()
        found = b""
        for ours, theirs in others:
            ours.sendall(b"x")
            theirs.settimeout(60)
            found += theirs.recv(1)
        limited = any(ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 65536 for ours, _ in others)
    dist.barrier()
    transport.close()
    for connection in chain(*others):
        connection.close()
    return found.decode(), limited


def test_connections_that_other_threads_open_meanwhile_are_left_alone(ranks: Pools) -> None:
    assert ranks(2).run(connections_of_others, 2) == [("xx", False)] * 2


# ---- threads -----------------------------------------------------------------------------------------------


def policies_of_new_loops(rank: int, world_size: int) -> list[int]:
    """How the system schedules each thread in which a new transport waits for its sockets."""
    before = native_threads()
    transport = new_transport(rank, world_size)
    policies = [os.sched_getscheduler(thread) for thread in native_threads() - before]
    dist.barrier()  # the other rank may still be connecting
    transport.abort()
    return policies


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which threads a process has")
def test_threads_that_wait_for_sockets_take_no_core_from_a_sender(ranks: Pools) -> None:
    for policies in ranks(2).run(policies_of_new_loops, 2):
        assert policies and set(policies) == {os.SCHED_BATCH}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which threads a process has")
def test_a_thread_that_has_ended_is_passed_over() -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.native_id is not None
    wait_their_turn([ended.native_id])


# ---- exchanges ---------------------------------------------------------------------------------------------


def exchange(rank: int, world_size: int, matrix: list[list[int]], dtype: torch.dtype, width: int) -> Any:
    """matrix[s][t]: rows that s sends to t. A row carries source, target and number."""
    labels = [(rank, target, i) for target, size in enumerate(matrix[rank]) for i in range(size)]
    rows = torch.tensor(labels, dtype=dtype).view(-1, 3).repeat(1, width)
    strided = torch.stack([rows, rows - 1], dim=-1)[..., 0]  # not contiguous
    transport = machinery(world_size, world_size, rank).transports.inter
    received = transport.all_to_all(strided, matrix[rank], [row[rank] for row in matrix])
    assert received.dtype == dtype
    return received.tolist()


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_and_empty_pieces_arrive_in_order(ranks: Pools, world_size: int) -> None:
    sizes = st.sampled_from([0, 0, 1, 2, 7, 40])
    rows = st.lists(sizes, min_size=world_size, max_size=world_size)
    matrices = st.lists(rows, min_size=world_size, max_size=world_size)

    @draws(40)
    @given(matrices, st.sampled_from([torch.int64, torch.float64, torch.bfloat16]), st.integers(1, 3))
    def check(matrix: list[list[int]], dtype: torch.dtype, width: int) -> None:
        received = ranks(world_size).run(exchange, world_size, matrix, dtype, width)
        for target in range(world_size):
            wanted = [
                [source, target, i] * width
                for source in range(world_size)
                for i in range(matrix[source][target])
            ]
            assert received[target] == wanted

    check()


def reduce_in(rank: int, world_size: int, ep_size: int, group: Axes) -> tuple[list[float], int]:
    transport = machinery(world_size, ep_size, rank).transports.inter
    tensor = torch.tensor([10.0**rank, 1.0], dtype=torch.float64)
    transport.all_reduce(tensor, group)
    return tensor.tolist(), transport.size(group)


@pytest.mark.parametrize(("world_size", "ep_size"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("group", [Group.WORLD, Group.EXPERT, Group.EXPERT_DATA])
def test_all_reduce_sums_over_its_group(ranks: Pools, world_size: int, ep_size: int, group: Axes) -> None:
    results = ranks(world_size).run(reduce_in, world_size, ep_size, group)
    for members in layout_of(0, world_size, ep_size).mesh.groups(group):
        for rank in members:
            assert results[rank] == ([sum(10.0**r for r in members), float(len(members))], len(members))


def test_one_process_moves_nothing() -> None:
    transport, rows = LocalTransport(), torch.arange(6.0).view(3, 2)
    assert transport.all_to_all(rows, [3], [3]) is rows
    transport.all_reduce(rows, Group.WORLD)
    assert rows.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert transport.size(Group.EXPERT) == 1
    transport.abort()


# ---- failures ----------------------------------------------------------------------------------------------


def wait_forever(rank: int, world_size: int, kind: str) -> str:
    """The last rank stays away from a collective and aborts; the others tell how theirs ended.

    Like the engine, a rank whose collective failed aborts too: that wakes ranks that wait for it alone.
    """
    transport = new_transport(rank, world_size)
    dist.barrier()  # everybody is connected
    outcome = "aborted"
    if rank == world_size - 1:
        time.sleep(0.2)  # lets the others enter; if one did not, it fails at its entrance just the same
        transport.abort()
    else:
        outcome = outcome_of(transport, world_size, kind)
        transport.abort()
    dist.barrier()
    return outcome


def outcome_of(transport: GlooTransport, world_size: int, kind: str) -> str:
    try:
        if kind == "all_reduce":
            transport.all_reduce(torch.ones(1000), Group.WORLD)
        else:
            transport.all_to_all(torch.ones(world_size, 1000), [1] * world_size, [1] * world_size)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "finished"


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_abort_wakes_the_peers(ranks: Pools, world_size: int, kind: str) -> None:
    """They return at all: the groups' timeout is longer than the pool waits."""
    *others, last = ranks(world_size).run(wait_forever, world_size, kind)
    assert last == "aborted"
    for outcome in others:
        assert outcome.startswith("RuntimeError")
        assert "imed out" not in outcome


def abort_own_wait(rank: int, world_size: int, kind: str) -> str:
    """Rank 0 waits in a thread for peers that never come, and aborts; the peers stay idle."""
    transport = new_transport(rank, world_size)
    outcome = ["idle"]
    dist.barrier()
    if rank == 0:
        entered = threading.Event()

        def wait() -> None:
            entered.set()
            outcome[0] = outcome_of(transport, world_size, kind)

        thread = threading.Thread(target=wait)
        thread.start()
        entered.wait()
        time.sleep(0.1)
        transport.abort()
        transport.abort()  # harmless
        thread.join()
    dist.barrier()  # the default group was not cut
    return outcome[0]


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_abort_wakes_a_thread_of_its_own_rank(ranks: Pools, world_size: int, kind: str) -> None:
    first, *others = ranks(world_size).run(abort_own_wait, world_size, kind)
    assert first.startswith("RuntimeError")
    assert others == ["idle"] * (world_size - 1)


def test_other_transports_live_on_after_an_abort(ranks: Pools) -> None:
    ranks(2).run(wait_forever, 2, "all_reduce")
    assert ranks(2).run(reduce_in, 2, 2, Group.WORLD) == [([11.0, 2.0], 2)] * 2
