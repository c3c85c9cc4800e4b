"""A searched plan is tried, told and saved; when the network changes, the run plans for what there is."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from tests.scenarios.support import DONE, Trained, check_losses, config_in, on_ranks, train, wait_for_steps
from tests.support.launched import start_launcher
from tests.support.patience import HANG_S
from tests.support.runs import Running, metrics_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces")]

FAST, SLOW = "2gbit", "100mbit"
"""Of the link between both machines: a step sends five megabytes over it."""

MODEL = ("model.hidden_size=256", "optimizer.min_lr_ratio=1", "optimizer.lr=3e-4")
PLANNED = (
    "plan.mode=auto",
    "plan.trials=2",
    "plan.profile_s=0.2",
    "plan.budget=0.01",
    "plan.drift_steps=4",
    "plan.drift_threshold=0.5",
    "schedule.refine_after=2",
    "placement.samples=none",
    "placement.experts=none",
    "train.steps=100000",
)
TRIAL, AFTER_TRIALS = 6, 12
"""Steps of each of two trials, as docs/training.md says."""
CHANGES = 4
"""Of the rate, down and up again, before a run counts as one that takes no notice."""
USUAL = 30
"""Steps until the usual time of a step is known; as many more wait for an answer to a change."""


def emulated(*words: str) -> dict[str, Any]:
    """Return what `penstock emulate` says in JSON."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["emulate", *words, "--json"]) == DONE
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def cluster_of(process: Running) -> str:
    """Return the name of the cluster that a command has made for itself."""
    listed = emulated("list")["clusters"]
    return next(str(each["id"]) for each in listed if each["owner_pid"] == process.pid)


def replanned(process: Running, folder: Path, before: Mapping[str, bytes]) -> bool:
    """Wait until a run has planned and measured again, or for so many steps that it will not."""
    last = len(metrics_of(folder)) + USUAL

    def again() -> bool:
        return all((folder / name).read_bytes() != content for name, content in before.items())

    wait_until(lambda: again() or len(metrics_of(folder)) >= last, process)
    return again()


def change_until_replanned(process: Running, folder: Path) -> None:
    """Change the rate of the link, to and fro: on a busy machine a change may be taken for the usual."""
    before = {name: (folder / name).read_bytes() for name in ("plan.json", "cluster.json")}
    cluster = cluster_of(process)
    for rate in (SLOW, FAST) * CHANGES:
        emulated("rate", cluster, "--inter-rate", rate)
        if replanned(process, folder, before):
            return
    pytest.fail("the run has taken no notice of any change")


def test_a_plan_is_tried_told_and_changed(tmp_path: Path) -> None:
    errors, out, folder = tmp_path / "errors", tmp_path / "out", tmp_path / "run"
    words = ("--json", "--emulate", "2x1", "--inter-rate", FAST, *on_ranks(2), *MODEL, *PLANNED)
    process = start_launcher("train", config_in(tmp_path), *words, stderr=errors, stdout=out)
    wait_for_steps(process, folder, USUAL)
    tried = [line["plan"] for line in metrics_of(folder)[:AFTER_TRIALS]]
    assert tried == [tried[0]] * TRIAL + [tried[-1]] * TRIAL and tried[0] != tried[-1]
    change_until_replanned(process, folder)
    wait_for_steps(process, folder, len(metrics_of(folder)) + 1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=HANG_S) == DONE, errors.read_text()
    found = Trained(folder, json.loads(out.read_text()), errors.read_text())
    assert f" {found.found['schedule']}" in found.said
    plan = found.found["outputs"]["plan"]
    given = (
        "plan.mode=replay",
        f"plan.file={plan}",
        f"train.steps={found.found['steps']}",
        "parallel.ranks_per_node=1",
    )
    fixed = train(tmp_path, 2, *MODEL, *given, name="fixed")
    assert {line["plan"] for line in fixed.metrics} == {found.metrics[-1]["plan"]}
    first = range(1, AFTER_TRIALS + 1)
    check_losses(
        {step: found.losses[step] for step in first}, {step: fixed.losses[step] for step in first}, 1e-5
    )
    # How many steps there are until another plan is taken is up to the machine, and rounding grows with them.
    check_losses(found.losses, fixed.losses, 1e-3)
