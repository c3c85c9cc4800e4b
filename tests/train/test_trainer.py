"""Whole runs in this process, on one rank: what they leave, how they end, how they go on."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from penstock.autotune import Autotuner
from penstock.checkpoint.folder import complete_checkpoints
from penstock.checkpoint.storage import CheckpointError
from penstock.config import ConfigError, load
from penstock.device import Event, using
from penstock.report import RunSummary
from penstock.topology.join import ALONE
from penstock.train.batches import Batch
from penstock.train.config import RunConfig
from penstock.train.logs import show
from penstock.train.measuring import evaluate
from penstock.train.metrics import StepMetrics, read_metrics
from penstock.train.output import OutputError, OutputFolder
from penstock.train.resume import RunCompleteError
from penstock.train.trainer import Trainer
from penstock.workloads import read_recording
from penstock.writing import LineFile
from tests.support.card import NOTED, CardDevice, Wait, counted, install
from tests.support.ranks import Pools
from tests.support.runs import write_config
from tests.support.training import train_on

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("joined")]

CPU = torch.device("cpu")


def trainer(folder: Path, *overrides: str) -> Trainer:
    """A run of 6 steps, unless overrides say otherwise, in `folder/run`."""
    path = write_config(folder)
    config = load(RunConfig, path, ["parallel.processes=1", "train.steps=6", *overrides])
    return Trainer(config, ALONE, CPU, Autotuner, quiet=True)


def run(folder: Path, *overrides: str) -> RunSummary:
    return trainer(folder, *overrides).run()


def metrics(folder: Path) -> list[StepMetrics]:
    return read_metrics(folder / "run" / "metrics.jsonl")


def saved_steps(folder: Path) -> list[int]:
    return [int(p.name.removeprefix("step-")) for p in complete_checkpoints(folder / "run" / "checkpoints")]


def remove_checkpoint(folder: Path, step: int) -> None:
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{step:08d}")


def events(folder: Path) -> list[dict[str, object]]:
    found = json.loads((folder / "run" / "trace.json").read_text())["traceEvents"]
    return [event for event in found if event["ph"] == "X"]


# ---- on a GPU ----------------------------------------------------------------------------------------------


ON_A_GPU = ("parallel.processes=1", "train.steps=6", "plan.mode=fixed", "schedule.name=flowmoe")


def waits_of_a_step(
    rank: int, folder: Path, settings: Sequence[str]
) -> tuple[dict[Wait, int], int, list[int]]:
    """What the host waits for in the last but one step of a run on a stand-in for a GPU; its waits for
    counts; and how often it waits after it has read the batch of the next step."""
    del rank
    config = load(RunConfig, write_config(folder), [*ON_A_GPU, *settings])
    device, waits, reads = install(), list[Counter[Wait]](), list[int]()
    with using(CardDevice()):
        training = Trainer(config, ALONE, device, Autotuner, quiet=True)
        step, batch = training._step, training.source.stream.batch

        def reading(number: int) -> Batch:
            reads.append(sum(NOTED[0].values()))
            return batch(number)

        def counting(number: int) -> StepMetrics:
            with counted() as found:
                metrics = step(number)
            waits.append(found)
            return metrics

        training._step = counting  # type: ignore[assignment,method-assign]  # counts around it
        training.source.stream.batch = reading  # type: ignore[assignment,method-assign]  # counts before it
        training.run()
    counts = training.config.model.num_layers * training.stack.plan.shape.microbatches
    later = [sum(found.values()) - before for found, before in zip(waits, reads[1:], strict=False)]
    return dict(waits[-2]), counts, later


@pytest.mark.parametrize(
    ("precision", "bounded"), [("float32", ()), ("bfloat16", ()), ("float32", ("moe.bound_factor=2",))]
)
def test_a_step_hardly_makes_the_host_wait(
    cards: Pools, tmp_path: Path, precision: str, bounded: tuple[str, ...]
) -> None:
    """Two waits beside those for the counts of dropless routing, or one for how many bounded rows were
    wanted: for the norm, and before the clock. The run learns as one on CPUs does, of counted rows."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    settings = [f"train.precision={precision}", *bounded]
    ((waits, counts, later),) = cards(1).run(waits_of_a_step, there, settings)
    assert sum(waits.values()) <= (1 if bounded else counts) + 2, waits
    assert len(later) == 5 and min(later) >= 2, "the next batch is read while the device has a step to do"
    run(here, *ON_A_GPU, "train.precision=float32")
    losses, same = ([each.loss for each in metrics(folder)] for folder in (there, here))
    assert losses == pytest.approx(same, rel=1e-2 if precision == "bfloat16" else 1e-5)
    assert {each.repeated_steps for each in metrics(there)} <= ({0, 1, 2} if bounded else {None})
    assert {each.repeated_steps for each in metrics(here)} == {None}


