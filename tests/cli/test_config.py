"""`penstock config`: what settings come to, where from, what is wrong with them, and their schema."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.config import load
from penstock.train.config import RunConfig
from tests.support.cli import Cli

WRONG = '[moe]\ntop_k = "x"\nnum_expert = 3\n[train]\nsteps = 0\n'


@pytest.mark.parametrize("ending", ["toml", "yaml", "json"])
def test_what_is_shown_is_a_file_of_the_same_settings(ending: str, tmp_path: Path, cli: Cli) -> None:
    path, overrides = tmp_path / f"shown.{ending}", ["train.steps=5", 'output.dir="\\u007f: \U0001f4a5 \\n#"']
    path.write_text(cli.prints(["config", "show", "tiny", *overrides, "--format", ending]))
    assert load(RunConfig, path) == load(RunConfig, Path("tiny"), overrides)


def test_where_a_value_comes_from(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 7\nseed = 1\n")
    shown = json.loads(cli.prints(["config", "show", path, "train.steps=5", "--format", "json"]))
    expected = {"steps": (5, "command line"), "seed": (1, str(path)), "log_every": (10, "default")}
    for name, (value, where) in expected.items():
        assert (shown["train"][name], shown["$from"][f"train.{name}"]) == (value, where)
    assert "steps = 5  # command line" in cli.prints(["config", "show", path, "train.steps=5"])


def test_sizes_of_a_published_model_are_shown_as_its_own(cli: Cli) -> None:
    settings = ("model.preset=flowmoe/gpt2-tiny", "model.seq_len=12", "parallel.processes=2")
    shown = json.loads(cli.prints(["config", "show", *settings, "--format", "json"]))
    wanted = {"num_layers": (12, "model.preset"), "seq_len": (12, "command line"), "dropout": (0, "default")}
    assert {name: (shown["model"][name], shown["$from"][f"model.{name}"]) for name in wanted} == wanted


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_what_a_run_makes_of_the_settings_is_shown(transport: str, cli: Cli) -> None:
    """A schedule that is named decides, and a machine of one core starts two processes, GPU or none."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        named = ("model.preset=flowmoe/gpt2-tiny", "schedule.name=sequential")
        settings = (*named, f"parallel.transport={transport}")
        shown = json.loads(cli.prints(["config", "show", "tiny", *settings, "--format", "json"]))
    finally:
        os.sched_setaffinity(0, cores)
    assert (shown["plan"]["mode"], shown["moe"]["num_experts"]) == ("fixed", 2)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(WRONG)
    assert main(["config", "validate", "tiny", str(path)]) == 2
    said = cli.capsys.readouterr()
    assert said.out == "tiny: valid\n"
    assert [line.split(": ")[2].split(" ")[0] for line in said.err.splitlines()] == [
        "moe.num_expert",
        "moe.top_k",
        "train.steps",
    ]
    assert "Did you mean moe.num_experts?" in said.err and "Nearest valid: 1." in said.err


def test_the_schema_knows_every_setting(cli: Cli) -> None:
    schema = json.loads(cli.prints(["config", "schema"]))
    moe: dict[str, Any] = schema["$defs"]["MoEConfig"]
    assert moe["additionalProperties"] is False
    assert moe["properties"]["top_k"].items() >= {"minimum": 1, "maximum": 65536, "default": 2}.items()
    assert moe["properties"]["expert"]["enum"] == ["gelu", "swiglu"]
    assert {"const": "none"} in moe["properties"]["capacity_factor"]["anyOf"], "as a file of TOML says it"
    assert all(each["description"] for each in moe["properties"].values())
    sections = tomllib.loads((Path(__file__).parents[2] / "configs" / "tiny.toml").read_text())
    assert sections.keys() <= schema["properties"].keys()


def test_help_says_what_settings_mean(cli: Cli) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help-settings", "train"])
    assert "train.steps: a whole number from 1 to 99999999 (default: 200)" in cli.capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--help-settings", "trains"])
    assert "There are model, moe" in cli.capsys.readouterr().err
