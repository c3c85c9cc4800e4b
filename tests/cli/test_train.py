"""`penstock train` as a user runs it: real processes, real files, real failures."""

from __future__ import annotations

import csv
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from penstock.checkpoint.folder import complete_checkpoints
from penstock.graph import Lane
from penstock.report import RunSummary
from penstock.train.metrics import read_metrics
from penstock.train.run_folder import read_run
from penstock.workloads import RecordedModel, read_recording
from tests.support.cli import Cli
from tests.support.forked import run_forked
from tests.support.launched import pid_of_rank, start_launcher
from tests.support.patience import HANG_S
from tests.support.ranks import Pools
from tests.support.runs import (
    check_refusal,
    clean_environ,
    losses,
    run,
    start,
    wait_until,
    write_config,
)
from tests.support.training import train_on

pytestmark = pytest.mark.slow

KEYS = {
    "schedule",
    "steps",
    "first_loss",
    "first_step",
    "last_loss",
    "eval_loss",
    "eval_noise",
    "corpus_unigram_entropy",
    "tokens_per_s",
    "whole_tokens_per_s",
    "model_flops_utilisation",
    "peak_flops",
    "iteration_s_median",
    "overlap_efficiency",
    "exposed_communication_s",
    "outputs",
}


@dataclass(frozen=True)
class Whole:
    """A run from beginning to end. found: its JSON. said: its standard error."""

    folder: Path
    found: dict[str, Any]
    said: str


def whole(folder: Path, result: subprocess.CompletedProcess[str]) -> Whole:
    """What a run of 20 steps in `folder` has said and left."""
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)  # exactly one object, nothing else on stdout
    return Whole(folder / "run", found, result.stderr)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """On four ranks; with a checkpoint of step 11 beside the last one."""
    folder = tmp_path_factory.mktemp("whole")
    settings = ("parallel.processes=4", "output.tensorboard=true", "train.checkpoint_every=11")
    return whole(folder, run_forked(4, "train", write_config(folder), "--json", *settings))


@pytest.fixture(scope="module")
def pair_run(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """On two ranks that the command starts; with its routing, and a checkpoint of step 18 beside the last."""
    folder = tmp_path_factory.mktemp("pair")
    routing = ("output.routing=true", "output.routing_samples=true", "output.loads=true")
    settings = (*routing, "train.checkpoint_every=18")
    return whole(folder, run("train", write_config(folder), "--json", *settings))


def trained(ranks: Pools, folder: Path, *settings: str) -> RunSummary:
    """A run that the command would start on two ranks, on two that have loaded torch already."""
    first, _ = ranks(2).run(train_on, 2, folder, list(settings), None)
    assert first.summary is not None, first.refused
    found: RunSummary = first.summary
    return found


def copy_without_last(run_of: Whole, folder: Path) -> Path:
    """The folder of a run that lost all behind the checkpoint before its last."""
    shutil.copytree(run_of.folder, folder)
    *_, last = sorted((folder / "checkpoints").iterdir())
    shutil.rmtree(last)
    return folder


def test_json_and_files(whole_run: Whole) -> None:
    folder, found = whole_run.folder, whole_run.found
    assert found.keys() >= KEYS
    assert found["schedule"] == "flowmoe" and found["steps"] == 20
    assert found["last_loss"] < found["first_loss"]
    assert 0 < found["overlap_efficiency"] <= 1
    assert list(losses(folder)) == list(range(1, 21))
    for name in ("checkpoint", "metrics", "trace", "tensorboard"):
        assert Path(found["outputs"][name]).exists(), name
    assert list((folder / "tensorboard").glob("events*"))
    assert (folder / "config.toml").exists()


def test_trace_lays_the_measured_run_beside_the_simulated_one(whole_run: Whole) -> None:
    folder = whole_run.folder
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(titles.values()) == sorted(
        f"{r} rank {i}" for r in ("measured", "simulated") for i in range(4)
    )
    orders: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        orders[titles[event["pid"]], event["tid"], event["args"]["step"]].append(event["name"])
    for rank in range(4):
        for lane in (Lane.COMPUTE, Lane.INTER):
            number = list(Lane).index(lane)
            simulated = orders[f"simulated rank {rank}", number, 0]
            for step in (19, 20):
                assert orders[f"measured rank {rank}", number, step] == simulated


def test_every_task_stands_beside_its_prediction(whole_run: Whole) -> None:
    folder = whole_run.folder
    rows = list(csv.DictReader((folder / "tasks.csv").open()))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    measured = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["args"]["step"] == 20]
    assert [row["task"] for row in rows] == [e["name"] for e in sorted(measured, key=lambda e: e["ts"])]
    for row in rows:
        assert 0 <= float(row["predicted_start_s"]) <= float(row["predicted_end_s"])
        assert float(row["measured_start_s"]) < float(row["measured_end_s"])


