"""What a run writes down."""

from __future__ import annotations

import json
import math
import os
import tempfile
import tracemalloc
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.train.history import TYPICAL, History
from penstock.train.metrics import (
    ID_FILE,
    JsonLines,
    MetricsWriter,
    StepMetrics,
    TensorBoard,
    WeightsAndBiases,
    _id_in,
    read_metrics,
)
from tests.support.metrics import EXAMPLE, step
from tests.support.metrics import step as step_metrics
from tests.support.runs import refused, write_config

LAYERS = (1, 3)
"""Numbers of the layers that have experts."""

finite = st.floats(allow_nan=False, allow_infinity=False)
records = st.builds(
    StepMetrics,
    step=st.integers(1, 10**9),
    loss=finite,
    learning_rate=finite,
    grad_norm=finite,
    iteration_s=finite,
    tokens_per_s=finite,
    exposed_communication_s=finite,
    communication_s=finite,
    compute_s=finite,
    tokens_per_expert_max_over_mean=finite,
    eval_loss=st.none() | finite,
    rank_rows_max_over_mean=st.none() | st.tuples(finite, finite),
    rows_dropped=st.none() | st.tuples(finite, finite),
    repeated_steps=st.none() | st.integers(0, 10**9),
    model_flops_utilisation=st.none() | finite,
    peak_memory_bytes=st.none() | st.integers(0, 2**62),
)


def record(folder: Path, numbers: range, resume_step: int) -> Path:
    with closing(JsonLines(folder, resume_step=resume_step)) as writer:
        for number in numbers:
            writer.write(step(number))
    return folder / "metrics.jsonl"


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("exposed_s", "total_s", "hidden"), [(0.0, 2.0, 1.0), (0.5, 2.0, 0.75), (0.0, 0.0, 1.0)]
)
def test_hidden_communication(exposed_s: float, total_s: float, hidden: float) -> None:
    metrics = replace(EXAMPLE, exposed_communication_s=exposed_s, communication_s=total_s)
    assert metrics.hidden_communication == hidden


@given(records)
def test_a_step_is_read_as_it_was_written(metrics: StepMetrics) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with closing(JsonLines(Path(folder), resume_step=0)) as writer:
            writer.write(metrics)
        assert read_metrics(Path(folder, "metrics.jsonl")) == [metrics]


def test_a_number_that_is_not_finite_is_written_as_null_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run" / "metrics.jsonl"
    with closing(JsonLines(path.parent, resume_step=0)) as writer:
        writer.write(replace(EXAMPLE, loss=math.nan, grad_norm=math.inf))
        line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line["loss"] is None
    assert line["grad_norm"] is None
    assert math.isnan(read_metrics(path)[0].loss)


@given(st.integers(0, 12), st.integers(0, 14))
def test_no_step_appears_twice_after_resuming(written: int, resume_step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = record(Path(folder), range(1, written + 1), resume_step=0)
        kept = [*range(1, min(written, resume_step) + 1)]
        record(Path(folder), range(resume_step + 1, resume_step + 4), resume_step)
        assert steps_in(path) == [*kept, *range(resume_step + 1, resume_step + 4)]
        assert [entry.name for entry in Path(folder).iterdir()] == ["metrics.jsonl"]


def test_every_metric_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    names = [field.name for field in fields(StepMetrics)]
    known = {name for name in names if f"`{name}`" in text or f"`{name.removeprefix('aux_loss')}`" in text}
    assert known == set(names)


def test_steps_must_ascend(tmp_path: Path) -> None:
    record(tmp_path, range(1, 5), resume_step=0)
    with closing(JsonLines(tmp_path, resume_step=3)) as writer:
        with pytest.raises(AssertionError, match="step 3 after step 3"):
            writer.write(step(3))
        writer.write(step(4))
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


@pytest.mark.slow
@given(st.integers(0, 300))
def test_a_last_line_cut_anywhere_is_dropped(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = record(Path(folder), range(1, 4), resume_step=0)
        *whole, last = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(whole) + last[: min(cut, len(last) - 1)])
        record(Path(folder), range(3, 5), resume_step=2)
        assert steps_in(path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "broken",
    [
        b"{",
        b"",
        b"3",
        b"\xff",
        b'{"step": 2}',
        json.dumps({**vars(EXAMPLE), "step": 2.5}).encode(),
        json.dumps({**vars(EXAMPLE), "step": None}).encode(),
        json.dumps({**vars(EXAMPLE), "loss": "much"}).encode(),
        json.dumps({**vars(EXAMPLE), "loss": 10**320}).encode(),
        json.dumps({**vars(EXAMPLE), "loss": "nan"}).encode(),
        json.dumps({**vars(EXAMPLE), "skipped": "false"}).encode(),
        json.dumps({**vars(EXAMPLE), "surprise": 1}).encode(),
    ],
)
def test_a_broken_line_elsewhere_is_an_error_with_its_place(tmp_path: Path, broken: bytes) -> None:
    path = record(tmp_path, range(1, 4), resume_step=0)
    first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + broken + b"\n" + third)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a training step"):
        JsonLines(tmp_path, resume_step=3)
    assert path.read_bytes() == before


