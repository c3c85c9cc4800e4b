"""Going on: from the newest whole checkpoint, with the same model, by the same plan, or not at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.autotune import Autotuner
from penstock.checkpoint.folder import RECORD, complete_checkpoints, digest_of, read_sums, write_sums
from penstock.checkpoint.storage import CheckpointError
from penstock.config import ConfigError, load
from penstock.plan import PlanFile
from penstock.trace.step_file import StepFile
from penstock.train.config import RunConfig
from penstock.train.logs import telling
from penstock.train.trainer import Trainer
from tests.support.ranks import Pools
from tests.support.runs import refused, write_config
from tests.support.training import folder_of, train_on
from tests.train.test_trainer import metrics, run, saved_steps, trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("joined")]


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "run" / "checkpoints" / f"step-{step:08d}"


def damage(folder: Path, step: int, pattern: str = "shard-*") -> None:
    for path in checkpoint(folder, step).glob(pattern):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory, joined: None) -> Path:
    """A run with checkpoints of steps 2, 4 and 6."""
    assert joined is None, "this process is a rank by then"
    folder = tmp_path_factory.mktemp("six")
    run(folder, "train.checkpoint_every=2", "train.keep_checkpoints=3")
    return folder


@pytest.fixture
def copied(six_steps: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged and continued."""
    shutil.copytree(six_steps / "run", tmp_path / "run")
    return tmp_path


