"""`penstock emulate` and `penstock train --emulate` as a user runs them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.lab.emulate import clusters, open_cluster, remove_stale
from penstock.lab.emulate.system import NAMESPACES
from tests.support.cli import Cli
from tests.support.launched import pid_of_rank, start_launcher
from tests.support.patience import HANG_S, wait_for
from tests.support.runs import (
    clean_environ,
    command,
    losses,
    run,
    wait_until,
    write_config,
)

real = pytest.mark.usefixtures("emulation")


@pytest.fixture
def made(emulation: None, cli: Cli) -> Iterator[dict[str, Any]]:
    """A cluster of two nodes with two devices each, as `up --json` describes it."""
    del emulation
    found = cli.finds(["emulate", "up", "2x2", "--inter-rate", "700mbit"])
    yield found
    if found["id"] in {state.name for state in clusters()}:
        open_cluster(found["id"]).down()


def namespaces() -> list[str]:
    return [path.name for path in NAMESPACES.iterdir()]


def test_up_says_what_there_is(made: dict[str, Any]) -> None:
    assert (made["nodes"], made["devices"]) == (2, 2)
    assert (made["inter_rate_bit_per_s"], made["intra_rate_bit_per_s"]) == (7e8, 8e9)
    assert [rank["rank"] for rank in made["ranks"]] == [0, 1, 2, 3]
    assert {rank["namespace"] for rank in made["ranks"]} <= set(namespaces())


def test_list(made: dict[str, Any], cli: Cli) -> None:
    said = f"{made['id']}: 2x2 (2 nodes of 2), made with uplinks 700mbit, inside 8gbit, until `down`"
    assert said in cli.prints(["emulate", "list"])
    listed = {each["id"]: each for each in cli.finds(["emulate", "list"])["clusters"]}
    assert listed[made["id"]]["owner_pid"] is None
    assert [uplink["rate_bit_per_s"] for uplink in listed[made["id"]]["uplinks"]] == [7e8, 7e8]


def test_a_cluster_that_was_removed_in_part_is_listed(made: dict[str, Any], cli: Cli) -> None:
    """Who made or removed it was killed; it is nobody's, so no other start removes the rest."""
    subprocess.run(["ip", "netns", "delete", f"{made['id']}-core"], check=True)
    listed = {each["id"]: each for each in cli.finds(["emulate", "list"])["clusters"]}
    assert listed[made["id"]]["uplinks"] == []
    assert main(["emulate", "down", made["id"]]) == 0
    assert not [name for name in namespaces() if name.startswith(made["id"])]


def test_a_cluster_without_all_its_limits_is_listed(made: dict[str, Any], cli: Cli) -> None:
    """As for a moment while it is made or removed."""
    limit = ["qdisc", "delete", "dev", "uplink", "root"]
    subprocess.run(["tc", "-netns", f"{made['id']}-n0", *limit], check=True)
    listed = {each["id"]: each for each in cli.finds(["emulate", "list"])["clusters"]}
    assert listed[made["id"]]["uplinks"] == []