def test_steps_out_of_order_are_an_error_with_their_place(tmp_path: Path) -> None:
    path = record(tmp_path, range(1, 4), resume_step=0)
    first, second, third = path.read_bytes().splitlines(keepends=True)
    for lines, place in (((first, third, second), 3), ((first, first, third), 2)):
        path.write_bytes(b"".join(lines))
        with pytest.raises(ValueError, match=rf"metrics\.jsonl, line {place}: is step"):
            JsonLines(tmp_path, resume_step=3)
        assert path.read_bytes() == b"".join(lines)


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    with MetricsWriter(JsonLines(tmp_path, 0), TensorBoard(tmp_path, 0, LAYERS)) as writer:
        for number in range(1, 5):
            writer.write(step(number, eval_loss=3.0 if number == 2 else None))
    with MetricsWriter(JsonLines(tmp_path, 2), TensorBoard(tmp_path, 2, LAYERS)) as writer:
        last = replace(step(3), loss=7.0, total_loss=7.5, aux_loss_global=1.25, z_loss=4.0)
        writer.write(replace(last, rows_crossing_nodes=(0.25, 0.75)))
        for number in (1, 3, 20):
            writer.draw(number, np.array([[1, 3], [2, 2]]))
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [(1, 2.5), (2, 2.5), (3, 7.0)]
    assert [(e.step, e.value) for e in events.Scalars("loss/eval")] == [(2, 3.0)]
    router = [
        ("loss/total", 7.5),
        ("moe/aux_loss_global", 1.25),
        ("moe/z_loss", 4.0),
        ("moe/rows_crossing_nodes", 0.5),
        ("layers/rows_crossing_nodes/L1", 0.25),
        ("layers/rows_crossing_nodes/L3", 0.75),
    ]
    for tag, value in router:
        assert [(e.step, e.value) for e in events.Scalars(tag)] == [(3, value)]
    assert [image.step for image in events.Images("moe/loads")] == [1, 20], "not of every step"
    assert events.Scalars("network/hidden_communication")[0].value == pytest.approx(0.93)