def test_trace_shows_communication_under_computation(whole_run: Whole) -> None:
    folder = whole_run.folder
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    rank0 = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    compute = [e for e in rank0 if e["tid"] == list(Lane).index(Lane.COMPUTE)]
    network = [e for e in rank0 if e["tid"] == list(Lane).index(Lane.INTER)]
    hidden = [
        n["name"]
        for n in network
        for c in compute
        if min(n["ts"] + n["dur"], c["ts"] + c["dur"]) > max(n["ts"], c["ts"])
    ]
    assert {name.split(".")[1] for name in hidden} & {"D", "C", "AR"}


def test_a_given_schedule_leaves_no_plan(whole_run: Whole) -> None:
    outputs = whole_run.found["outputs"]
    assert (outputs["plan"], outputs["cluster"]) == (None, None)
    assert not any(line.startswith("Plan ") for line in whole_run.said.splitlines())


@pytest.mark.soak
def test_schedules_agree_over_twenty_steps(pair_run: Whole, ranks: Pools, tmp_path: Path) -> None:
    """FlowMoE against the two others: 1e-5 relative at every step (dropless)."""
    assert pair_run.found["schedule"] == "flowmoe"
    expected = losses(pair_run.folder)
    write_config(tmp_path)
    for name in ("sequential", "moe_pipeline"):
        folder = tmp_path / name
        found = trained(ranks, tmp_path, f"schedule.name={name}", f"output.dir={folder}")
        assert found.schedule == name
        assert losses(folder).keys() == expected.keys() == set(range(1, 21))
        for step, loss in losses(folder).items():
            assert abs(loss - expected[step]) <= 1e-5 * expected[step], f"{name} step {step}"


def test_killed_rank_is_named_and_the_run_resumes_to_the_same_losses(
    pair_run: Whole, ranks: Pools, tmp_path: Path
) -> None:
    config, errors, folder = write_config(tmp_path), tmp_path / "stderr", tmp_path / "run"
    process = start_launcher("train", config, "train.checkpoint_every=4", stderr=errors)
    wait_until(lambda: complete_checkpoints(folder / "checkpoints") != [], process)
    done = len(losses(folder))
    wait_until(lambda: len(losses(folder)) > done, process)  # in a step, and in no exchange after one
    os.kill(pid_of_rank(process.pid, 1), signal.SIGKILL)
    assert process.wait(timeout=HANG_S) == 1
    text = errors.read_text()
    assert "rank 1 was killed by signal 9 (SIGKILL)" in text
    assert "train.resume=true" in text
    assert "Traceback" not in text
    survivors = [line for line in text.splitlines() if line.startswith("penstock: rank") and "failed" in line]
    assert survivors, text
    assert all("task L" in line or "step" in line for line in survivors), text
    left = read_run(folder)
    assert left.summary is None and left.step is not None and left.step.step % 4 == 0
    assert any("rank 1" in failure for failure in left.failures)
    trained(ranks, tmp_path, "train.resume=true", "train.checkpoint_every=4")
    assert losses(folder) == losses(pair_run.folder)  # the very same bits
    assert read_run(folder).failures == ()


