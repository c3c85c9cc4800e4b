"""Stages as processes: what hangs, dies or fails is a result with its reason; and the report of all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from penstock.cli.doctor import END
from penstock.cli.main import main
from penstock.config import load
from penstock.cost import ClusterFile
from penstock.cost.cluster_file import DOCTOR
from penstock.device import best_kind
from penstock.doctor.gpu import facts, run
from penstock.doctor.gpu.child import FOUND, Given, run_here
from penstock.doctor.gpu.here import Here
from penstock.doctor.gpu.outcome import Outcome, Verdict, together
from penstock.doctor.gpu.run import Crew, ending, report_of, run_child, run_stages
from penstock.doctor.gpu.stages import Stage
from penstock.doctor.meeting import Meeting
from penstock.topology import ProcessInfo
from penstock.topology.join import ALONE
from penstock.train.config import RunConfig
from tests.support.cli import Cli
from tests.support.forked import run_forked
from tests.support.patience import HANG_S
from tests.support.runs import without_reader

CONFIG = RunConfig()
KIND = best_kind().type
PASSED = Outcome.of([], {})


def child(code: str, timeout_s: float = HANG_S) -> Outcome:
    """What a child with this code is said to have found; `folder` is its folder."""
    text = f"import os, signal, sys, threading\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n{code}"
    given = Given(config=CONFIG, kind=KIND, timeout_s=timeout_s)
    return run_child(lambda folder: [sys.executable, "-c", text, str(folder)], given)


def test_a_stage_that_hangs_fails_by_its_time_limit() -> None:
    found = child("threading.Event().wait()", timeout_s=0.2)
    assert (found.verdict, found.reason) == (Verdict.FAIL, "did not end within 0.2 s")


def test_where_it_hung_is_said() -> None:
    """As the child's own timer writes it."""
    said = (
        'Thread 0x2 (most recent call first):\n  File "/x/penstock/topology/faults.py", line 5 in _watch\n'
        'Thread 0x1 (most recent call first):\n  File "/x/torch/cuda.py", line 3 in synchronize\n'
        '  File "/x/penstock/device.py", line 7 in wait\n  File "/x/penstock/other.py", line 9 in more'
    )
    found = ending(-signal.SIGKILL, said, lasted_s=1.1, timeout_s=1)
    assert found.endswith("; it was in penstock/device.py line 7, wait")


class InTheKernel(subprocess.Popen[bytes]):
    """A process that is seen to end neither by itself nor when it is killed."""

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "that might be for ever"
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_a_stage_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", InTheKernel)
    assert child("", timeout_s=1).reason == ending(None, "", lasted_s=1, timeout_s=1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit('no device')", "ended with code 1: no device"),
        ("os.kill(os.getpid(), signal.SIGTERM)", f"was ended by {signal.SIGTERM.name}"),
        ("os._exit(0)", "ended with code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed after "),
    ],
)
def test_a_stage_that_leaves_nothing_fails(code: str, reason: str) -> None:
    found = child(code)
    assert found.verdict is Verdict.FAIL and found.reason.startswith(reason)


def test_what_a_stage_left_counts() -> None:
    plain = {"verdict": "SLOW", "reason": "why", "lines": ["a"], "figures": {"n": 1}}
    found = child(f"(folder / {FOUND!r}).write_text({json.dumps(plain)!r})")
    assert found == Outcome(verdict=Verdict.SLOW, reason="why", lines=("a",), figures={"n": 1})


def failing(here: Here) -> Outcome:
    raise ValueError(f"rank {here.info.rank} has no numbers\n\nand a grid")


def stage(name: str, **settings: Any) -> Stage:
    usual: dict[str, Any] = {"title": name, "run": failing, "timeout_s": 1, "joins": False}
    return Stage(name=name, **{**usual, **settings})


def test_an_error_of_a_stage_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    config = replace(CONFIG, parallel=replace(CONFIG.parallel, processes=1))
    found = run_here(stage("any"), Given(config=config, kind=KIND, timeout_s=1))
    assert (found.verdict, found.reason) == (Verdict.FAIL, "ValueError: rank 0 has no numbers")


def sizes(here: Here) -> Outcome:
    return Outcome.of([], {"layers": here.config.model.num_layers})


def test_a_stage_has_the_sizes_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    settings = ["model.preset=flowmoe/bert-large", "model.num_layers=4"]
    Given(config=load(RunConfig, None, settings).resolved(1), kind=KIND, timeout_s=HANG_S).save(tmp_path)
    assert run_here(stage("any", run=sizes), Given.read(tmp_path)).figures == {"layers": 4}


def test_a_stage_takes_no_other_kind_of_device() -> None:
    """A GPU that its parent saw may be gone: a PASS of processors would say nothing about it."""
    other = "cpu" if KIND == "cuda" else "cuda"
    found = run_here(stage("any", run=sizes), Given(config=CONFIG, kind=other, timeout_s=HANG_S))
    assert found.verdict is Verdict.FAIL