class Timing(CardDevice):
    """Counts the events that measure time."""

    timed = 0

    def event(self, *, timed: bool) -> Event:
        self.timed += timed
        return super().event(timed=timed)


def timed_steps(rank: int, folder: Path) -> list[bool]:
    """Whether each of 24 steps on a stand-in for a GPU measures when its tasks run."""
    del rank
    kept = [
        "parallel.processes=1",
        "train.steps=24",
        "plan.mode=fixed",
        "plan.tuner=none",
        "plan.watch=false",
    ]
    config = load(RunConfig, write_config(folder), [*kept, "schedule.refine_after=0"])
    place, timed, device = install(), list[bool](), Timing()
    with using(device):
        training = Trainer(config, ALONE, place, Autotuner, quiet=True)
        step = training._step

        def noting(number: int) -> StepMetrics:
            device.timed = 0
            metrics = step(number)
            timed.append(device.timed > 0)
            return metrics

        training._step = noting  # type: ignore[assignment,method-assign]  # looks at the events of each
        training.run()
    return timed


def test_only_some_steps_measure_their_tasks(cards: Pools, tmp_path: Path) -> None:
    """One of ten, and the last ones, for their analysis; nothing else needs any. What is kept for the steps
    between is not of one that still warmed up."""
    (timed,) = cards(1).run(timed_steps, tmp_path)
    assert [number for number, each in enumerate(timed) if each] == [0, 2, 12, *range(14, 24)]
    found = [each.compute_s for each in metrics(tmp_path)]
    assert min(found) > 0 and found[0] == found[1] != found[2] == found[11]


# ---- what a run leaves -------------------------------------------------------------------------------------


def test_rank_0_reads_the_text_whatever_its_number_in_its_node(tmp_path: Path) -> None:
    config = load(RunConfig, write_config(tmp_path), ["parallel.processes=1", "train.steps=1"])
    Trainer(config, replace(ALONE, local_rank=1), CPU, Autotuner, quiet=True).run()
    assert len(metrics(tmp_path)) == 1


def test_evaluation_does_not_change_training(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("with", "without")]
    for folder, every in zip(folders, (1, 0), strict=True):
        folder.mkdir()
        run(folder, f"train.eval_every={every}", "model.dropout=0.2")
    often, seldom = ([m.loss for m in metrics(folder)] for folder in folders)
    assert often == seldom


def test_the_metrics_know_every_checkpoint(tmp_path: Path) -> None:
    """A checkpoint comes behind its line: where saving fails, the line is there."""
    (tmp_path / "file").write_text("mine")
    stopped = trainer(tmp_path, "train.checkpoint_every=4")
    stopped.checkpoints.folder = tmp_path / "file"
    with pytest.raises(CheckpointError, match="saving the checkpoint of step 4"):
        stopped.run()
    assert [m.step for m in metrics(tmp_path)] == [1, 2, 3, 4]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("schedule", ["sequential", "flowmoe", "penstock"])
