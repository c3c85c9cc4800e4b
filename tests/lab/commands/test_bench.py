"""`penstock bench` on real processes: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.peers import require
from penstock.config import ConfigError
from penstock.lab.bench import checkout
from penstock.lab.bench.config import PEERS
from tests.support.cli import Cli
from tests.support.forked import run_forked
from tests.support.launched import start_launcher
from tests.support.patience import HANG_S
from tests.support.runs import check_refusal, clean_environ, command, run, wait_until

pytestmark = pytest.mark.slow

SMALL = (
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_layers=2",
    "model.seq_len=16",
    "moe.moe_ffn_hidden_size=32",
    "compare.profile_s=0.1",
    "compare.rounds=2",
)
QUICK = (*SMALL[:-1], "compare.rounds=1", "compare.warmup=1")

CASE_KEYS = {
    "schedule",
    "iteration_s_median",
    "speedup",
    "limit_s",
    "overlap_efficiency",
    "simulated_s",
    "transport",
    "label",
}
PNG = b"\x89PNG\r\n\x1a\n"


def printed(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON object on stdout; nothing else may be there."""
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# ---- one run with all that can be written ------------------------------------------------------------------


@pytest.fixture(scope="module")
def plotted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """JSON and figures of one comparison, of which three schedules are asked for by option."""
    folder = tmp_path_factory.mktemp("plotted") / "figures"
    options = ("--json", "--plot", folder, "--schedules", "penstock,sequential,flowmoe")
    return printed(run_forked(2, "bench", *options, *SMALL)), folder


def test_schedules_in_turns(plotted: tuple[dict[str, Any], Path]) -> None:
    found, _ = plotted
    for case in found["cases"]:
        assert len(case["iterations_s"]) == 2
        assert case["iteration_s_median"] > 0 and case["simulated_s"] > 0
        assert 0 <= case["overhead_s"] < case["iteration_s_median"]


def test_json_has_what_people_look_for(plotted: tuple[dict[str, Any], Path]) -> None:
    found, _ = plotted
    assert (found["virtual"], found["virtual_devices"], found["ranks"]) == (False, None, 2)
    assert [case["schedule"] for case in found["cases"]] == ["penstock", "sequential", "flowmoe"]
    for case in found["cases"]:
        assert case.keys() >= CASE_KEYS
        assert (case["transport"], case["label"]) == ("penstock", case["schedule"])
        assert case["limit_s"] == found["limit_s"] == found["compute_s"], "the link's rate is not known"
        assert case["overlap_efficiency"] == found["limit_s"] / case["iteration_s_median"]
        assert case["simulated_s"] > 0
    base, *others = found["cases"]
    assert base["speedup"] == 1.0
    for other in others:
        rounds = zip(base["iterations_s"], other["iterations_s"], strict=True)
        assert other["speedup"] == pytest.approx(median(ours / theirs for ours, theirs in rounds))


def test_figures_and_a_page_are_written(plotted: tuple[dict[str, Any], Path]) -> None:
    _, folder = plotted
    figures = sorted(folder.glob("*.png"))
    assert figures and all(path.read_bytes().startswith(PNG) for path in figures)
    page = (folder / "index.html").read_text()
    assert "penstock" in page and "sequential" in page and "(virtual devices)</h2>" not in page


