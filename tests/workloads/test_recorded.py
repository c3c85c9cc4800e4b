"""The file of recorded loads: written while training, read back, refused where it does not fit."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.apportion import Counts
from penstock.config import ConfigError
from penstock.workloads import (
    RecordedModel,
    Recording,
    RoutingConfig,
    RoutingRecorder,
    RoutingSizes,
    read_recording,
    recorded,
    routing_of,
)
from penstock.workloads.recorded import recorded_routing
from tests.lab.virtual.test_stack import case_of
from tests.support.parity import Case, batch_of, stack_of
from tests.workloads.strategies import recordings, sizes

MODEL = RecordedModel(moe_layers=2, num_experts=3, top_k=1)
LOADS = [[1, 2, 3], [6, 0, 0]]
HEADER = '{"format": "penstock routing", "version": 2, "moe_layers": 2, "num_experts": 3, "top_k": 1}'
STEP = '{"step": 1, "tokens_per_expert": [[1, 2, 3], [6, 0, 0]]}'
FIRST, SECOND, PADDING = [[0, 1, 3], [4, 0, 0]], [[1, 1, 0], [2, 0, 0]], [[0, 0, 0], [0, 0, 0]]


def with_samples(*samples: object) -> str:
    """The step with the loads of its samples."""
    return f'{STEP[:-1]}, "samples": {json.dumps(samples)}}}'


def steps_of(recording: Recording) -> list[tuple[int, Counts, Counts | None]]:
    return list(zip(recording.steps, recording.loads_SYE, recording.samples, strict=True))


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@given(data=st.data())
def test_what_is_written_is_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    recording = data.draw(recordings(data.draw(sizes())))
    path = tmp_path_factory.mktemp("recorded") / "routing.jsonl"
    with RoutingRecorder(path, recording.model) as recorder:
        for step, loads, samples in steps_of(recording):
            listed = None if samples is None else samples.tolist()
            recorder.write(step, loads.astype(float).tolist(), listed)  # as statistics come from a step
    read = read_recording(path)
    assert (read.model, read.steps) == (recording.model, recording.steps)
    for (_, loads, samples), (_, wanted, of_samples) in zip(steps_of(read), steps_of(recording), strict=True):
        assert (loads == wanted).all()
        assert (samples is None) is (of_samples is None)
        assert samples is None or of_samples is None or np.array_equal(samples, of_samples)


def test_version_1_is_read_and_samples_that_are_padding_are_left_out(tmp_path: Path) -> None:
    old = HEADER.replace('"version": 2', '"version": 1')
    assert read_recording(write(tmp_path / "old.jsonl", old, STEP)).samples == (None,)
    found = read_recording(write(tmp_path / "new.jsonl", HEADER, with_samples(FIRST, PADDING, SECOND)))
    (samples,) = found.samples
    assert samples is not None and samples.tolist() == [FIRST, SECOND]


def test_the_file_is_what_the_documentation_shows(tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    with RoutingRecorder(path, MODEL) as recorder:
        recorder.write(1, LOADS)
        assert path.read_text().splitlines() == [HEADER, STEP], "written at once, before the file is closed"


def test_a_continued_run_drops_the_steps_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "routing.jsonl"
    with RoutingRecorder(path, MODEL, resume_step=5) as recorder:  # nothing to keep
        for step in (6, 7, 8):
            recorder.write(step, LOADS)
    with path.open("a") as file:
        file.write('{"step": 9, "tok')  # killed while writing
    with RoutingRecorder(path, MODEL, resume_step=7) as recorder:
        recorder.write(8, LOADS)
    assert read_recording(path).steps == (6, 7, 8)
    with RoutingRecorder(path, MODEL):
        pass
    assert read_recording(path).steps == ()


def test_a_file_of_any_length_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers hold a whole file and have a limit; a run that writes has none."""
    path = tmp_path / "routing.jsonl"
    with RoutingRecorder(path, MODEL) as recorder:
        for step in range(1, 8):
            recorder.write(step, LOADS)
    monkeypatch.setattr(recorded, "MOST_COUNTS", 12)
    monkeypatch.setattr(recorded, "MOST_LINE_BYTES", 32)
    before = path.read_text().splitlines()
    RoutingRecorder(path, MODEL, resume_step=5).close()
    assert path.read_text().splitlines() == before[:6]