def test_one_process_trains_evaluates_saves_and_communicates_nothing(tmp_path: Path, schedule: str) -> None:
    """Evaluates and saves when it is due and at the end; every step has its line."""
    due = ("train.eval_every=4", "train.checkpoint_every=2", "train.keep_checkpoints=2")
    summary = run(tmp_path, f"schedule.name={schedule}", "train.steps=5", *due)
    found = metrics(tmp_path)
    assert [m.step for m in found] == [1, 2, 3, 4, 5]
    assert all(math.isfinite(m.loss) and math.isfinite(m.grad_norm) for m in found)
    assert (summary.steps, summary.processes, summary.interrupted) == (5, 1, False)
    assert summary.skipped_steps == 0 and "not finite" not in summary.to_text()
    assert "skipped" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert (summary.first_loss, summary.last_loss) == (found[0].loss, found[-1].loss)
    assert load(RunConfig, tmp_path / "run" / "config.toml").train.steps == 5
    evaluated = {m.step: m.eval_loss for m in found if m.eval_loss is not None}
    assert list(evaluated) == [4, 5] and all(math.isfinite(loss) for loss in evaluated.values())
    assert summary.eval_loss == evaluated[5]
    assert saved_steps(tmp_path) == [4, 5]
    assert summary.checkpoint == str(tmp_path / "run" / "checkpoints" / "step-00000005")
    assert summary.communication_s == summary.exposed_communication_s == 0
    assert {(m.communication_s, m.exposed_communication_s) for m in found} == {(0.0, 0.0)}


# ---- the trace ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refine_after", [0, 3, 6, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 5, 9))]
)
def test_a_trace_wherever_the_order_is_frozen_again(tmp_path: Path, refine_after: int) -> None:
    """Also behind the very last step, where nothing has run under a new order, and one step before it."""
    summary = run(tmp_path, f"schedule.refine_after={refine_after}")
    steps = {event["args"]["step"] for event in events(tmp_path)}  # type: ignore[index]  # JSON
    assert steps == ({0, 6} if refine_after == 5 else {0, 5, 6})  # 0: simulated
    assert 0 < summary.overlap_efficiency <= 1
    assert summary.simulated_iteration_s is not None and summary.simulated_iteration_s > 0
    assert (tmp_path / "run" / "tasks.csv").exists()


def test_a_run_of_one_step(tmp_path: Path) -> None:
    summary = run(tmp_path, "train.steps=1", "schedule.refine_after=1")
    assert summary.steps == 1
    assert events(tmp_path)


def test_no_trace_where_none_is_wanted(tmp_path: Path) -> None:
    summary = run(tmp_path, "output.trace_steps=0")
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not {"trace.json", "tasks.csv"} & left and "step.json" in left
    assert summary.trace is None
    assert 0 < summary.overlap_efficiency <= 1


def test_a_longer_trace(tmp_path: Path) -> None:
    run(tmp_path, "output.trace_steps=4", "schedule.refine_after=0")
    steps = {event["args"]["step"] for event in events(tmp_path)}  # type: ignore[index]  # JSON
    assert steps == {0, 3, 4, 5, 6}


# ---- going on ----------------------------------------------------------------------------------------------