def test_the_worst_of_all_ranks_counts() -> None:
    slow, wrong = Outcome.of([], {}, slow="late"), Outcome.of([], {}, wrong="NaN")
    assert together({0: PASSED, 1: slow}).reason == "rank 1: late"
    assert together({0: PASSED, 1: slow, 2: wrong, 3: wrong}).reason == "rank 2, 3: NaN"
    assert together({0: wrong, 1: wrong}) == wrong
    assert together({0: PASSED, 1: PASSED}).verdict is Verdict.PASS


def test_what_a_failed_stage_should_have_brought_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a cluster file has become reaches the stages after it."""
    cluster = {"name": "here", "nodes": 1, "ranks_per_node": 2}
    given: list[Given] = []

    def ran(command: Any, each: Given) -> Outcome:
        given.append(each)
        name = command(Path())[-2]
        return Outcome.failed("broken") if name == "b" else Outcome.of([], {"cluster": cluster})

    monkeypatch.setattr(run, "run_child", ran)
    stages = [stage("a"), stage("b", needs=("a",)), stage("c", needs=("b",)), stage("d", needs=("c",))]
    crew = Crew(Meeting(ALONE, "127.0.0.1", 0, serves=True, wait_s=HANG_S))
    results = [*run_stages(stages, CONFIG, crew)]
    assert [r.outcome.verdict for r in results] == ["PASS", "FAIL", "SKIPPED", "SKIPPED"]
    assert [each.cluster for each in given] == [None, ClusterFile(name="here", nodes=1, ranks_per_node=2)]


def test_a_report_is_a_cluster_file(tmp_path: Path) -> None:
    cluster = ClusterFile(name="here", nodes=1, ranks_per_node=2)
    plain = {"version": 2, "name": "here", "nodes": 1, "ranks_per_node": 2}
    results = [
        run.Result(stage="facts", seconds=1.0, outcome=Outcome.of(["x"], {"cluster": plain, "n": 1})),
    ]
    report = report_of(results, {}, 2, "cpu")
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(report))
    assert ClusterFile.read(path) == cluster
    assert report[DOCTOR].keys() == SCHEMA
    (only,) = report[DOCTOR]["stages"]
    assert only.keys() == OF_STAGE and only["figures"] == {"n": 1}


SCHEMA = {"version", "verdict", "device", "ranks", "date", "penstock", "torch", "stages"}
OF_STAGE = {"stage", "seconds", "verdict", "reason", "lines", "figures"}


# ---- facts -------------------------------------------------------------------------------------------------


def of_rank(**changes: Any) -> Outcome:
    figures: dict[str, Any] = {
        "device": {"name": "H100", "nccl": "2.28"},
        "versions": {"torch": "2.13"},
    }
    return Outcome.of([], {**figures, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({}, Verdict.PASS, ""),
        ({"versions": {"torch": "2.12"}}, Verdict.FAIL, "rank 1 has torch 2.12, and rank 0 2.13"),
        ({"versions": {}}, Verdict.FAIL, "rank 1 has torch none, and rank 0 2.13"),
        ({"device": {"name": "H100", "nccl": "2.27"}}, Verdict.FAIL, "rank 1 has NCCL 2.27, and rank 0 2.28"),
        (
            {"device": {"name": "A100", "nccl": "2.28"}},
            Verdict.SLOW,
            "ranks have different cards: A100, H100",
        ),
    ],
)
def test_ranks_with_different_software_fail(
    changes: Mapping[str, Any], verdict: Verdict, reason: str
) -> None:
    found = facts.judge({0: of_rank(), 1: of_rank(**changes)})
    assert (found.verdict, found.reason) == (verdict, reason)


def test_a_setting_that_slows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the facts of a real process."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    here = child_here()
    found = facts.run(here)
    assert found.verdict is Verdict.SLOW
    assert found.reason.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1: ")
    assert found.figures["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_setting_that_no_stage_can_undo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    found = facts.run(child_here())
    assert found.figures["environment"].keys() >= {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"}
    assert any("NVIDIA_TF32_OVERRIDE" in line for line in found.lines)


def child_here() -> Here:
    import torch

    from penstock.doctor.gpu.here import Scale

    cpu = torch.device("cpu")
    info = ProcessInfo(rank=0, world_size=1, local_rank=0, launcher="alone")
    return Here(info=info, device=cpu, config=CONFIG, scale=Scale.of(cpu))


# ---- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--gpu"], "--gpu"),
        (["--gpu", "--device", "cpu", "--stage", "fact"], "--stage"),
        (["--gpu", "--device", "cpu", "--timeout", "0"], "--timeout"),
        (["--gpu", "--cluster", "c.json"], "--cluster"),
        (["--stage", "lanes"], "--stage"),
        (["--device", "auto"], "--device"),
        (["--timeout", "9"], "--timeout"),
        (["--out", "gpu.json"], "--out"),
    ],
)
def test_what_cannot_be_done_is_refused(
    words: list[str], key: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert f"penstock: {key} = " in cli.refuses(["doctor", *words])


def test_where_nothing_can_be_saved_the_first_rank_says_so_before_it_waits_for_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("penstock.cli.doctor.Meeting", None)
    assert main(["doctor", "--gpu", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "penstock: --out = " in capsys.readouterr().err


def test_a_report_that_could_not_be_saved_is_not_said_to_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("penstock.cli.ranks.ranks_of", lambda *_: 1)
    monkeypatch.setattr("penstock.cli.doctor.run_stages", lambda *_: iter(()))
    monkeypatch.setattr("penstock.cli.doctor.save_out", lambda *_: False)
    assert main(["doctor", "--gpu", "--device", "cpu", "--out", str(tmp_path / "found.json")]) == 1
    assert "saved as" not in capsys.readouterr().out


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    """The meeting of the second of two ranks, while this process is the first; it has said goodbye."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    environ |= {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("penstock.cli.ranks.end_of_rank", lambda info, code: code)
    info = ProcessInfo(rank=1, world_size=2, local_rank=1, launcher="torchrun")
    meeting = Meeting(info, "127.0.0.1", store.port, serves=False, wait_s=HANG_S)
    meeting.leave("bye", {})
    yield meeting


