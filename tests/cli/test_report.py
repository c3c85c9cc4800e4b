"""`penstock report` on what a real run has left, whole, cut short and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.plan import PlanFile
from penstock.report.loads import LoadCourse
from penstock.report.summary import RunSummary
from penstock.trace.step_file import StepFile
from penstock.train.metrics import read_metrics
from tests.support.cli import Cli
from tests.support.ranks import Pools
from tests.support.training import folder_of, train_on

STEPS, RANKS = 6, 2
LEFT = ("summary.json", "step.json", "plan.json", "cluster.json", "loads.npz")


@pytest.fixture(scope="module")
def folder(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks by a plan that was searched, with a capacity: choices are dropped."""
    parent = folder_of(tmp_path_factory.mktemp("report"), "reported", RANKS)
    settings = [
        f"train.steps={STEPS}",
        "plan.mode=auto",
        f"plan.cluster={parent / 'cluster.json'}",
        "plan.budget=0.01",
        "moe.capacity_factor=1.0",
        "schedule.refine_after=0",
        "output.loads=true",
    ]
    for told in ranks(RANKS).run(train_on, RANKS, parent, settings, None):
        assert told.summary is not None, told
    return parent / "run"


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return shutil.copytree(folder, tmp_path / "copy")


def reported(run: Path, cli: Cli) -> dict[str, Any]:
    found = cli.finds(["report", run])
    assert Path(found["page"]).read_text().startswith("<!DOCTYPE html>")
    return found


def test_a_report_says_what_the_run_has_left(folder: Path, cli: Cli) -> None:
    found = reported(folder, cli)
    step, plan = StepFile.read(folder / "step.json"), PlanFile.read(folder / "plan.json")
    assert found["steps"] == STEPS and found["missing"] == []
    assert step.step == STEPS and step.ranks == RANKS
    assert found["predicted_s"] == step.predicted_s
    assert step.predicted_s and 0 < step.predicted_s < plan.predicted_s, (
        "a plan foretells iterations: clipping and update come after tasks"
    )
    assert found["measured_s"] == step.measured_s > 0
    assert found["plan"] == plan.choice.words
    assert [each[0] for each in found["next_best"]] == [each.words for each in plan.others]
    assert plan.others and all(each.words != plan.choice.words for each in plan.others)
    assert sum(each["count"] for each in found["tasks"]) == len(step.tasks)
    lasts = max(end for row in step.measured.end_s for end in row)
    assert found["binding"]["critical_path_s"] == pytest.approx(lasts, abs=1e-5)


