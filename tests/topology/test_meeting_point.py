"""The store at which ranks meet: nothing that is at its address, or stops there, holds a rank for ever."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.utils.distributed import get_free_port

from penstock.config import ConfigError
from penstock.topology import CommunicationError, Layout, lane_groups
from penstock.topology.join import ProcessInfo, join, leave, name_of_attempt
from penstock.topology.meeting_point import check_open_files, look_at, open_store, remedy, within
from tests.support.patience import HANG_S, outcome_of
from tests.support.ranks import forking

SOON_S = 0.5
CPU = torch.device("cpu")


@contextmanager
def program(says: bytes | None) -> Iterator[int]:
    """A port at which another program accepts connections and says this; None = it says nothing at all."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    held.append(listener.accept()[0])
                    held[-1].sendall(says or b"")
                except OSError:  # closed, or the caller has gone
                    if listener.fileno() < 0:
                        return

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


@pytest.fixture
def meeting_at(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment as torchrun leaves it, but for the address."""
    for name in ("PENSTOCK_LAUNCHED", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return monkeypatch


def refusal(port: int, rank: int = 1) -> str:
    """Why a rank does not join at a port."""
    os.environ["MASTER_PORT"] = str(port)
    info = ProcessInfo(rank=rank, world_size=2, local_rank=rank, launcher="torchrun")
    with pytest.raises(CommunicationError) as caught:
        outcome_of(lambda: join(info, SOON_S, CPU))
    assert not dist.is_initialized()
    assert f"{os.environ['MASTER_ADDR']}:{port}" in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("says", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10])
@pytest.mark.parametrize("rank", [0, 1])
def test_another_program_at_the_port_is_told_apart(
    meeting_at: pytest.MonkeyPatch, says: bytes | None, rank: int
) -> None:
    meeting_at.setenv("MASTER_PORT", "")
    with program(says) as port:
        assert "program" in refusal(port, rank) and look_at("127.0.0.1", port).kind == "accepts"


@pytest.mark.slow
def test_nothing_at_the_port_is_told_apart(meeting_at: pytest.MonkeyPatch) -> None:
    meeting_at.setenv("MASTER_PORT", "")
    port = get_free_port()
    assert "no program listens" in refusal(port) and look_at("127.0.0.1", port).kind == "refused"


ENDING = """
import sys, time
from penstock.topology.meeting_point import open_store
class Last:
    def __del__(self):
        time.sleep(3)  # whatever still runs finds that Python ends
last = Last()
try:
    open_store("127.0.0.1", int(sys.argv[1]), 0.5)
except RuntimeError:
    sys.exit(7)
"""


@pytest.mark.slow
def test_a_rank_that_does_not_join_ends_with_its_own_code() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(get_free_port())], check=False, capture_output=True
    )
    assert done.returncode == 7, done.stderr


@pytest.mark.slow
def test_a_name_that_does_not_resolve_is_told_apart(meeting_at: pytest.MonkeyPatch) -> None:
    meeting_at.setenv("MASTER_PORT", "")
    meeting_at.setenv("MASTER_ADDR", "nowhere.invalid")
    assert "does not resolve" in refusal(29500)


@pytest.mark.slow
def test_the_rank_that_has_not_come_is_named(meeting_at: pytest.MonkeyPatch) -> None:
    meeting_at.setenv("MASTER_PORT", "")
    assert "rank 1 has not come" in refusal(get_free_port(), rank=0)


def serve_store(pipe: Connection) -> None:
    """Be the process that serves a store, until it is killed."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


@pytest.mark.slow
def test_a_store_that_stops_holds_no_rank(meeting_at: pytest.MonkeyPatch) -> None:
    """A rank that has joined makes groups, and the process that serves the store was stopped by a signal."""
    ours, theirs = forking().Pipe()
    server = forking().Process(target=serve_store, args=(theirs,), daemon=True)
    server.start()
    try:
        assert ours.poll(HANG_S)
        meeting_at.setenv("MASTER_PORT", str(ours.recv()))
        meeting_at.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        join(ProcessInfo(rank=0, world_size=1, local_rank=0, launcher="torchrun"), HANG_S, CPU)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(dist.DistStoreError):
            outcome_of(lambda: lane_groups(Layout(world_size=1, ep_size=1, rank=0), SOON_S))
    finally:
        server.kill()
        leave()


@pytest.mark.slow
def test_what_ends_in_time_is_handed_on() -> None:
    assert within(HANG_S, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(HANG_S, lambda: 1 // 0)
    with closing(socket.create_server(("127.0.0.1", 0))) as nobody, pytest.raises(RuntimeError):
        outcome_of(lambda: open_store("127.0.0.1", nobody.getsockname()[1], SOON_S))


# ---- the name of a start -----------------------------------------------------------------------------------


# ruff: noqa: TID251 - one rank comes later; the outcome is the same if it does not


SOON = timedelta(seconds=HANG_S)


def start(store: TCPStore, late: int | None = None) -> list[str]:
    """Names that three ranks hear, each with a connection of its own; one of them comes later."""

    def join(rank: int) -> str:
        mine = TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
        time.sleep(0.1 if rank == late else 0)
        return name_of_attempt(mine, rank, 3, SOON)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(join, range(3)))


def test_every_start_has_a_name_of_its_own() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store.set("greeting/1", "of a rank that was killed before it was answered")
    found = [start(store), start(store, late=2), start(store, late=0)]
    assert [len(set(names)) for names in found] == [1, 1, 1]
    assert len({names[0] for names in found}) == 3


def test_a_rank_that_was_started_as_one_of_another_number_is_named() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def refused(rank: int) -> None:
        mine = TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
        with pytest.raises(ConfigError, match=r"WORLD_SIZE = 4.* rank 1 .* rank 0 as one of 2"):
            name_of_attempt(mine, rank, (2, 4)[rank], SOON)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(refused, range(2)))


@pytest.mark.slow
def test_ranks_that_do_not_come_end_the_wait() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for rank in (0, 1):
        with pytest.raises(RuntimeError):
            name_of_attempt(store, rank, 2, timedelta(seconds=0.2))


@pytest.mark.parametrize(
    ("error", "told"),
    [("rv != -1. -1 vs -1. socket: Too many open files", "ulimit -n"), ("timed out", "GLOO_SOCKET_IFNAME")],
)
def test_what_helps_ranks_that_gloo_does_not_connect(error: str, told: str) -> None:
    said = remedy(RuntimeError(error), os.environ)
    assert [each for each in ("ulimit -n", "GLOO_SOCKET_IFNAME") if each in said] == [told]


def files_of_a_rank(soft: int, hard: int, ranks: int, by_nccl: bool, answers: Connection) -> None:
    """Tell the limit of open files after the check, or the error; lowering a hard limit is for ever."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        check_open_files(ranks, by_nccl=by_nccl)
        answers.send(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    except ConfigError as error:
        answers.send(f"{error.key} = {error.value}")


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "by_nccl", "then"),
    [
        (20, 30, 2, False, "ulimit -n = 30"),
        (20, 30, 1, False, 20),
        (64, 64, 8, False, 64),
        (20, 64, 8, False, 64),
        (20, 1024, 8, False, 384),
        (1024, 1024, 333, False, "ulimit -n = 1024"),
        (1024, 1024, 333, True, 1024),
        (1024, 1024, 999, True, "ulimit -n = 1024"),
    ],
)
def test_a_limit_of_open_files_that_no_step_keeps_is_raised_or_refused(
    soft: int, hard: int, ranks: int, by_nccl: bool, then: int | str
) -> None:
    ours, theirs = forking().Pipe()
    process = forking().Process(target=files_of_a_rank, args=(soft, hard, ranks, by_nccl, theirs))
    process.start()
    theirs.close()
    assert outcome_of(ours.recv) == then
    process.join()
