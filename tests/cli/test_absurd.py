"""Absurd settings and files on the command line: one sentence and exit code 2, before any process starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import ranks as ranks_module
from penstock.cli import train as train_module
from tests.support.cli import Cli
from tests.support.forked import run_forked
from tests.support.runs import write_config

BIG, DIGITS = "1000000007", "9" * 5000


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not refused would start processes; here it fails instead."""

    def started(*_: object, **__: object) -> int:
        raise AssertionError("this was accepted, and ranks would have started")

    monkeypatch.setattr(ranks_module, "launch", started)
    monkeypatch.setattr(train_module, "_be_rank", started)


SETTINGS = [
    "model.hidden_size=100000007",
    f"model.hidden_size={BIG}",
    "model.hidden_size=1048576",
    f"model.num_layers={BIG}",
    "model.num_layers=1024 model.hidden_size=65536",
    f"model.num_heads={BIG}",
    f"model.seq_len={BIG}",
    f"model.vocab_size={BIG}",
    f"moe.num_experts={BIG}",
    f"moe.top_k={BIG}",
    "moe.num_experts=65536 moe.moe_ffn_hidden_size=1048576",
    f"parallel.processes={BIG}",
    f"parallel.ep_size={BIG}",
    "schedule.all_reduce_chunk_bytes=0",
    "schedule.all_reduce_chunk_bytes=-1",
    f"schedule.microbatches={BIG}",
    f"data.batch_per_device={BIG}",
    "data.batch_per_device=1048576 model.seq_len=16777216",
    f"train.steps={BIG}",
    f"train.seed={DIGITS}",
    f"model.hidden_size={DIGITS}",
    "model.hidden_size=0x" + "f" * 5000,
    "optimizer.lr=nan",
    "optimizer.lr=1e999",
    "moe.aux_loss_coeff=-inf",
    "model.moe_layers=" + "[" * 3000,
    "model.moe_layers=[" + "0," * 5000 + "0]",
    "parallel.timeout_s=nan",
    f"output.trace_steps={BIG}",
    "a." * 20_000 + "a=1",
]


@pytest.mark.slow
@pytest.mark.parametrize("given", SETTINGS, ids=lambda text: text[:50])
def test_train_refuses_in_a_sentence(tmp_path: Path, cli: Cli, given: str) -> None:
    said = cli.refuses(["train", write_config(tmp_path), *given.split()])
    assert said.startswith("penstock: ") and said.count("\n") == 1 and len(said) < 1000
    assert given.split("=", maxsplit=1)[0].rpartition(".")[2][:8] in said or "chars" in said or "GiB" in said


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", BIG],
        ["--nodes", "1048576", "--ranks-per-node", "1048576"],
        ["--layers", BIG],
        ["--batch", BIG],
        ["--seq-len", BIG],
        ["--num-experts", BIG],
        ["--top-k", BIG],
        ["--ep-size", BIG],
        ["--imbalance", "nan"],
        ["--memory-gib", "1e999"],
    ],
    ids=lambda words: words[0],
)
def test_plan_refuses_in_a_sentence(cli: Cli, words: list[str]) -> None:
    said = cli.refuses(["plan", "--model", "flowmoe/gpt2-tiny", "--cluster", "flowmoe-cluster-1", *words])
    assert said.count("\n") == 1 and len(said) < 1000 and words[0] in said


COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "train CONFIG": lambda path: ["train", path],
    "plan --cluster": lambda path: ["plan", "--model", "flowmoe/gpt2-tiny", "--cluster", path],
    "plan --show": lambda path: ["plan", "--show", path],
    "plan CONFIG": lambda path: ["plan", path, "--cluster", "flowmoe-cluster-1"],
    "bench --config": lambda path: ["bench", "--config", path],
    "profile CONFIG": lambda path: ["profile", path],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "folder", "deep", "digits"])
def test_no_command_waits_for_a_file(tmp_path: Path, cli: Cli, name: str, kind: str) -> None:
    path = tmp_path / "file.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "deep":
        path.write_text("[" * 50_000)
    elif kind == "digits":
        path.write_text(DIGITS)
    said = cli.refuses([*COMMANDS[name]("/dev/zero" if kind == "/dev/zero" else str(path))])
    assert said.count("\n") == 1 and len(said) < 1000


@pytest.mark.parametrize("place", ["/dev/zero", "pipe", "nowhere", "empty"])
def test_a_run_does_not_wait_for_its_text(tmp_path: Path, cli: Cli, place: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    said = cli.refuses(["train", write_config(tmp_path), f"data.path={tmp_path / place}"])
    assert said.startswith("penstock: data.path = ") and said.count("\n") == 1


@pytest.mark.slow
def test_ranks_that_nobody_has_checked_do_not_wait_either(tmp_path: Path) -> None:
    """As one process that something else has started; the plan is read later than all else."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    given = ["parallel.processes=1", "plan.mode=replay", f"plan.file={path}"]
    done = run_forked(1, "train", write_config(tmp_path), *given)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("penstock: ") == 1 and "is a device or a pipe, not a file" in done.stderr
