"""What ranks find out together, as real processes: one that is hidden, dies, or is not like the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from penstock.cli.main import main
from penstock.doctor.facts import find_facts
from penstock.topology.join import ALONE
from penstock.topology.meeting_point import IPV6
from tests.doctor.ranks import DIED, Disguise, doctor

pytestmark = pytest.mark.slow


def test_ranks_that_are_alike_have_nothing_to_mend() -> None:
    told = doctor(2, "--json")
    assert told.codes == {0: 0, 1: 0}, told.errors
    found = json.loads(told.out)
    assert found["ok"] and all(check["passed"] for check in found["checks"])
    names = [check["name"] for check in found["checks"]]
    assert names[:6] == ["ranks", "versions", "clocks", "interface", "host names", "links"]
    assert names[6:] == ["memory", "disk", "open files", "exchange"]
    (link,) = found["examination"]["links"]
    assert link["pair"]["nodes"] == [0, 0] and link["rates"]["out_bytes_per_s"] > 0


def test_a_version_and_a_clock_that_differ_are_named() -> None:
    odd = Disguise(versions={"torch": "1.13.1", "penstock": "0.0.9"}, ahead_s=5.0, machine="another")
    told = doctor(3, disguises={2: odd}, environ={"COLUMNS": "100"})
    assert set(told.codes.values()) == {1}, told.errors
    text = " ".join(told.out.split())
    assert "Rank 2 (" in text and "has torch 1.13.1, and the rest 2." in text
    assert "has penstock 0.0.9, and the rest 0." in text
    assert "s ahead of that of rank 0: let all machines follow one time server" in text
    assert "FIX" in text and max(map(len, told.out.splitlines())) <= 100


@pytest.mark.parametrize("hidden", [0, 2])
def test_a_rank_that_does_not_come_is_named_and_nobody_waits_for_it(hidden: int) -> None:
    came = [rank for rank in range(3) if rank != hidden]
    told = doctor(3, "--wait", "60", come=came)
    assert told.codes == dict.fromkeys(came, 1), told.errors
    assert f"Rank {hidden} has not come: look at the machine where it should run" in " ".join(
        told.out.split()
    )
    assert told.out.count("2 of 3 came") == 1


def test_a_rank_that_dies_after_it_came_is_named() -> None:
    told = doctor(3, disguises={1: Disguise(dies=True)}, timeout_s=200)
    assert told.codes == {0: 1, 1: DIED, 2: 1}, told.errors
    text = " ".join(told.out.split())
    assert "Rank 1 (" in text and "came and then did not answer: look for a process that was killed" in text


def test_an_interface_that_is_not_there_is_named_and_nobody_waits_for_it() -> None:
    told = doctor(2, environ={"GLOO_SOCKET_IFNAME": "ib7"})
    assert told.codes == {0: 1, 1: 1}, told.errors
    text = " ".join(told.out.split())
    assert (
        "has no interface ib7; it has " in text
        and "name one that all others reach in GLOO_SOCKET_IFNAME" in text
    )


@pytest.mark.parametrize(
    ("given", "address", "named"), [("lo,lo", "127.0.0.1", ""), ("lo,ib7", "", "ib7"), ("ib8,lo", "", "ib8")]
)
def test_all_interfaces_of_a_list_are_to_be_there(
    monkeypatch: pytest.MonkeyPatch, given: str, address: str, named: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    found = find_facts(ALONE, "127.0.0.1", ())
    assert found.address == address and bool(found.problem) == bool(named) and named in found.problem


WITHOUT_IPV4 = """
ip link set lo up && ip -4 address flush dev lo
ip link add one type veth peer name two && ip -6 address add fe80::1/64 dev one nodad && ip link set one up
exec "$0" -c '
import os
from penstock.doctor.facts import find_facts
from penstock.topology.join import ALONE
for name in ("lo", "one"):
    os.environ["GLOO_SOCKET_IFNAME"] = name
    found = find_facts(ALONE, "::1", ())
    print(name, found.address or "none", "FIX" if found.problem else "ok")
'
"""


@pytest.mark.skipif(os.geteuid() != 0 or not IPV6.exists(), reason="it makes a namespace with IPv6")
def test_an_interface_may_have_ipv6_alone_if_not_just_on_its_own_link() -> None:
    script = ["unshare", "--net", "sh", "-c", WITHOUT_IPV4, sys.executable]
    told = subprocess.run(script, check=False, capture_output=True, text=True)
    assert told.stdout.split() == ["lo", "::1", "ok", "one", "none", "FIX"], told.stderr


def test_ranks_that_are_started_again_do_not_read_what_they_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun keeps the store, and agents of several machines count restarts differently."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**place, **rank}.items():
        monkeypatch.setenv(name, value)
    for started_again in (False, True):
        assert main(["doctor", "--json"]) == int(started_again)
        assert bool(capsys.readouterr().out) is not started_again


@pytest.mark.skipif(os.geteuid() != 0, reason="a rank becomes another user")
def test_a_rank_that_may_not_enter_the_folder_of_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o700)
    run = tmp_path / "locked" / "run"
    run.mkdir()
    told = doctor(2, f"output.dir={run}", "--json", disguises={1: Disguise(user=65534)})
    assert told.codes == {0: 1, 1: 1}, told.errors
    found = json.loads(told.out)
    (disk,) = (each for each in found["checks"] if not each["passed"])
    assert disk["name"] == "disk" and len(disk["findings"]) == 2
    assert found["examination"]["shared"] == {str(run): [0]}
    assert found["examination"]["facts"]["1"]["folders"][0]["problem"]


def test_a_folder_that_cannot_be_looked_at_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    found = find_facts(ALONE, "127.0.0.1", [tmp_path / "new", tmp_path / ("n" * 300), tmp_path / "link"])
    assert [bool(each.problem) for each in found.folders] == [False, True, True]
