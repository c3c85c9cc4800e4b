"""`plan.source=auto` as a user runs it: measured, chosen, explained, saved and replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cost import ClusterFile
from tests.support.runs import losses, run, write_config

pytestmark = pytest.mark.slow

TWO = ("parallel.processes=2", "parallel.timeout_s=60", "train.steps=6", "train.resume=false")
LABELS = ("Plan ", "Time ", "Binding ", "Next ", "Change ")


def result_of(config: Path, *settings: str) -> tuple[dict[str, Any], str]:
    """JSON of a run and what it said beside it."""
    done = run("train", config, "--json", *TWO, *settings)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)  # exactly one object, whatever libraries print
    return found, done.stderr


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("plan")
    found, said = result_of(write_config(folder), "plan.source=auto", "plan.profile_s=3")
    return folder, found, said


def test_it_says_what_was_chosen_and_why_in_five_lines(planned: tuple[Path, dict[str, Any], str]) -> None:
    _, _, said = planned
    lines = said.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Plan "))
    assert all(line.startswith(label) for line, label in zip(lines[first:], LABELS, strict=False))
    assert "measuring the cluster" in said


def test_the_cluster_was_measured_here(planned: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = planned
    file = ClusterFile.read(Path(found["outputs"]["cluster"]))
    assert file.ranks == 2 and file.measured is not None
    assert file.links and file.tasks


def test_the_plan_and_the_cluster_serve_again(planned: tuple[Path, dict[str, Any], str]) -> None:
    """Neither is measured or searched for a second time; the losses are the same."""
    folder, found, _ = planned
    expected = losses(folder / "run")
    outputs, kept = found["outputs"], folder / "kept"
    kept.mkdir()
    for name in ("plan", "cluster"):
        Path(outputs[name]).rename(kept / f"{name}.json")
    config = folder / "tiny.toml"
    again, said = result_of(config, f"plan.source={kept / 'plan.json'}")
    assert again["schedule"] == found["schedule"] and "measuring the cluster" not in said
    assert again["outputs"]["cluster"] is None
    assert losses(folder / "run") == pytest.approx(expected, rel=1e-5)
    searched, said = result_of(config, "plan.source=auto", f"plan.cluster={kept / 'cluster.json'}")
    assert "measuring the cluster" not in said and "warning" not in said
    assert searched["outputs"]["cluster"] is not None


def test_a_given_schedule_leaves_no_plan(tmp_path: Path) -> None:
    found, said = result_of(write_config(tmp_path))
    assert (found["outputs"]["plan"], found["outputs"]["cluster"]) == (None, None)
    assert not any(line.startswith("Plan ") for line in said.splitlines())


def test_a_plan_file_that_is_not_there(tmp_path: Path) -> None:
    done = run("train", write_config(tmp_path), *TWO, "plan.source=nowhere.json")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1  # every rank finds the same fault; once is enough
    assert done.stderr.startswith("penstock: nowhere.json: cannot be read")