def test_resume_without_a_checkpoint_starts_anew_only_when_asked_to(tmp_path: Path) -> None:
    run(tmp_path)
    remove_checkpoint(tmp_path, 6)
    with pytest.raises(ConfigError, match=r"contains no checkpoint to continue from\..*train\.resume=auto"):
        run(tmp_path, "train.resume=true")
    assert not (tmp_path / "run.1").exists()
    run(tmp_path, "train.resume=auto")
    assert [m.step for m in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()  # the earlier run is kept all the same


def test_what_a_killed_save_has_left_is_gone_before_the_next(tmp_path: Path) -> None:
    run(tmp_path, "train.checkpoint_every=3")
    remove_checkpoint(tmp_path, 6)
    left = tmp_path / "run" / "checkpoints" / ".unfinished-00000006"
    left.mkdir()
    continued = trainer(tmp_path, "train.resume=true")

    def look(*_: object) -> None:
        seen.append(left.exists())

    seen: list[bool] = []
    continued.on_step = look
    continued.run()
    assert seen == [False] * 3


def test_a_finished_run_needs_more_steps(tmp_path: Path) -> None:
    run(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=r"has already done 6 steps.*more than 6") as caught:
        run(tmp_path, "train.resume=auto", "train.steps=5")
    assert caught.value.key == "train.steps"
    for resume in ("auto", "true"):
        with pytest.raises(RunCompleteError, match="step-00000006"):
            run(tmp_path, f"train.resume={resume}")
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, "train.resume=auto", "moe.top_k=1")
    assert caught.value.key == "moe.top_k"
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before
    assert run(tmp_path, "train.resume=true", "train.steps=7").steps == 7
    assert [m.step for m in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("resume", ["auto", "true"])
def test_checkpoints_that_cannot_be_looked_for_are_not_taken_for_none(tmp_path: Path, resume: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("checkpoints")  # to itself: as a disk that is not there
    with pytest.raises(
        ConfigError, match=r"checkpoints, where checkpoints are, cannot be read \(Too many"
    ) as caught:
        run(tmp_path, f"train.resume={resume}")
    assert caught.value.key == "output.dir"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


def test_other_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, "train.resume=true", "train.steps=9", "train.seed=1")
    assert caught.value.key == "train.seed"
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("damage", ["line", "folder"])
def test_a_record_that_cannot_be_continued_is_refused(tmp_path: Path, damage: str) -> None:
    run(tmp_path)
    record = tmp_path / "run" / "metrics.jsonl"
    text, words = record.read_text(), "line 7: not a training step .* move the file away"
    record.write_text(text + "{}\n")
    if damage == "folder":
        record.unlink()
        record.mkdir()
        words = "is a folder, not a file"
    kept = [tmp_path / "run" / name for name in ("config.toml", "summary.json")]
    before = [path.read_bytes() for path in kept]
    with pytest.raises(ConfigError, match=words) as caught:
        run(tmp_path, "train.resume=true", "train.steps=7")
    assert str(record) in str(caught.value)
    assert [path.read_bytes() for path in kept] == before
    if damage == "line":
        record.write_text(text)
        kept[1].unlink()
        kept[1].mkdir()
        with pytest.raises(OutputError, match=r"summary\.json cannot be written"):
            run(tmp_path, "train.resume=true", "train.steps=7")
        kept[1].rmdir()
        assert run(tmp_path, "train.resume=true", "train.steps=7").steps == 7


# ---- what is removed while a run goes on -------------------------------------------------------------------


def said_while_losing(folder: Path, lose: Callable[[Path], object], *overrides: str) -> list[str]:
    """What a run says whose folder `lose` changes after its third step."""
    said: list[str] = []
    losing = trainer(folder, *overrides)

    def after(step: int, _: object) -> None:
        if step == 3:
            lose(folder / "run")

    losing.on_step = after
    show(said.append)
    losing.run()
    return said


def move_away(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def another_run(folder: Path) -> None:
    """One that has ended stands in the place of this one."""
    move_away(folder)
    shutil.copytree(folder.with_name("elsewhere"), folder)
    (folder / "metrics.jsonl").write_text("of another run")


LOST: dict[str, Callable[[Path], object]] = {
    "folder": shutil.rmtree,
    "moved": move_away,
    "replaced": another_run,
    "lock": lambda folder: (folder / ".lock").unlink(),
    "metrics": lambda folder: (folder / "metrics.jsonl").unlink(),
    "routing": lambda folder: (folder / "routing.jsonl").unlink(),
    "tensorboard": lambda folder: shutil.rmtree(folder / "tensorboard"),
}


@pytest.mark.parametrize("what", LOST)
def test_what_is_removed_in_mid_run_is_made_again_and_said(tmp_path: Path, what: str) -> None:
    settings = ("output.routing=true", "output.tensorboard=true", "train.keep_checkpoints=9")
    said = said_while_losing(tmp_path, LOST[what], *settings)
    assert len([line for line in said if "removed or moved away" in line]) == 1, said
    run_ = tmp_path / "run"
    assert [m.step for m in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert read_recording(run_ / "routing.jsonl").steps == (1, 2, 3, 4, 5, 6)
    assert saved_steps(tmp_path) == [3, 6], "what had been saved may be gone, so it is saved again at once"
    assert {"config.toml", "summary.json", "trace.json", ".lock"} <= {path.name for path in run_.iterdir()}
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(run_ / "tensorboard")).Reload()
    assert [each.step for each in events.Scalars("loss/train")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run.1").exists() == (what == "replaced")
    if what == "replaced":
        assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == "of another run"


def lose_folder(losing: Trainer, step: int) -> None:
    if step == 3 and losing.leader:
        shutil.rmtree(losing.config.output.dir)


def test_all_ranks_save_where_the_folder_was_removed(ranks: Pools, tmp_path: Path) -> None:
    write_config(tmp_path)
    told = ranks(2).run(train_on, 2, tmp_path, ["train.steps=5"], lose_folder)
    assert all(each.summary is not None for each in told), told
    assert [m.step for m in metrics(tmp_path)] == [1, 2, 3, 4, 5] and saved_steps(tmp_path) == [3, 5]


def test_a_folder_that_another_run_has_taken_is_left_to_it(tmp_path: Path) -> None:
    with ExitStack() as others:

        def take(folder: Path) -> None:
            move_away(folder)
            others.enter_context(OutputFolder(folder, keep=False))

        with pytest.raises(ConfigError, match="another run is writing there") as caught:
            said_while_losing(tmp_path, take)
        assert caught.value.key == "output.dir"
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_newest_checkpoint_that_is_gone_is_said(tmp_path: Path) -> None:
    settings = ("train.checkpoint_every=2",)
    said = said_while_losing(tmp_path, lambda folder: shutil.rmtree(folder / "checkpoints"), *settings)
    assert [line for line in said if "step-00000002" in line and "removed" in line]
    assert saved_steps(tmp_path) == [4, 6]


@pytest.mark.parametrize("name", ["metrics.jsonl", "routing.jsonl", "tensorboard/events", "summary.json"])
def test_a_full_disk_ends_the_run_with_one_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A device that is always full stands for a disk that is. What was recorded before stays."""

    def fill(folder: Path) -> None:
        del folder
        full = os.open("/dev/full", os.O_WRONLY)
        for record in full_run.output.records:
            if isinstance(record, LineFile) and f"run/{name}" in str(record.path):
                os.dup2(full, record._file.fileno())
                monkeypatch.setattr(LineFile, "is_there", True)
        os.close(full)
        if name == "summary.json":
            monkeypatch.setattr("penstock.report.summary.write_json", no_room)

    full_run = trainer(tmp_path, "output.routing=true", "output.tensorboard=true")
    full_run.on_step = lambda step, _: fill(tmp_path) if step == 3 else None
    with pytest.raises(OutputError, match="No space left on device") as caught:
        full_run.run()
    assert str(tmp_path / "run" / name) in str(caught.value)
    kept = {"metrics.jsonl": 2, "routing.jsonl": 2, "tensorboard/events": 3, "summary.json": 6}
    assert len(metrics(tmp_path)) == kept[name]


def no_room(*given: object) -> None:
    del given
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---- ending early ------------------------------------------------------------------------------------------


def test_a_request_to_stop_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while the loop is under way, from a line being shown."""
    stopped = trainer(tmp_path, "train.steps=50")
    update = stopped.progress.update

    def interrupt(metrics: StepMetrics) -> None:
        update(metrics)
        if metrics.step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(stopped.progress, "update", interrupt)
    before = signal.getsignal(signal.SIGTERM)
    summary = stopped.run()
    assert signal.getsignal(signal.SIGTERM) is before
    assert (summary.steps, summary.interrupted) == (3, True)
    assert saved_steps(tmp_path) == [3]
    assert metrics(tmp_path)[-1].eval_loss is not None


def test_a_folder_that_cannot_be_written_to_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'output\.dir = "/proc/x"'):
        trainer(tmp_path, "output.dir=/proc/x")


@pytest.mark.usefixtures("joined")
def test_a_batch_without_a_label_does_not_count(tmp_path: Path) -> None:
    """As of documents of one token each, where they are kept apart."""
    run = trainer(tmp_path)
    (some,) = run.source.stream.held_out_batches(1)
    none = replace(some, labels_BL=torch.full_like(some.labels_BL, -100))
    expected = evaluate(run.stack, [some])
    found = evaluate(run.stack, [some, none])
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.noise is None
    with pytest.raises(ConfigError, match="no token is to be predicted in 2 batches of held-out text"):
        evaluate(run.stack, [none, none])
