"""The life of a cluster: whatever ends it, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.lab.emulate import (
    Cluster,
    EmulateConfig,
    EmulationError,
    EmulationUnavailable,
    Owner,
    check_available,
    clusters,
    open_cluster,
    remove_stale,
    system,
)
from penstock.lab.emulate.system import NAMESPACES
from tests.support.patience import HANG_S, wait_for

SMALL = EmulateConfig(nodes=2, devices=1)

HOLDER = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background inherits another
from penstock.lab.emulate import Cluster, EmulateConfig
with Cluster(EmulateConfig(nodes=2, devices=1)) as cluster:
    print(cluster.name, flush=True)
    time.sleep(600)
"""

real = pytest.mark.usefixtures("emulation")


def namespaces_of(name: str) -> list[str]:
    return sorted(path.name for path in NAMESPACES.iterdir() if path.name.startswith(f"{name}-"))


def is_recorded(name: str) -> bool:
    return name in {state.name for state in clusters()}


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that has a cluster and sleeps; and the cluster's name."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdout.close()


@real
def test_up_and_down() -> None:
    cluster = Cluster(SMALL)
    cluster.down()  # there is nothing yet
    cluster.up()
    assert len(namespaces_of(cluster.name)) == 2 + 2 + 1
    assert is_recorded(cluster.name)
    with pytest.raises(EmulationError, match="there is an emulated cluster"):
        cluster.up()
    assert len(namespaces_of(cluster.name)) == 5  # the failure has not removed what there was
    for _ in range(2):
        cluster.down()
        assert namespaces_of(cluster.name) == [] and not is_recorded(cluster.name)


@real
def test_an_exception_removes_it() -> None:
    with pytest.raises(KeyError), Cluster(SMALL) as cluster:
        raise KeyError
    assert namespaces_of(cluster.name) == []


@real
def test_a_failure_half_way_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(SMALL)
    monkeypatch.setattr("penstock.lab.emulate.links.set_rate", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cluster.up()
    assert namespaces_of(cluster.name) == [] and not is_recorded(cluster.name)


@real
def test_what_runs_inside_ends_with_it() -> None:
    with Cluster(SMALL) as cluster:
        process = subprocess.Popen(cluster.command(1, ["sleep", "60"]))
        wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
    assert process.wait(timeout=HANG_S) == -signal.SIGKILL


@real
def test_inside_there_is_one_link_and_no_ipv6() -> None:
    with Cluster(SMALL) as cluster:
        names = cluster.run_inside(1, socket.if_nameindex)
        assert {name for _, name in names} == {"lo", cluster.environ(1)["GLOO_SOCKET_IFNAME"]}
        show = cluster.command(1, ["ip", "-6", "-brief", "address"])
        assert subprocess.run(show, capture_output=True, text=True, check=True).stdout == ""
        assert {name for _, name in socket.if_nameindex()} >= {"lo"}  # this thread has stayed where it was


@real
def test_a_rank_finds_the_environment_of_torchrun() -> None:
    with Cluster(EmulateConfig(nodes=2, devices=2)) as cluster:
        found = cluster.environ(3)
        assert (found["RANK"], found["WORLD_SIZE"]) == ("3", "4")
        assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "2")
        assert found["MASTER_ADDR"] == cluster.address(0)


@real
@pytest.mark.parametrize("rank", range(4))
def test_the_wrapper_of_all_ranks_takes_each_to_its_place(rank: int) -> None:
    with Cluster(EmulateConfig(nodes=2, devices=2)) as cluster:
        program = "'import os, json; print(json.dumps(dict(os.environ)))'"
        shown = f"{sys.executable} -c {program}; ip netns identify $$"
        command = [*cluster.wrapper(), "sh", "-c", shown]
        environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        found, namespace = done.stdout.splitlines()
        assert namespace == cluster.namespaces[rank]
        assert cluster.environ(rank).items() <= json.loads(found).items()


@real
def test_another_process_or_thread_can_open_it() -> None:
    with Cluster(SMALL) as cluster:
        same = open_cluster(cluster.name)
        assert same.config == SMALL and same.namespaces == cluster.namespaces
        same.set_rate(inter=2e8)
        assert cluster.uplinks()[0].rate_bit_per_s == 2e8
        with pytest.raises(ConfigError, match=cluster.name):
            open_cluster("pen1-77")


@real
def test_it_works_outside_the_main_thread() -> None:
    found: list[int] = []

    def work() -> None:
        with Cluster(SMALL) as cluster:
            found.append(len(namespaces_of(cluster.name)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [5]


@real
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_removes_it(holder: tuple[subprocess.Popen[str], str], number: signal.Signals) -> None:
    process, name = holder
    assert len(namespaces_of(name)) == 5
    process.send_signal(number)
    expected = -number if number == signal.SIGINT else 128 + number  # Python dies of SIGINT itself
    assert process.wait(timeout=HANG_S) == expected
    assert namespaces_of(name) == [] and not is_recorded(name)


@real
def test_the_next_start_removes_what_a_killed_process_left(holder: tuple[subprocess.Popen[str], str]) -> None:
    process, name = holder
    remove_stale()
    assert len(namespaces_of(name)) == 5  # its owner is alive
    process.kill()  # not waited for: it stays a zombie, as under a parent that does not care
    wait_for(lambda: all(state.is_stale for state in clusters() if state.name == name))
    with Cluster(SMALL):
        assert namespaces_of(name) == [] and not is_recorded(name)


@real
def test_a_persistent_one_is_never_stale() -> None:
    program = (
        "from penstock.lab.emulate import *; c = Cluster(EmulateConfig(nodes=1, devices=1), persistent=True)"
    )
    program += "; c.up(); print(c.name)"
    name = subprocess.check_output([sys.executable, "-c", program], text=True).strip()
    try:
        remove_stale()
        assert len(namespaces_of(name)) == 3
    finally:
        open_cluster(name).down()
    assert namespaces_of(name) == []


def test_an_owner_is_told_from_a_later_process_with_its_id() -> None:
    assert Owner.current().is_alive
    assert not Owner(pid=os.getpid(), started_ticks=Owner.current().started_ticks - 1).is_alive


# ---- where it cannot work ----------------------------------------------------------------------------------


def why_not() -> str:
    with pytest.raises(EmulationUnavailable) as caught:
        check_available.__wrapped__()
    return str(caught.value)


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in why_not() and "darwin" in why_not()


def test_missing_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "Install iproute2" in why_not()


def test_missing_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(system, "_effective_capabilities", lambda: 0)
    assert "CAP_NET_ADMIN" in why_not() and "sudo" in why_not()


@real
def test_a_kernel_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> None:
        raise EmulationError("Specified qdisc kind is unknown")

    monkeypatch.setattr(system, "_try_a_link", refuse)
    assert "qdisc kind is unknown" in why_not() and "sch_tbf" in why_not()