def test_no_rank_ends_before_the_report_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, second: Meeting
) -> None:
    """torchrun ends all ranks when one has failed. And all ranks fail where the report cannot be saved."""
    announced: list[object] = []

    def save(*given: object) -> bool:
        del given
        announced.append(second.announced(END, until_s=0.0))
        return False

    Crew(second)
    monkeypatch.setattr("penstock.cli.doctor.run_stages", lambda *_: iter(()))
    monkeypatch.setattr("penstock.cli.doctor.save_out", save)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert main(["doctor", "--gpu", "--device", "cpu", "--out", str(tmp_path / "found.json")]) == 1
    assert announced == [None]


def test_all_ranks_end_where_the_report_cannot_be_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, second: Meeting
) -> None:
    def put(text: str) -> None:
        del text
        raise OSError(errno.ENOSPC, "No space left on device")

    Crew(second)
    out = tmp_path / "found.json"
    result = run.Result(stage="facts", seconds=1.0, outcome=Outcome.of([], {}))
    monkeypatch.setattr("penstock.cli.doctor.run_stages", lambda *_: iter((result,)))
    monkeypatch.setattr("penstock.cli.doctor.put", put)
    assert main(["doctor", "--gpu", "--device", "cpu", "--out", str(out)]) == 1
    assert out.is_file() and second.announced(END, until_s=0.0) == {"code": 0}


@pytest.mark.slow
def test_a_report_that_nobody_reads_is_saved(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ("doctor", "--gpu", "--device", "cpu", "--stage", "facts", "parallel.processes=1", "--out", out)
    assert without_reader(words)[0] == 0 and out.is_file()


def test_names_of_ranks_that_come_late_are_not_in_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, second: Meeting
) -> None:
    out = tmp_path / "found.json"

    def stages(*given: object) -> Iterator[run.Result]:
        del given
        second.leave("names", {"node-late": "<host>"})
        yield run.Result(stage="facts", seconds=1.0, outcome=Outcome.of(["of node-late"], {}))

    monkeypatch.setattr(run, "SPARE_S", 0.0)
    monkeypatch.setattr("penstock.cli.doctor.run_stages", stages)
    assert main(["doctor", "--gpu", "--device", "cpu", "--out", str(out)]) == 0
    assert json.loads(out.read_text())[DOCTOR]["stages"][0]["lines"] == ["of <host>"]


@pytest.mark.slow
def test_ranks_that_torchrun_started_find_the_facts_together(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ("doctor", "--gpu", "--device", "cpu", "--stage", "facts", "--out", out)
    done = run_forked(2, *words)
    assert done.returncode == 0, done.stderr
    assert "1 stage, " in done.stderr and "numerics" not in done.stderr, "it takes seconds"
    assert done.stdout.startswith("PASS    facts ")
    report = json.loads(out.read_text())[DOCTOR]
    assert (report["verdict"], report["ranks"], report["device"]) == ("PASS", 2, "cpu")
    (found,) = report["stages"]
    assert [each["rank"] for each in found["figures"]["ranks"]] == [0, 1]
    assert os.uname().nodename not in out.read_text()


@pytest.mark.slow
def test_a_rank_that_does_not_end_is_a_result_on_all(tmp_path: Path) -> None:
    """No process is as fast as that."""
    out = tmp_path / "found.json"
    words = ("doctor", "--gpu", "--device", "cpu", "--stage", "facts", "--timeout", "0.001", "--out", out)
    done = run_forked(2, *words)
    assert done.returncode == 1, done.stderr
    (found,) = json.loads(out.read_text())[DOCTOR]["stages"]
    assert (found["verdict"], found["reason"]) == ("FAIL", "did not end within 0.001 s")