def test_a_line_that_no_run_wrote_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path = write(tmp_path / "routing.jsonl", HEADER, STEP, "{}")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="line 3 is no step that a training run recorded"):
        RoutingRecorder(path, MODEL, resume_step=1)
    assert path.read_bytes() == before


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "routing.jsonl", HEADER, STEP, STEP.replace("1", "2", 1))
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(HEADER) + 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            RoutingRecorder(path, MODEL, resume_step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before


def test_experts_that_choose_may_take_any_number_of_a_sample(tmp_path: Path) -> None:
    path, model = tmp_path / "routing.jsonl", replace(MODEL, num_experts=4, top_k=2, experts_choose=True)
    samples = [[[8, 1, 1, 0], [0, 0, 0, 0]], [[0, 7, 7, 8], [8, 8, 8, 8]]]
    with RoutingRecorder(path, model) as recorder:
        recorder.write(1, [[8, 8, 8, 8], [8, 8, 8, 8]], samples)
    found = read_recording(path)
    assert found.model == model
    assert found.samples[0] is not None and found.samples[0].tolist() == samples
    sizes = RoutingSizes(groups=1, samples=2, seq_len=8, moe_layers=2, num_experts=4, top_k=2)
    counts = recorded_routing(path, sizes).counts(0)
    assert (counts.sum(axis=-1) == 16).all()
    assert counts[0, 0, 1].tolist() == [4, 4, 4, 4], "where nothing is known of a sample, as the whole batch"


@pytest.mark.parametrize(("step", "wrong"), [(3, "4"), (7, "4"), (1, "3"), ("9" * 5000, "3")])
def test_a_file_with_steps_out_of_order_is_not_continued(tmp_path: Path, step: int | str, wrong: str) -> None:
    """Steps 1, `step`, 3: the line that is wrong is named, and nothing is lost."""
    lines = [STEP.replace("1", str(number), 1) for number in (1, step, 3)]
    path = write(tmp_path / "routing.jsonl", HEADER, *lines)
    before = path.read_bytes()
    with pytest.raises(ConfigError) as caught:
        RoutingRecorder(path, MODEL, resume_step=8)
    assert caught.value.why.startswith(f"line {wrong} ")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER, STEP, STEP], "line 3 is step 1 after step 1, and steps count up"),
        ([HEADER, STEP.replace("1", "5", 1), STEP], "line 3 is step 1 after step 5, and steps count up"),
        ([HEADER.replace("}", ', "experts_choose": 1}')], "line 1 experts_choose is 1, and neither true nor"),
        (
            [HEADER.replace("}", ', "experts_choose": true}'), STEP.replace("6", "0")],
            "line 2 has a layer whose experts have chosen no token",
        ),
        ([], "is no recorded routing: line 1 does not say"),
        (['{"step": 1, "loss": 2.0}'], "is no recorded routing: line 1 does not say"),
        ([HEADER.replace('"version": 2', '"version": 3')], "has version 3 of the format, and versions 1 and"),
        ([HEADER, with_samples(FIRST)], "line 2 has samples whose loads do not add up to tokens_per_expert"),
        ([HEADER, with_samples()], "line 2 has samples whose loads do not add up to tokens_per_expert"),
        ([HEADER, with_samples(FIRST, SECOND[:1])], "line 2 has no samples of 2 lists of 3 whole numbers"),
        ([HEADER, f'{STEP[:-1]}, "samples": 3}}'], "line 2 has samples that are no list"),
        ([HEADER.replace("3", '"3"')], "line 1 num_experts is '3' and no positive whole number"),
        ([HEADER, STEP, "{"], "line 3 is not JSON"),
        ([HEADER, "7"], "line 2 is not a JSON object"),
        ([HEADER, STEP.replace('"step": 1, ', "")], "line 2 has no step number"),
        ([HEADER, STEP.replace("6, ", "")], "line 2 has no tokens_per_expert of 2 lists of 3 whole numbers"),
        ([HEADER, STEP.replace("6", "6.5")], "line 2 has no tokens_per_expert of 2 lists of 3 whole numbers"),
        ([HEADER, STEP.replace("6", "0")], "line 2 has an expert chosen by more tokens than there are"),
        (
            [HEADER.replace('"top_k": 1', '"top_k": 2'), STEP],
            "line 2 has an expert chosen by more tokens than there are: [6, 0, 0]",
        ),
    ],
)
def test_a_wrong_file_names_its_line(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write(tmp_path / "routing.jsonl", *lines)
    with pytest.raises(ConfigError) as caught:
        read_recording(path)
    assert str(caught.value).startswith(f"recorded = {json.dumps(str(path))}: {message}")
    assert caught.value.hint


def batch(moe_layers: int, num_experts: int, top_k: int) -> RoutingSizes:
    return RoutingSizes(
        groups=2, samples=1, seq_len=4, moe_layers=moe_layers, num_experts=num_experts, top_k=top_k
    )


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (batch(1, 3, 1), "was recorded with moe_layers = 2, and this model has 1"),
        (batch(2, 4, 1), "was recorded with num_experts = 3, and this model has 4"),
        (batch(2, 3, 2), "was recorded with top_k = 1, and this model has 2"),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, wanted: RoutingSizes, message: str) -> None:
    path = write(tmp_path / "routing.jsonl", HEADER, STEP)
    with pytest.raises(ConfigError, match=message):
        recorded_routing(path, wanted)


def test_a_file_without_steps_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "routing.jsonl", HEADER)
    with pytest.raises(ConfigError, match="holds no step"):
        recorded_routing(path, batch(2, 3, 1))


def recorded_run(case: Case, path: Path) -> list[list[float]]:
    """Two real steps with their routing recorded; returns the loads of the last."""
    stack = stack_of(0, case)
    model = RecordedModel(moe_layers=2, num_experts=case.moe.num_experts, top_k=case.moe.top_k)
    loads: list[list[float]] = []
    with RoutingRecorder(path, model) as recorder:
        for step in (1, 2):
            stack(*batch_of(case)).backward()
            assert stack.statistics is not None
            loads = stack.statistics.chosen_YE.tolist()
            recorder.write(step, loads)
    return loads


@pytest.mark.slow
def test_a_real_run_is_replayed(tmp_path: Path) -> None:
    """The same model and batch: the loads of the experts come out as they were."""
    case, path = case_of(world_size=1, ep_size=1), tmp_path / "routing.jsonl"
    loads = recorded_run(case, path)
    sizes = RoutingSizes(
        groups=1, samples=case.batch, seq_len=case.model.seq_len, moe_layers=2, num_experts=8, top_k=2
    )
    routing = routing_of(RoutingConfig(routing="recorded", recorded=path), sizes)
    assert routing.counts(1).sum(axis=(0, 1)).tolist() == loads
