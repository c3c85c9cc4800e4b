"""`plan.mode=auto` as a user runs it: measured, chosen, explained, saved and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cost import ClusterFile
from penstock.report import RunSummary
from penstock.trace.step_file import StepFile
from tests.support.forked import run_forked
from tests.support.ranks import Pools
from tests.support.runs import losses, write_config
from tests.support.training import train_on

pytestmark = pytest.mark.slow

LABELS = ("Plan 1 ", "Time ", "Limit ", "Next ", "What if ")
SHOWN = LABELS[:3]
SIX = "train.steps=6"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run by the command on two ranks: its folder, its JSON and what it said beside it."""
    folder = tmp_path_factory.mktemp("plan")
    settings = ("parallel.timeout_s=60", SIX, "plan.mode=auto", "plan.profile_s=0.2")
    done = run_forked(2, "train", write_config(folder), "--json", *settings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)  # exactly one object, whatever libraries print
    found["config"] = (folder / "run" / "config.toml").read_text()  # later runs take its place
    return folder, found, done.stderr


def test_the_saved_settings_say_what_was_chosen_instead(planned: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = planned
    head, _, settings = found["config"].partition("\n\n")
    assert head.startswith("# Chosen by this run") and f"# moe.dispatch auto -> {found['dispatch']}" in head
    assert 'dispatch = "auto"' in settings and 'mode = "auto"' in settings


def test_it_says_what_was_chosen_and_why(planned: tuple[Path, dict[str, Any], str]) -> None:
    """What is next best and what would help stands in the plan's file."""
    _, found, said = planned
    lines = said.splitlines()
    said_labels = [label for line in lines for label in LABELS if line.startswith(label)]
    assert said_labels == list(SHOWN)
    why = json.loads(Path(found["outputs"]["plan"]).read_text())["why"]
    assert [line.split()[0] for line in why[: len(LABELS)]] == [label.split()[0] for label in LABELS[:4]] + [
        "What"
    ]
    assert "measuring the cluster" in said and "\nCluster  network " in said


def test_the_cluster_was_measured_here(planned: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = planned
    file = ClusterFile.read(Path(found["outputs"]["cluster"]))
    assert file.ranks == 2 and file.measured is not None
    assert file.links and file.tasks


def trained(ranks: Pools, folder: Path, *settings: str) -> tuple[RunSummary, str]:
    """The same on ranks that have loaded torch already: summary, and what the first one said."""
    first, _ = ranks(2).run(train_on, 2, folder, [SIX, *settings], None)
    assert first.summary is not None, first.refused
    return first.summary, first.said


def test_the_plan_and_the_cluster_serve_again(
    ranks: Pools, planned: tuple[Path, dict[str, Any], str]
) -> None:
    """Neither is measured or searched for a second time; the losses are the same."""
    folder, found, _ = planned
    expected = losses(folder / "run")
    outputs, kept = found["outputs"], folder / "kept"
    kept.mkdir()
    for name in ("plan", "cluster"):
        Path(outputs[name]).rename(kept / f"{name}.json")
    again, said = trained(ranks, folder, "plan.mode=replay", f"plan.file={kept / 'plan.json'}")
    assert again.schedule == found["schedule"] and "measuring the cluster" not in said
    assert again.cluster is not None, "what lies beside the plan prices it"
    assert "cluster.json" in StepFile.read(folder / "run" / "step.json").source
    assert losses(folder / "run") == pytest.approx(expected, rel=1e-5)
    searched, said = trained(ranks, folder, "plan.mode=auto", f"plan.cluster={kept / 'cluster.json'}")
    assert "measuring the cluster" not in said and "warning" not in said
    assert searched.cluster is not None
    (kept / "cluster.json").write_text("{")
    blind, said = trained(ranks, folder, "plan.mode=replay", f"plan.file={kept / 'plan.json'}")
    assert blind.cluster is None and "cluster.json" in said, "a plan needs no prediction"


def test_a_plan_file_that_is_not_there(ranks: Pools, tmp_path: Path) -> None:
    """Every rank finds the same fault, and `penstock train` says it once: see test_train.py."""
    write_config(tmp_path)
    for told in ranks(2).run(train_on, 2, tmp_path, ["plan.mode=replay", "plan.file=nowhere.json"], None):
        assert told.refused is not None and told.said == ""
        assert told.refused[1].startswith("nowhere.json: there is no such file")