def test_the_page_tells_the_run(folder: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "elsewhere" / "page.html"
    said = cli.prints(["report", str(folder), "--out", str(out)])
    assert str(out) in said and "limits this step" in said
    page = out.read_text()
    summary = RunSummary.read(folder / "summary.json")
    plan = PlanFile.read(folder / "plan.json")
    for text in (
        summary.subject,
        plan.choice.words,
        plan.others[0].words,
        "Choices dropped by layer",
        "Loads that last",
    ):
        assert text in page


def test_what_a_run_keeps_for_its_report_agrees_with_its_metrics(folder: Path) -> None:
    steps = read_metrics(folder / "metrics.jsonl")
    loads = LoadCourse.read(folder / "loads.npz")
    assert loads.steps == tuple(each.step for each in steps)
    for each, loads_YE in zip(steps, loads.loads_SYE, strict=True):
        assert each.rows_dropped is not None and each.aux_loss_by_layer is not None
        assert all(0 <= share < 1 for share in each.rows_dropped)
        assert each.expert_load_max_over_mean == pytest.approx(loads_YE.max(1) / loads_YE.mean(1))
        assert each.aux_loss_global == pytest.approx(sum(each.aux_loss_by_layer) / len(loads.layers))
        assert each.model_flops_utilisation is None, "nothing was measured"
        assert each.model_flops_per_s is not None and each.model_flops_per_s > 0
        assert each.peak_memory_bytes is not None and each.peak_memory_bytes > 2**20


@pytest.mark.parametrize("name", LEFT)
def test_what_is_missing_is_said_and_the_rest_reported(run: Path, name: str, cli: Cli) -> None:
    (run / name).unlink()
    (missing,) = reported(run, cli)["missing"]
    assert missing.startswith(f"{name} is not there: ")


def test_a_run_that_was_killed_is_reported_as_far_as_it_came(run: Path, cli: Cli) -> None:
    for name in LEFT:
        (run / name).unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    found = reported(run, cli)
    assert found["steps"] == 3 and found["binding"] is None and len(found["missing"]) == len(LEFT)


@pytest.mark.parametrize("name", [*LEFT, "metrics.jsonl"])
def test_a_damaged_file_is_refused_by_its_name(run: Path, name: str, cli: Cli) -> None:
    content = (run / name).read_bytes()
    for damaged in (content[: len(content) // 2] + b"\n}{\n", b'{"version": 1}\n', b"\x00\xff\n"):
        (run / name).write_bytes(damaged)
        assert name in cli.refuses(["report", run])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lanes", ["warp"]),
        ("tasks", ["L0.AT.m0.F"]),
        ("version", 9),
        ("typical_measured_s", []),
        ("shown", []),
    ],
)
def test_a_step_that_does_not_fit_together_is_refused(run: Path, key: str, value: object, cli: Cli) -> None:
    table = json.loads((run / "step.json").read_text())
    (run / "step.json").write_text(json.dumps({**table, key: value}))
    assert "step.json" in cli.refuses(["report", run])


@pytest.mark.parametrize("where", [("predicted", "end_s", 0, 0), ("path", 0, "start_s")])
def test_a_moment_that_no_step_has_is_refused(run: Path, where: tuple[str | int, ...], cli: Cli) -> None:
    step = json.loads((run / "step.json").read_text())
    inner: Any = step
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = 1e308
    (run / "step.json").write_text(json.dumps(step))
    said = cli.refuses(["report", run])
    assert "step.json" in said and "it is a moment of a step" in said


@pytest.mark.parametrize("change", [lambda found: found[:-1], lambda found: [*found, 1.0]])
def test_steps_of_models_with_other_layers_are_refused(
    run: Path, change: Callable[[list[float]], list[float]], cli: Cli
) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["rows_dropped"] = change(lines[-1]["rows_dropped"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = cli.refuses(["report", run])
    assert "metrics.jsonl" in said and f"rows_dropped has {len(lines[-1]['rows_dropped'])} numbers" in said


def test_settings_that_cannot_be_read_are_refused(run: Path, cli: Cli) -> None:
    (run / "config.toml").write_bytes(b"\xff")
    assert "config.toml: is not UTF-8" in cli.refuses(["report", run])


SHOWN = ("config.toml", "metrics.jsonl", "failure-rank1.txt", *LEFT)


@pytest.mark.parametrize("name", SHOWN)
def test_no_file_is_shown_that_is_not_the_run_s(run: Path, tmp_path: Path, cli: Cli, name: str) -> None:
    """A folder from someone else may have links to what its reader would not pass on."""
    (run / "report.html").unlink(missing_ok=True)  # of another test
    (run / "summary.json").unlink()  # a run without one shows why its ranks have failed
    (tmp_path / "mine").write_text("a secret")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "mine")
    said = cli.refuses(["report", run])
    assert str(run / name) in said and "secret" not in said
    assert not (run / "report.html").exists()


def test_a_page_is_written_into_no_other_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    page = tmp_path / "page.html"
    for name in ("page.html", "page.html.part", "page.html.partial"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    assert main(["report", str(run), "--out", str(page)]) == 0
    assert (tmp_path / "mine").read_text() == "mine"
    assert not page.is_symlink() and page.read_text().startswith("<!DOCTYPE html>")
    capsys.readouterr()


def test_a_folder_without_a_run_is_refused(tmp_path: Path, cli: Cli) -> None:
    assert "there is no such folder" in cli.refuses(["report", tmp_path / "none"])
    assert "holds no run" in cli.refuses(["report", tmp_path])