def said_by(folder: Path, *overrides: str) -> tuple[list[str], Trainer]:
    """What a run that is continued says, and the run itself, at its end."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.train.progress.Progress.say", lambda self, message: said.append(message))
        going_on = trainer(folder, "train.resume=true", *overrides)
        going_on.run()
    return said, going_on


# ---- damaged checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["shard-*", "SHA256SUMS", "checkpoint.json", "plan.json"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(copied: Path, pattern: str) -> None:
    expected = [(m.step, m.loss) for m in metrics(copied)]
    damage(copied, 6, pattern)
    said, _ = said_by(copied, "train.steps=7")
    text = "\n".join(said)
    assert f"reading {checkpoint(copied, 6)} failed" in text and "trying the previous checkpoint" in text
    assert f"continuing from {checkpoint(copied, 4)}" in text
    assert [(m.step, m.loss) for m in metrics(copied)][:4] == expected[:4]
    assert saved_steps(copied) == [4, 7]
    assert (checkpoint(copied, 6).parent / "damaged-step-00000006").is_dir(), "it is kept, and counts no more"


def test_what_lacks_its_checksums_is_named_and_kept(copied: Path) -> None:
    """The list that is written last makes it a checkpoint; the steps until then are not lost unsaid."""
    (checkpoint(copied, 6) / "SHA256SUMS").unlink()
    said, _ = said_by(copied, "train.steps=7")
    text = "\n".join(said)
    assert f"reading {checkpoint(copied, 6)} failed" in text and "SHA256SUMS" in text
    assert f"continuing from {checkpoint(copied, 4)}" in text
    assert (checkpoint(copied, 6).parent / "damaged-step-00000006" / "checkpoint.json").is_file()
    for step in (4, 7):
        (checkpoint(copied, step) / "SHA256SUMS").unlink()
    with pytest.raises(ConfigError) as caught:
        run(copied, "train.resume=auto", "train.steps=9")
    assert caught.value.key == "train.resume" and "step-00000007" in str(caught.value)


def test_where_all_are_damaged_nothing_is_started_and_nothing_changed(copied: Path) -> None:
    for step in (2, 4, 6):
        damage(copied, step)
    before = sorted(path for path in (copied / "run").rglob("*") if path.name != ".lock")
    for resume in ("true", "auto"):
        with pytest.raises(ConfigError, match="none of the checkpoints") as caught:
            run(copied, f"train.resume={resume}", "train.steps=9")
        assert caught.value.key == "train.resume" and "Restore one" in str(caught.value)
    assert sorted(path for path in (copied / "run").rglob("*") if path.name != ".lock") == before


def test_numbers_that_are_not_finite_count_as_damage(copied: Path) -> None:
    path = next(checkpoint(copied, 6).glob("model-*"))
    with safe_open(path, framework="pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, path, about)
    write_sums(path.parent, {**read_sums(path.parent), path.name: digest_of(path)})
    said, _ = said_by(copied, "train.steps=7")
    assert any("is not finite: trying the previous checkpoint" in line for line in said), said
    assert f"continuing from {checkpoint(copied, 4)}" in said


def test_a_file_that_may_not_be_read_is_no_damage(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back by hundreds of steps would be a high price for a wrong permission."""

    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("penstock.checkpoint.folder.digest_of", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        run(copied, "train.resume=true", "train.steps=9")


# ---- hostile checkpoints -----------------------------------------------------------------------------------


class Bomb:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_a_crafted_checkpoint_runs_nothing(copied: Path) -> None:
    """Pickles in the place of all files, under sums that fit, and as torch's own checkpoints have one."""
    witness = copied / "witness"
    crafted = checkpoint(copied, 6)
    for path in (*crafted.iterdir(), crafted / ".metadata"):
        if path.name != "SHA256SUMS":
            path.write_bytes(pickle.dumps(Bomb(f"touch {witness}")))
    write_sums(crafted, {name: digest_of(crafted / name) for name in read_sums(crafted)})
    said, _ = said_by(copied, "train.steps=7")
    assert not witness.exists()
    assert f"continuing from {checkpoint(copied, 4)}" in said


@pytest.mark.parametrize("make", [Path.symlink_to, Path.hardlink_to])
def test_a_run_writes_into_no_file_that_is_not_its_own(copied: Path, make: Callable[..., None]) -> None:
    """Every file that a run leaves or makes is a link to a file elsewhere."""
    others = copied / "others"
    others.mkdir()
    left = {path.name for path in (copied / "run").iterdir() if path.is_file()} - {".lock"}
    assert {"metrics.jsonl", "trace.json", "tasks.csv", "config.toml", "summary.json", "step.json"} <= left
    for name in (*left, "plan.json", "routing.jsonl", "failure-rank0.txt"):
        path, other = copied / "run" / name, others / name
        other.write_bytes(path.read_bytes() if path.exists() else b'{"step": 1, "mine": []}\n')
        path.unlink(missing_ok=True)
        make(path, other)
    before = {path: path.read_bytes() for path in others.iterdir()}
    run(copied, "train.resume=true", "train.steps=8", "output.routing=true", "optimizer.lr=0.001")
    assert {path: path.read_bytes() for path in others.iterdir()} == before
    assert [m.step for m in metrics(copied)][-1] == 8


# ---- another run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("override", ["model.num_heads=4", "moe.top_k=1", "moe.capacity_factor=2"])
def test_another_model_is_refused_before_anything_is_written(copied: Path, override: str) -> None:
    before = {path: path.read_bytes() for path in (copied / "run").iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match="was trained with") as caught:
        run(copied, "train.resume=true", "train.steps=9", override)
    assert caught.value.key == override.partition("=")[0]
    after = {path: path.read_bytes() for path in (copied / "run").iterdir() if path.is_file()}
    assert after == before


def test_a_checkpoint_without_a_size_of_its_model_is_refused(copied: Path) -> None:
    path = checkpoint(copied, 6)
    record = json.loads((path / RECORD).read_text())
    del record["settings"]["moe"]["top_k"]
    (path / RECORD).write_text(json.dumps(record))
    write_sums(path, {**read_sums(path), RECORD: digest_of(path / RECORD)})
    with pytest.raises(ConfigError) as caught:
        run(copied, "train.resume=true", "train.steps=9")
    assert caught.value.key.endswith(f"{RECORD}: settings.moe.top_k")


def test_what_may_change_is_listed(copied: Path) -> None:
    before = (copied / "run" / "config.toml").read_text()
    said, _ = said_by(copied, "train.steps=8", "optimizer.lr=0.001")
    (line,) = (line for line in said if line.startswith("changed since step-00000006: "))
    assert "; optimizer.lr 0.003 -> 0.001; train.steps 6 -> 8" in line
    assert (copied / "run" / "config-until-step-00000006.toml").read_text() == before
    assert load(RunConfig, copied / "run" / "config.toml").optimizer.lr == 0.001


def test_what_is_refused_cuts_no_records_off(copied: Path) -> None:
    checkpoint(copied, 6).rename(copied / "gone")  # the one before is resumed
    metrics = copied / "run" / "metrics.jsonl"
    before = metrics.read_bytes()
    (copied / "run" / "config.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as caught:
        run(copied, "train.resume=true", "train.steps=9")
    assert caught.value.key.endswith("config.toml")
    assert metrics.read_bytes() == before


def test_nothing_to_resume_is_refused_before_any_rank_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "train", write_config(tmp_path), "train.resume=true")
    assert (
        "train.resume = true" in error and "contains no checkpoint" in error and "train.resume=auto" in error
    )
    assert not (tmp_path / "run").exists()


# ---- the plan ----------------------------------------------------------------------------------------------

MANY = ("schedule.name=penstock", "schedule.microbatches=4", "data.batch_per_device=8", "train.steps=12")
"""Sums of four microbatches, so that their order shows in the last bits; it is frozen from measured times."""
ELSEWHERE = "plan.cluster=fsmoe-testbed-b"
"""A cluster that was not measured here."""


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        pytest.param("fixed", (), marks=pytest.mark.soak),
        ("auto", ()),
        ("fixed", ("moe.bound_factor=1.5", "train.eval_every=3", "model.dropout=0.1", ELSEWHERE)),
    ],
)
def test_the_very_same_losses_where_the_plan_is_continued(
    tmp_path: Path, mode: str, more: tuple[str, ...]
) -> None:
    folder = folder_of(tmp_path, "one", 1)
    settings = [*MANY, "train.checkpoint_every=7", "plan.watch=false", *more]
    settings += [f"plan.mode={mode}", f"plan.cluster={folder / 'cluster.json'}"] if mode == "auto" else []
    run(folder, *settings)
    expected = [(m.step, m.loss, m.grad_norm, m.plan) for m in metrics(folder)]
    shutil.rmtree(checkpoint(folder, 12))
    said, _ = said_by(folder, *settings)
    assert any("continued from step-00000007" in line for line in said), said
    assert [(m.step, m.loss, m.grad_norm, m.plan) for m in metrics(folder)] == expected


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ((), ("schedule.name=sequential",), "because settings of [schedule] have changed: losses"),
        (("schedule.refine_after=9",), ("schedule.refine_after=9",), "because it was not final yet: losses"),
        ((), ("data.batch_per_device=2", "parallel.processes=1"), ""),
    ],
)
def test_another_plan_is_said_to_be_one(
    tmp_path: Path, first: tuple[str, ...], then: tuple[str, ...], words: str
) -> None:
    run(tmp_path, "train.steps=5", *first)
    if not words:
        with pytest.raises(ConfigError, match=r"batch_per_device x \(processes / tp_size\)"):
            run(tmp_path, "train.resume=true", "train.steps=6", *then)
        return
    said, _ = said_by(tmp_path, "train.steps=6", *then)
    (line,) = (line for line in said if "instead of continuing" in line)
    assert words in line and "up to rounding" in line