def test_a_stop_ends_all_of_it_and_prints_what_was_measured(tmp_path: Path) -> None:
    """SIGTERM to the command alone, as a batch system sends it."""
    out, errors = tmp_path / "out", tmp_path / "errors"
    options = ("--virtual", "--schedules", "flowmoe", "parallel.processes=2", *SMALL[:-1])
    endless = ("compare.warmup=1", "compare.rounds=100000")
    started = start_launcher("bench", *options, *endless, stderr=errors, stdout=out)
    second = re.compile(r"round ([2-9]|\d\d+) of ")  # told now and then
    wait_until(lambda: errors.exists() and second.search(errors.read_text()) is not None, started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait(timeout=HANG_S) == 0, errors.read_text()
    with pytest.raises(ProcessLookupError):
        os.killpg(started.pid, 0)
    assert "stopped, as requested, after" in (said := out.read_text()) and "flowmoe" in said
    assert "Traceback" not in errors.read_text()


# ---- virtual devices ---------------------------------------------------------------------------------------


def test_virtual_devices_are_marked_in_json() -> None:
    zipf = ("virtual.routing=zipf", "virtual.zipf_exponent=1.5")
    settings = (*QUICK, *zipf, "parallel.ranks_per_node=1")
    found = printed(run_forked(2, "bench", "--virtual", "--json", "--schedules", "flowmoe", *settings))
    assert found["nodes"] == 2 and found["wire_bytes"] > 0 and found["inter_rate_bit_per_s"] is None
    assert found["virtual"] is True
    assert found["virtual_devices"] == "virtual devices, zipf routing (exponent 1.5)"
    assert found["cases"][0].keys() >= CASE_KEYS


def test_virtual_devices_are_marked_in_text_and_page(tmp_path: Path) -> None:
    result = run_forked(2, "bench", "--virtual", "--plot", tmp_path, "--schedules", "flowmoe", *QUICK)
    assert result.returncode == 0, result.stderr
    assert "virtual devices, even routing; computation is slept" in result.stdout.splitlines()[0]
    assert "(virtual devices)</h2>" in (tmp_path / "index.html").read_text()


@pytest.mark.soak
def test_nothing_is_called_virtual_that_is_not() -> None:
    """And without options the usual three are compared."""
    result = run("bench", *QUICK)
    assert result.returncode == 0, result.stderr
    assert "virtual" not in result.stdout
    names = [line.split("|")[1].strip() for line in result.stdout.splitlines() if line.startswith("|")]
    head, rule, *rows = names[:5]  # the first part of the table, which is as wide as a terminal
    assert head == "schedule" and set(rule) == {"-"}
    assert rows == ["sequential", "moe_pipeline", "flowmoe"]


# ---- other systems -----------------------------------------------------------------------------------------


def missing(peer: str) -> str:
    """Why it cannot take part; empty if it can."""
    try:
        require(peer)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_that_is_not_installed_says_how(cli: Cli, peer: str) -> None:
    if not missing(peer):
        pytest.skip(f"{peer} is installed")
    assert "pip install --editable '.[peers]'" in cli.refuses(["bench", "--peers", peer, *QUICK])


@pytest.mark.soak
def test_peers_take_part_in_both_columns() -> None:
    peers = [peer for peer in PEERS if not missing(peer)]
    if not peers:
        pytest.skip(missing(PEERS[0]))
    options = ("--json", "--schedules", "sequential,flowmoe", "--peers", ",".join(peers))
    found = printed(run("bench", *options, *QUICK))
    labels = [label for peer in peers for label in (peer, f"{peer} (gloo)")]
    assert [case["label"] for case in found["cases"]] == [
        "sequential",
        "flowmoe",
        "sequential (gloo)",
        *labels,
    ]
    for case in found["cases"]:
        assert (case["simulated_s"] is None) is (case["schedule"] in peers or case["transport"] == "gloo")


@pytest.mark.parametrize("option", ["--peers", "--plot"])
def test_without_the_source_code_one_sentence_says_what_to_do(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    monkeypatch.setattr(checkout, "ROOT", tmp_path)
    error = cli.refuses(["bench", option, "deepspeed", *QUICK])
    assert option in error and "folder benchmarks/ of the source code" in error
    assert "Run pip install --editable . in a copy of the source code." in error


# ---- what is refused ---------------------------------------------------------------------------------------


def test_ranks_that_somebody_else_started_get_no_second_network() -> None:
    """This one also shows that the command says and returns what the tests below find in this process."""
    started = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}
    words = command("bench", "--emulate", "2x1")
    environ = clean_environ() | started
    result = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    check_refusal(result.returncode, result.stdout, result.stderr)
    assert "leave --emulate out" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("--peers nothing", "compare.peers"),
        ("--peers megatorn", "compare.peers"),
        ("--peers deepspeed --virtual", "--peers"),
        ("--peers deepspeed parallel.tp_size=2", "compare.peers"),
        ("virtual.routing=zipf", "virtual.routing"),
        ("virtual.zipf_exponent=2 virtual.routing=zipf", "virtual.zipf_exponent"),
        ("--virtual virtual.routing=recorded", "virtual.recorded"),
        ("--virtual compare.batch_per_device=1", "compare.batch_per_device"),
        (
            "--schedules flowmoe compare.batch_per_device=2 schedule.microbatches=3",
            "compare.batch_per_device",
        ),
        ("--schedules flowmo", "compare.schedules"),
        ("--schedules flowmoe,flowmoe", "compare.schedules"),
        ("compare.schedules=[]", "compare.schedules"),
        ("--emulate 0x1", "--emulate"),
        ("--emulate 2x1 --mtu 100", "--mtu"),
        ("--plan --virtual", "--plan"),
        ("--plan --plot figures", "--plan"),
        ("--plan --peers deepspeed", "--plan"),
        ("--plan --schedules flowmoe,fsmoe", "--plan"),
        ('--plan compare.peers=["deepspeed"]', "compare.peers"),
        ("--plan compare.tune=true", "compare.tune"),
        ("--virtual placement.samples=netmoe", "placement.samples"),
        ("placement.experts=planned", "placement.experts"),
        ("--collectives moe.num_experts=4", "--collectives"),
        ("--layer", "--layer"),
        ("--drift --json", "--drift"),
        ("--published", "--published"),
        ("--suite=.", "--suite"),
        ("moe.capacity_factor=none", "moe.capacity_factor"),
        ("compare.rounds=0", "compare.rounds"),
        ("compare.peer=deepspeed", "compare.peer"),
    ],
)
def test_what_is_wrong_is_refused_by_name(cli: Cli, arguments: str, key: str) -> None:
    error = cli.refuses(["bench", *arguments.split()])
    assert error.startswith((f"penstock: {key} = ", f"penstock: {key}: ")), error