@pytest.mark.parametrize("begins_s", [(1e9, 9e8), (2e9, 2e9 - 60), (9e8, 1e9)])
def test_curves_go_on_where_the_clock_has_gone_back(
    begins_s: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start, now_s in enumerate(begins_s):
        monkeypatch.setattr("time.time", lambda now_s=now_s: now_s)
        with MetricsWriter(TensorBoard(tmp_path, 2 * start, LAYERS)) as writer:
            for number in (1, 2, 3):
                writer.write(step(2 * start + number))
    reader = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [each.step for each in events.Scalars("loss/train")] == [1, 2, 3, 4, 5]


@dataclass
class Noted:
    """What a run of the package wandb would have been told."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    finished: int = 0

    def log(self, data: dict[str, Any]) -> None:
        self.entries.append(data)

    def finish(self) -> None:
        self.finished += 1


def test_another_place_gets_the_same_curves_by_step() -> None:
    noted = Noted()
    with MetricsWriter(WeightsAndBiases(noted, np.shape, LAYERS)) as writer:
        writer.write(replace(step(1), aux_loss_global=1.5, aux_loss_by_layer=(1.0, 2.0)))
        writer.draw(1, np.array([[1, 3, 0], [2, 2, 1]]))
        writer.write(step(2))
        writer.draw(2, np.array([[1, 3, 0], [2, 2, 1]]))
    first, picture, second = noted.entries
    assert first["step"] == 1 and first["loss/train"] == 2.5 and "loss/eval" not in first
    balance = {name: value for name, value in first.items() if "aux_loss" in name}
    by_layer = {"layers/aux_loss_by_layer/L1": 1.0, "layers/aux_loss_by_layer/L3": 2.0}
    assert balance == {"moe/aux_loss_global": 1.5, "moe/aux_loss_by_layer": 1.5, **by_layer}
    assert picture == {"step": 1, "moe/loads": (16, 24, 3)}, "layers x experts, drawn in some steps"
    assert second["step"] == 2
    assert noted.finished == 1


# ---- what is kept of the steps of a run --------------------------------------------------------------------


def test_first_last_and_skipped_steps() -> None:
    history = History()
    steps = [replace(step_metrics(n), loss=float(n), skipped=n in (1, 4) or None) for n in range(1, 5)]
    for each in steps:
        history.add(each)
    assert (history.first, history.last_applied, history.last) == (steps[1], steps[2], steps[3])
    assert history.skipped == 2


def test_medians_leave_the_first_steps_out_and_mean_layers() -> None:
    history = History()
    layers = [(1.0, 3.0), (5.0, 5.0), (2.0, 2.0), None, (1.0, 2.0), (4.0, 6.0)]
    for number, each in enumerate(layers):
        history.add(replace(step_metrics(number + 1), iteration_s=float(number), loads_in_common=each))
        if number == 0:
            assert history.typical("iteration_s") == 0.0, "a short run counts all its steps"
    assert history.typical("iteration_s") == median([2, 3, 4, 5])
    assert history.typical("loads_in_common") == median([2, fmean((1, 2)), 5])
    assert history.typical("rows_crossing_nodes") is None


@pytest.mark.slow
def test_a_long_run_takes_some_bytes_per_step() -> None:
    """Steps of a model with 24 MoE layers; as they come from a step, each takes kilobytes."""

    def metrics(number: int) -> StepMetrics:
        layers = tuple(float(number + layer) for layer in range(24))
        return replace(step_metrics(number), loads_in_common=layers, rows_crossing_nodes=layers)

    history, steps = History(), 3000
    tracemalloc.start()
    try:
        for number in range(1, steps + 1):
            history.add(metrics(number))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 2 * 8 * len(TYPICAL) * steps


# ---- Weights & Biases --------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("wandb") is not None, reason="the package is installed here")
@pytest.mark.parametrize("mode", ["true", "offline"])
def test_a_missing_package_is_said_before_anything_starts(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "train", write_config(tmp_path), f"metrics.wandb={mode}")
    assert said.startswith("penstock: metrics.wandb = ") and "pip install 'penstock[wandb]'" in said
    assert not (tmp_path / "run").exists()


def test_a_run_that_resumes_keeps_its_number(tmp_path: Path) -> None:
    first = _id_in(tmp_path, resumes=False)
    assert _id_in(tmp_path, resumes=True) == first
    second = _id_in(tmp_path, resumes=False)
    assert second != first and (tmp_path / ID_FILE).read_text() == f"{second}\n"


@pytest.mark.parametrize("kind", ["link", "pipe", "large"])
def test_a_number_comes_from_no_other_file(tmp_path: Path, kind: str) -> None:
    """It is sent to a server: a link could lead to what nobody else is to read."""
    (tmp_path / "mine").write_text("a secret")
    if kind == "link":
        (tmp_path / ID_FILE).symlink_to(tmp_path / "mine")
    elif kind == "pipe":
        os.mkfifo(tmp_path / ID_FILE)
    else:
        (tmp_path / ID_FILE).write_text("x" * 100_000)
    with pytest.raises(ConfigError) as caught:
        _id_in(tmp_path, resumes=True)
    assert caught.value.key == str(tmp_path / ID_FILE)