def test_rate_cut_and_restore(made: dict[str, Any], cli: Cli) -> None:
    def uplinks(*arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = cli.finds(["emulate", *arguments])["uplinks"]
        return found

    changed = uplinks("rate", made["id"], "--inter-rate", "300mbit", "--node", "1")
    assert [each["rate_bit_per_s"] for each in changed] == [7e8, 3e8]
    assert [each["is_up"] for each in uplinks("cut", made["id"], "0")] == [False, True]
    assert [each["is_up"] for each in uplinks("restore", made["id"], "0")] == [True, True]
    said = cli.prints(["emulate", "rate", made["id"], "--intra-rate", "1gbit"])
    assert "node 1   uplink 300mbit  up " in said


def test_exec_is_the_command(made: dict[str, Any]) -> None:
    result = run(
        "emulate", "exec", made["id"], "3", "--", "sh", "-c", "echo $RANK $MASTER_ADDR; ip -br a; exit 7"
    )
    assert result.returncode == 7
    assert result.stdout.startswith("3 198.18.0.1\n") and made["ranks"][3]["address"] in result.stdout


def test_down_once_and_again(made: dict[str, Any], cli: Cli) -> None:
    assert cli.prints(["emulate", "down", made["id"]]) == f"removed {made['id']}\n"
    assert not [name for name in namespaces() if name.startswith(made["id"])]
    assert "there is no such emulated cluster" in cli.refuses(["emulate", "down", made["id"]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("up 2by2", "SHAPE = "),
        ("up 2x2 --inter-rate fast", "--inter-rate = "),
        ("up 2x2 --intra-rate 0bit", "--intra-rate = "),
        ("down", "say which cluster"),
        ("down pen1-0 --all", "say which cluster"),
        ("rate pen1-0", "there is no rate to set"),
        ("rate pen1-0 --inter-rate ''", "--inter-rate = "),
        ("exec pen1-0 0", "there is no command to run"),
    ],
)
def test_bad_usage(arguments: str, message: str, cli: Cli) -> None:
    assert message in cli.refuses(["emulate", *shlex.split(arguments)])


@pytest.mark.parametrize(
    "arguments", ["cut ID 2", "restore ID -1", "exec ID 4 -- true", "rate ID --inter-rate 1mbit --node 2"]
)
def test_what_the_cluster_has_not(arguments: str, made: dict[str, Any], cli: Cli) -> None:
    assert "must be from 0 to" in cli.refuses(["emulate", *arguments.replace("ID", made["id"]).split()])


@pytest.mark.slow
def test_without_the_tools_it_says_what_to_install() -> None:
    environ = {**clean_environ(), "PATH": ""}
    result = subprocess.run(
        command("emulate", "list"), capture_output=True, text=True, env=environ, check=False
    )
    assert result.returncode == 2 and "Install iproute2" in result.stderr


# ---- training in it ----------------------------------------------------------------------------------------


def test_rates_need_a_cluster(tmp_path: Path, cli: Cli) -> None:
    assert "Add --emulate" in cli.refuses(["train", str(write_config(tmp_path)), "--inter-rate", "1gbit"])


def test_ranks_of_torchrun_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["train", str(write_config(tmp_path)), "--emulate", "2x1"]) == 2
    assert "--emulate" in capsys.readouterr().err


@real
@pytest.mark.slow
def test_train_in_a_cluster_of_its_own(tmp_path: Path) -> None:
    options = ("--emulate", "2x1", "--inter-rate", "400mbit")
    result = run(
        "train",
        write_config(tmp_path),
        *options,
        "parallel.processes=4",
        "train.steps=2",
        "moe.dispatch=flat",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("starting 2 processes on ")
    assert list(losses(tmp_path / "run")) == [1, 2]
    assert "parallel.processes = 4 is not used" in result.stderr
    assert not [state for state in clusters() if state.owner and state.is_stale]


@real
@pytest.mark.slow
def test_a_killed_launcher_leaves_what_the_next_start_removes(tmp_path: Path) -> None:
    errors = tmp_path / "errors.txt"
    words = ("train", write_config(tmp_path), "train.steps=100000", "--emulate", "1x1")
    process = start_launcher(*words, stderr=errors)
    wait_until(lambda: bool(losses(tmp_path / "run")), process)
    name = next(state.name for state in clusters() if state.owner and state.owner.pid == process.pid)
    assert [each for each in namespaces() if each.startswith(name)]
    rank = pid_of_rank(process.pid, 0)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not Path(f"/proc/{rank}").exists())
    remove_stale()  # what any start of anybody on this machine does, and may have done by now
    assert not [each for each in namespaces() if each.startswith(name)]


@real
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    errors = tmp_path / "errors.txt"
    words = ("train", write_config(tmp_path), "train.steps=100000", "--emulate", "1x1")
    process = start_launcher(*words, stderr=errors)
    wait_until(lambda: bool(losses(tmp_path / "run")), process)
    os.killpg(process.pid, number)
    assert process.wait(timeout=HANG_S) in {0, 128 + number}
    assert not [each for each in namespaces() if each.startswith(f"pen{process.pid}-")]
