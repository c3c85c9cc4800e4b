"""`penstock bench` on real processes: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.peers import require
from penstock.config import ConfigError
from tests.support.runs import run

pytestmark = pytest.mark.slow

SMALL = (
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_layers=2",
    "model.seq_len=16",
    "moe.moe_ffn_hidden_size=32",
    "compare.rounds=3",
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


@pytest.mark.slow
def test_three_schedules_in_turns() -> None:
    found = printed(run("bench", "--json", *SMALL))
    assert [case["schedule"] for case in found["cases"]] == ["sequential", "moe_pipeline", "flowmoe"]
    for case in found["cases"]:
        assert len(case["iterations_s"]) == 3
        assert case["iteration_s_median"] > 0 and case["simulated_s"] > 0
        assert 0 <= case["overhead_s"] < case["iteration_s_median"]
    assert found["cases"][0]["speedup"] == 1.0


# ---- one run with all that can be written ------------------------------------------------------------------


@pytest.fixture(scope="module")
def plotted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """JSON and figures of one comparison, of which two schedules are asked for by option."""
    folder = tmp_path_factory.mktemp("plotted") / "figures"
    options = ("--json", "--plot", folder, "--schedules", "penstock,sequential")
    return printed(run("bench", *options, *QUICK)), folder


@pytest.mark.slow
def test_json_has_what_people_look_for(plotted: tuple[dict[str, Any], Path]) -> None:
    found, _ = plotted
    assert (found["virtual"], found["virtual_devices"], found["ranks"]) == (False, None, 2)
    assert [case["schedule"] for case in found["cases"]] == ["penstock", "sequential"]
    for case in found["cases"]:
        assert case.keys() >= CASE_KEYS
        assert (case["transport"], case["label"]) == ("penstock", case["schedule"])
        assert case["limit_s"] == found["limit_s"] == found["compute_s"], "the link's rate is not known"
        assert case["overlap_efficiency"] == found["limit_s"] / case["iteration_s_median"]
        assert case["simulated_s"] > 0
    base, other = found["cases"]
    assert base["speedup"] == 1.0
    assert other["speedup"] == base["iteration_s_median"] / other["iteration_s_median"]


@pytest.mark.slow
def test_figures_and_a_page_are_written(plotted: tuple[dict[str, Any], Path]) -> None:
    _, folder = plotted
    figures = sorted(folder.glob("*.png"))
    assert figures and all(path.read_bytes().startswith(PNG) for path in figures)
    page = (folder / "index.html").read_text()
    assert "penstock" in page and "sequential" in page and "(virtual devices)</h2>" not in page


# ---- virtual devices ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_virtual_devices_are_marked_in_json() -> None:
    zipf = ("virtual.routing=zipf", "virtual.zipf_exponent=1.5")
    found = printed(run("bench", "--virtual", "--json", "--schedules", "flowmoe", *QUICK, *zipf))
    assert found["virtual"] is True
    assert found["virtual_devices"] == "virtual devices, zipf routing (exponent 1.5)"
    assert found["cases"][0].keys() >= CASE_KEYS


@pytest.mark.slow
def test_virtual_devices_are_marked_in_text_and_page(tmp_path: Path) -> None:
    result = run("bench", "--virtual", "--plot", tmp_path, "--schedules", "flowmoe", *QUICK)
    assert result.returncode == 0, result.stderr
    assert "virtual devices, uniform routing; computation is slept" in result.stdout.splitlines()[0]
    assert "(virtual devices)</h2>" in (tmp_path / "index.html").read_text()


@pytest.mark.slow
def test_nothing_is_called_virtual_that_is_not() -> None:
    result = run("bench", "--schedules", "flowmoe", *QUICK)
    assert result.returncode == 0, result.stderr
    assert "virtual" not in result.stdout and " flowmoe |" in result.stdout


# ---- collectives -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_collectives_as_json() -> None:
    found = printed(run("bench", "--collectives", "--json", *QUICK))
    assert (found["ranks"], found["nodes"], found["inter_rate_bit_per_s"]) == (2, 1, None)
    names = {row["collective"] for row in found["collectives"]}
    assert names == {"counts", "all-to-all, even", "all-to-all, uneven", "all-reduce"}
    for row in found["collectives"]:
        assert row["times_s"].keys() == {"penstock", "gloo"}


# ---- other systems -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["deepspeed", "megatron"])
def test_a_peer_that_is_not_installed_says_how(peer: str) -> None:
    try:
        require(peer)
    except ConfigError:
        result = run("bench", "--peers", peer, *QUICK)
        assert result.returncode == 2
        assert "pip install 'penstock[peers]'" in result.stderr and "Traceback" not in result.stderr
    else:
        pytest.skip(f"{peer} is installed")


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["deepspeed", "megatron"])
def test_a_peer_takes_part_in_both_columns(peer: str) -> None:
    try:
        require(peer)
    except ConfigError as error:
        pytest.skip(str(error))
    options = ("--json", "--schedules", "sequential,flowmoe", "--peers", peer)
    found = printed(run("bench", *options, *QUICK))
    labels = ["sequential", "flowmoe", "sequential (gloo)", peer, f"{peer} (gloo)"]
    assert [case["label"] for case in found["cases"]] == labels
    for case in found["cases"]:
        assert (case["simulated_s"] is None) is (case["schedule"] == peer or case["transport"] == "gloo")


# ---- what is refused ---------------------------------------------------------------------------------------


def test_an_unknown_schedule_is_named() -> None:
    result = run("bench", 'compare.schedules=["sequential","flow"]')
    assert result.returncode == 2
    assert "compare.schedules" in result.stderr and "flowmoe" in result.stderr


@pytest.mark.slow
def test_ranks_that_somebody_else_started_get_no_second_network() -> None:
    started = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}
    words = [sys.executable, "-m", "penstock", "bench", "--emulate", "2x1"]
    result = subprocess.run(words, env=os.environ | started, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "leave --emulate out" in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "nothing"], ["compare.peers", "nothing", "Use some of deepspeed, megatron"]),
        (["--peers", "deepspeed", "--virtual"], ["--peers", "deepspeed", "Leave --virtual out"]),
        (["--collectives", "--virtual"], ["--collectives", "Leave --virtual out"]),
        (["--collectives", "--plot", "figures"], ["--collectives", "Leave --plot out"]),
        (["--collectives", "--peers", "deepspeed"], ["--collectives", "Leave --peers out"]),
        (["--suite", "figures", "--virtual"], ["--suite", "Leave everything but --suite DIR out"]),
        (["--suite", "figures", "compare.rounds=1"], ["--suite", "Leave everything but --suite DIR out"]),
        (["--schedules", "flowmoe,flowmoe"], ["compare.schedules", "twice", "Name each once"]),
        (["compare.schedules=[]"], ["compare.schedules", "nothing to compare"]),
        (["moe.capacity_factor=none"], ["moe.capacity_factor", "use --virtual"]),
        (["--schedules", "sequential,flow"], ["compare.schedules", "flow", "Use some of", "moe_pipeline"]),
        (["compare.rounds=0"], ["compare.rounds", "at least 1"]),
        (["compare.peer=deepspeed"], ["compare.peer", "compare.peers"]),
        (["--virtual", "virtual.routing=recorded"], ["virtual.recorded", "Give its path"]),
    ],
)
def test_what_is_wrong_is_named_with_a_way_out(arguments: list[str], words: list[str]) -> None:
    result = run("bench", *arguments)
    assert result.returncode == 2, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert result.stderr.count("penstock: ") == 1, "said once, not by every rank"