@pytest.mark.soak
def test_stopped_rank_runs_into_the_timeout(tmp_path: Path) -> None:
    config, errors, folder = write_config(tmp_path), tmp_path / "stderr", tmp_path / "run"
    process = start_launcher("train", config, "train.steps=100000", "parallel.timeout_s=5", stderr=errors)
    wait_until(lambda: len(losses(folder)) >= 3, process)
    os.kill(pid_of_rank(process.pid, 1), signal.SIGSTOP)
    assert process.wait(timeout=HANG_S) == 1
    text = errors.read_text()
    waited = [line for line in text.splitlines() if line.startswith("penstock: rank") and "failed" in line]
    assert waited and all("task L" in line or "step" in line for line in waited), text
    assert (
        list(folder.glob("failure-rank*.txt")) == [] or ">" in next(folder.glob("failure-rank*")).read_text()
    )


def test_ctrl_c_saves_and_ends_cleanly(pair_run: Whole, ranks: Pools, tmp_path: Path) -> None:
    config, errors, folder = write_config(tmp_path), tmp_path / "stderr", tmp_path / "run"
    process = start_launcher("train", config, stderr=errors)
    wait_until(lambda: len(losses(folder)) >= 5, process)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    assert process.wait(timeout=HANG_S) == 0, errors.read_text()
    done = max(losses(folder))
    assert (folder / "checkpoints" / f"step-{done:08d}").is_dir()
    if done < 20:
        trained(ranks, tmp_path, "train.resume=true")
    assert losses(folder) == losses(pair_run.folder)


def open_terminal(name: str) -> None:
    """Make a terminal that of this session, as the first that it opens, and of all output."""
    for descriptor in (0, 1, 2):
        os.dup2(os.open(name, os.O_RDWR), descriptor)
    sys.stdout, sys.stderr = (os.fdopen(each, "w", closefd=False) for each in (1, 2))  # made for a file


def test_a_terminal_that_is_closed_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """The system then sends SIGHUP to all of it, and every further line is an error."""
    ours, theirs = os.openpty()
    meddle = partial(open_terminal, os.ttyname(theirs))
    config, folder = write_config(tmp_path), tmp_path / "run"
    words = ("train", config, "train.steps=100000", "train.log_every=1")
    process = start_launcher(*words, stderr=tmp_path / "stderr", meddle=meddle)
    closed = threading.Event()

    def show() -> None:
        while not closed.is_set():
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 4096)

    screen = threading.Thread(target=show, daemon=True)
    screen.start()
    wait_until(lambda: len(losses(folder)) >= 3, process)
    closed.set()
    screen.join()
    os.close(ours)
    os.close(theirs)
    assert process.wait(timeout=HANG_S) == 0
    assert [path.name for path in complete_checkpoints(folder / "checkpoints")] == [
        f"step-{max(losses(folder)):08d}"
    ]


@pytest.mark.parametrize("left", ["complete", "stopped", "of more steps", "none"])
def test_a_complete_run_that_is_started_again_says_so_once(
    pair_run: Whole, tmp_path: Path, left: str
) -> None:
    folder, known = tmp_path / "run", {"checkpoint": str(tmp_path / "run" / "checkpoints" / "step-00000020")}
    shutil.copytree(pair_run.folder, folder)
    summary = RunSummary.read(folder / "summary.json")
    replace(summary, interrupted=left == "stopped", steps=21 if left == "of more steps" else 20).save(folder)
    if left == "none":
        (folder / "summary.json").unlink()
    again = ("--json", "train.checkpoint_every=18", "train.resume=auto", f"output.dir={folder}")
    done = run_forked(2, "train", pair_run.folder.parent / "tiny.toml", *again)
    assert done.returncode == 0, done.stderr
    least = {"steps": 20, "interrupted": False, "outputs": known}
    assert json.loads(done.stdout) == (pair_run.found if left in ("complete", "stopped") else least)
    assert done.stderr.count("step-00000020") == 1