def test_a_replayed_file_counts_as_it_is_by_now(tmp_path: Path) -> None:
    """It may be the copy that the run itself writes, which would undo an edit that is not heeded."""
    run(tmp_path, *MANY[:3], "train.steps=2", "schedule.refine_after=0", ELSEWHERE)
    path = tmp_path / "run" / "plan.json"
    replayed = (MANY[2], "plan.mode=replay", f"plan.file={path}")

    def went_on(steps: int) -> str:
        said, _ = said_by(tmp_path, *replayed, f"train.steps={steps}")
        return "\n".join(said)

    assert "settings of [plan] have changed" in went_on(3) and "continued from" in went_on(4)
    edited = json.loads(path.read_text())
    edited["schedule"] = [line.replace(" ", "  ") for line in edited["schedule"]]
    path.write_text(json.dumps(edited))
    assert "continued from" in went_on(5), "it is the same order"
    edited["schedule"], edited["choice"] = None, edited["choice"] | {"microbatches": 2}
    path.write_text(json.dumps(edited))
    said = went_on(6)
    assert "holds another plan by now" in said and "2 microbatches" in said
    assert PlanFile.read(path).choice.microbatches == 2
    path.unlink()
    assert "continued from" in went_on(7)


def test_a_setting_added_since_the_checkpoint_had_its_default(tmp_path: Path) -> None:
    run(tmp_path, "train.steps=5")
    went_on = trainer(tmp_path, "train.resume=true", "train.steps=6")
    assert went_on.resumption is not None and went_on.resumption.record.settings is not None
    settings = dict(went_on.resumption.record.settings)
    settings["schedule"] = {name: held for name, held in settings["schedule"].items() if name != "more"}
    before = replace(went_on.resumption, record=replace(went_on.resumption.record, settings=settings))
    said: list[str] = []
    config = load(RunConfig, tmp_path / "tiny.toml", ["parallel.processes=1", "train.steps=6"])
    with telling(said.append):
        Autotuner(config, went_on.stack.machinery, before)
    assert "continued from step-00000005" in said[0]


def test_two_ranks_fall_back_and_continue_together(ranks: Pools, tmp_path: Path) -> None:
    write_config(tmp_path)
    settings = ["train.steps=6", "train.checkpoint_every=5", *MANY[:3]]
    first, _ = ranks(2).run(train_on, 2, tmp_path, settings, None)
    assert first.summary is not None, first.said
    expected = [(m.step, m.loss) for m in metrics(tmp_path)]
    damage(tmp_path, 6, "shard-00002*")
    again = ranks(2).run(train_on, 2, tmp_path, [*settings, "train.resume=true"], None)
    assert all(told.summary is not None for told in again), again[0].said
    assert "shard-00002.safetensors has changed" in again[0].said
    assert "continued from step-00000005" in again[0].said
    assert [(m.step, m.loss) for m in metrics(tmp_path)] == expected
    assert [m.step for m in metrics(tmp_path) if m.resumed] == [6]
    assert again[0].summary is not None and again[0].summary.first_step == 6
    assert StepFile.read(tmp_path / "run" / "step.json").predicted is None, "nobody knows the cluster"
    assert len(complete_checkpoints(tmp_path / "run" / "checkpoints")) == 2


def test_the_saved_plan_is_checked_like_any_other(copied: Path) -> None:
    """Checksums keep it from damage, and whoever writes both cannot make ranks meet in different orders."""
    settled = trainer(copied, "train.resume=true", "train.steps=9")
    assert settled.resumption is not None
    record = replace(settled.resumption.record, plan_settled=True)
    plan = settled.resumption.path / "plan.json"
    table = json.loads(plan.read_text())
    table["schedule"] = table["schedule"][:1]
    plan.write_text(json.dumps(table))
    damaged = replace(settled.resumption, record=record)
    said: list[str] = []
    with telling(said.append):
        pilot = Autotuner(settled.config, settled.stack.machinery, damaged)
    assert not pilot.settled and pilot.plan.schedule.text()
    assert "instead of continuing" in said[0]
