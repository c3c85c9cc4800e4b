"""Paths that begin with the home folder, where no shell has put it in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config import ConfigError
from penstock.cost.clusters import FOLDER, find_cluster, names
from penstock.plan.plan_config import PlanConfig
from tests.support.cli import Cli


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "command", [("train", "~/none.toml"), ("doctor", "~/none.toml"), ("plan", "--show=~/none.toml")]
)
def test_files_are_looked_for_at_home(home: Path, cli: Cli, command: tuple[str, ...]) -> None:
    said = cli.refuses(command)
    assert f"{home}/none.toml" in said and "there is no such file" in said


def test_results_are_written_there(home: Path, cli: Cli) -> None:
    said = cli.refuses(["report", "~/nothing", "--out=~/page.html"])
    assert f"{home}/nothing" in said


def test_a_plan_and_a_cluster_of_ones_own_may_lie_there(home: Path) -> None:
    assert PlanConfig(mode="replay", file="~/plan.json").path == home / "plan.json"
    shutil.copy(FOLDER / f"{names()[0]}.json", home / "cluster.json")
    assert find_cluster("~/cluster.json") == find_cluster(names()[0])


def test_nobody_has_that_home(cli: Cli) -> None:
    why = "starts with ~USER, but there is no such user"
    assert why in cli.refuses(["train", "tiny", "output.dir=~nobody-of-that-name/x"])
    with pytest.raises(SystemExit):
        main(["report", "~nobody-of-that-name/x"])
    assert why in cli.capsys.readouterr().err
    with pytest.raises(ConfigError, match=why):
        PlanConfig(mode="replay", file="~nobody-of-that-name/plan.json")
    with pytest.raises(ConfigError, match=why):
        find_cluster("~nobody-of-that-name/cluster.json")