@pytest.mark.soak
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    """In `make test` it starts processes that only join, see tests/topology/test_join.py."""
    config = write_config(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    arguments = ["penstock", "train", str(config), "--json", "train.steps=4"]
    result = subprocess.run(
        launcher + arguments, capture_output=True, text=True, timeout=HANG_S, env=clean_environ(), check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["processes"] == 2


def test_checkpoint_of_four_ranks_continues_on_two(whole_run: Whole, ranks: Pools, tmp_path: Path) -> None:
    """The same global batch on another layout: the same losses to rounding."""
    write_config(tmp_path)
    folder = copy_without_last(whole_run, tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    kept = {step: loss for step, loss in losses(folder).items() if step <= 11}
    metrics.write_text(
        "".join(metrics.read_text().splitlines(keepends=True)[:11])
    )  # the rest is to come again
    trained(ranks, tmp_path, "train.resume=true", "data.batch_per_device=8", "schedule.microbatches=4")
    expected = losses(whole_run.folder)
    assert losses(folder).keys() == expected.keys() and losses(folder).items() >= kept.items()
    for step, loss in losses(folder).items():
        assert abs(loss - expected[step]) <= 1e-5 * expected[step], f"step {step}"


def test_an_earlier_run_is_kept(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    for _ in range(2):
        result = run_forked(1, "train", config, "parallel.processes=1", "train.steps=3")
        assert result.returncode == 0, result.stderr
    assert "which was moved to" in " ".join(result.stderr.split())
    assert losses(tmp_path / "run") == losses(tmp_path / "run.1")
    assert (tmp_path / "run.1" / "checkpoints" / "step-00000003").is_dir()


# ---- recorded routing --------------------------------------------------------------------------------------

RECORDED_MODEL = (
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.seq_len=16",
    "moe.num_experts=4",
    "moe.moe_ffn_hidden_size=24",
    "moe.capacity_factor=none",
)
"""The model of `write_config`, for `penstock bench`."""


@pytest.fixture(scope="module")
def recorded_run(pair_run: Whole, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The routing of a run that lost its last two steps, continued from the checkpoint before them."""
    assert read_recording(pair_run.folder / "routing.jsonl").steps == tuple(range(1, 21))
    folder = tmp_path_factory.mktemp("recorded")
    copy_without_last(pair_run, folder / "run")
    recording = ("output.routing=true", "output.routing_samples=true", "output.loads=true")
    settings = (*recording, "train.steps=22", "train.resume=true")
    result = run_forked(2, "train", write_config(folder), *settings)
    assert result.returncode == 0, result.stderr
    assert "step-00000018" in result.stderr
    return folder / "run" / "routing.jsonl"


def test_every_step_is_recorded_once_also_where_a_run_goes_on(recorded_run: Path) -> None:
    found = read_recording(recorded_run)
    assert found.steps == tuple(range(1, 23))
    assert found.model == RecordedModel(moe_layers=2, num_experts=4, top_k=2)
    copies = 2 * 4 * 16 * 2  # ranks, samples, tokens, choices: the batch of all ranks, not of one
    assert (found.loads_SYE.sum(axis=2) == copies).all()
    assert len({load.tobytes() for load in found.loads_SYE}) > 1, "other batches, other loads"
    for samples in found.samples:  # those of both ranks; reading has held their sums against the loads
        assert samples is not None and samples.shape == (2 * 4, 2, 4)
        assert (samples.sum(axis=2) == 16 * 2).all()


def test_every_rank_keeps_a_log_and_that_of_rank_0_has_what_the_terminal_showed(pair_run: Whole) -> None:
    first, second = ((pair_run.folder / "logs" / f"rank-0000{rank}.log").read_text() for rank in (0, 1))
    shown = [line for line in pair_run.said.splitlines() if line.startswith(("step ", "flowmoe"))]
    assert shown, pair_run.said
    for line in shown:
        assert line.partition("  eta")[0] in first
        assert " ".join(line.split()[:2]) in second
    assert "trained     " in first and "trained     " not in second, "the summary"


def test_loads_are_drawn_and_told_for_every_layer(pair_run: Whole) -> None:
    assert (pair_run.folder / "loads.png").stat().st_size > 1000
    steps = read_metrics(pair_run.folder / "metrics.jsonl")
    for step in steps:
        assert step.rank_load_max_over_mean is not None and step.expert_load_max_over_mean is not None
        assert len(step.rank_load_max_over_mean) == len(step.expert_load_max_over_mean) == 2
        assert mean(step.expert_load_max_over_mean) == pytest.approx(step.tokens_per_expert_max_over_mean)
        assert step.rank_rows_max_over_mean == step.rank_load_max_over_mean, "nobody has replicas"
        assert (step.loads_in_common is None) is (step.step == 1)
        assert 1 <= max(step.rank_load_max_over_mean) <= 2 == len(step.expert_load_entropy or ())
    assert pair_run.found["outputs"]["loads"].endswith("loads.png")


def test_virtual_devices_route_as_the_run_did(recorded_run: Path) -> None:
    routing = ("virtual.routing=recorded", f"virtual.recorded={recorded_run}")
    options = ("--virtual", "--json", "--schedules", "sequential")
    once = ("compare.rounds=1", "compare.warmup=1", "compare.profile_s=0.1")
    result = run_forked(2, "bench", *options, *RECORDED_MODEL, *routing, *once)
    assert result.returncode == 0, result.stderr
    assert f"recorded routing ({recorded_run})" in json.loads(result.stdout)["virtual_devices"]


def test_another_model_than_the_recorded_one_is_refused(recorded_run: Path) -> None:
    routing = ("virtual.routing=recorded", f"virtual.recorded={recorded_run}", "moe.num_experts=8")
    result = run_forked(1, "bench", "--virtual", "parallel.processes=1", *RECORDED_MODEL, *routing)
    assert result.returncode == 2
    assert "num_experts = 4, and this model has 8" in result.stderr and "Traceback" not in result.stderr


def test_routing_is_recorded_only_when_asked_for(whole_run: Whole) -> None:
    assert not (whole_run.folder / "routing.jsonl").exists()


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedule.name=flowmo", ["schedule.name", "flowmoe"]),
        ("schedule.nam=flowmoe", ["schedule.nam", "schedule.name"]),
        ("train.steps=many", ["train.steps", "many", "whole number"]),
        ("moe.top_k=9", ["moe.top_k", "Nearest valid: 4"]),
        ("moe.capacity_factor=0", ["moe.capacity_factor", "none"]),
        ("parallel.ep_size=3", ["parallel.ep_size", "Nearest valid"]),
        ("schedule.microbatches=5", ["schedule.microbatches", "Nearest valid: 4"]),
        ("model.preset=GPT2-Tiny", ["model.preset", "flowmoe/gpt2-tiny"]),
        ("plan.cluster=nope", ['plan.cluster = "nope": is neither', "cluster-1", "penstock profile"]),
        ("plan.file=nope.json", ['plan.file = "nope.json"', "plan.mode=replay"]),
        ("output.dir=/proc/x", ['output.dir = "/proc/x"', "Choose a path that you can write to."]),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, cli: Cli, override: str, words: list[str]) -> None:
    error = cli.refuses(["train", write_config(tmp_path), override, "moe.num_experts=4"])
    assert all(word in error for word in words), error


def test_an_unlike_name_gets_no_suggestion(tmp_path: Path, cli: Cli) -> None:
    assert "Nearest" not in cli.refuses(["train", write_config(tmp_path), "plan.cluster=nope"])


def test_what_ranks_refuse_the_command_says_once(tmp_path: Path) -> None:
    out, errors = tmp_path / "out", tmp_path / "errors"
    words = ("train", write_config(tmp_path), "data.path=/nowhere/at/all")
    code = start_launcher(*words, stdout=out, stderr=errors).wait(timeout=HANG_S)
    check_refusal(code, out.read_text(), errors.read_text())
    assert "data.path" in errors.read_text() and "/nowhere/at/all" in errors.read_text()


@pytest.mark.soak
def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    alone = ("parallel.processes=1", "train.steps=100000")
    process = start("train", config, *alone, stderr=tmp_path / "stderr")
    try:
        wait_until(lambda: len(losses(tmp_path / "run")) >= 1, process)
        process.send_signal(signal.SIGSTOP)  # it would only keep a processor busy
        second = run("train", config, *alone)
        assert second.returncode == 2
        assert "another run is writing there" in second.stderr
        seen = len(losses(tmp_path / "run"))
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: len(losses(tmp_path / "run")) > seen, process)
    finally:
        process.kill()
        process.wait()
