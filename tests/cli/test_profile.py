"""`penstock profile` on real processes: what it prints, saves and refuses."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from penstock.config import to_dict
from penstock.cost.clusters import find_cluster
from penstock.cost.measured import STOPPED
from tests.autotune.test_profile import TINY, check
from tests.support.cli import Cli
from tests.support.forked import run_forked
from tests.support.launched import start_launcher
from tests.support.patience import HANG_S, wait_for
from tests.support.runs import run, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_two_processes_print_and_save_the_same_file(tmp_path: Path) -> None:
    out, figures = tmp_path / "two.json", tmp_path / "figures"
    options = ("--budget", "0.2", "--out", out, "--plot", figures, "--json")
    result = run("profile", *options, "parallel.processes=2", *TINY)
    assert result.returncode == 0, result.stderr
    file = find_cluster(str(out))
    check(file)
    assert json.loads(result.stdout) == json.loads(json.dumps(to_dict(file)))
    assert (file.name, file.ranks) == ("two", 2) and file.links
    assert (figures / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert "measuring links between 2 ranks" in result.stderr


def test_one_process_takes_a_file_and_prints_tables(tmp_path: Path) -> None:
    config, out = tmp_path / "one.toml", tmp_path / "one.json"
    config.write_text("[parallel]\nprocesses = 1\n")
    result = run_forked(1, "profile", config, *TINY, "--budget", "0.2", "--out", out)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("one: 1 rank on 1 node, ") and f"saved as {out}" in result.stdout
    assert "X.W" in result.stdout and "matmul" in result.stdout and "all_to_all" not in result.stdout


def test_a_stop_ends_all_of_it_and_keeps_what_was_measured(tmp_path: Path) -> None:
    out, errors, printed = tmp_path / "stopped.json", tmp_path / "errors", tmp_path / "printed"
    options = ("--budget", "3600", "--out", out, "parallel.processes=2")
    started = start_launcher("profile", *options, *TINY, stderr=errors, stdout=printed)
    wait_until(lambda: errors.exists() and "measuring links" in errors.read_text(), started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait(timeout=HANG_S) == 0, errors.read_text()
    with pytest.raises(ProcessLookupError):
        wait_for(lambda: os.killpg(started.pid, 0), "the end of all")
    assert str(out) in printed.read_text() and "Traceback" not in errors.read_text()
    file = find_cluster(str(out))
    check(file)
    assert file.links and file.tasks and file.doubts[0] == STOPPED


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("model.hiden_size=8",), "Did you mean model.hidden_size?"),
        (("moe.num_experts=3",), "moe.num_experts = 3"),
        (("nowhere.toml",), "nowhere.toml: there is no such file"),
        (("--out", "{folder}"), "is a folder"),
        (("--budget", "0"), "--budget = 0"),
        (("--budget", "1e9"), "--budget = 1000000000.0: must be above 0 and at most 86400 seconds"),
        (("--budget", "nan"), "--budget = nan"),
    ],
)
def test_bad_usage_is_refused_before_any_process_starts(
    tmp_path: Path, cli: Cli, arguments: tuple[str, ...], shown: str
) -> None:
    assert shown in cli.refuses(["profile", *(word.format(folder=tmp_path) for word in arguments)])
