"""The words at the end of a run: one whole text, then what changes when a run was less fortunate."""

import json
from dataclasses import replace

import pytest

from penstock.report import RunSummary
from penstock.trace.analysis import Straggler

SUMMARY = RunSummary(
    schedule="flowmoe",
    steps=1200,
    first_loss=5.601,
    last_loss=1.981,
    eval_loss=2.104,
    eval_noise=0.042,
    unigram_entropy=3.241,
    tokens_per_s=51234.0,
    whole_tokens_per_s=40000.0,
    model_flops_utilisation=0.31,
    peak_flops="0.08 TFLOP/s per rank (fastest product measured)",
    iteration_s_median=0.0782,
    overlap_efficiency=0.912,
    exposed_communication_s=0.0051,
    communication_s=0.0312,
    processes=4,
    num_experts=8,
    num_local_experts=2,
    parameters=3_412_992,
    corpus="a library of Python source, 12.4 MB",
    checkpoint="runs/first/checkpoints/step-1200",
    metrics="runs/first/metrics.jsonl",
    trace="runs/first/trace.json",
    tensorboard="runs/first/tensorboard",
    rank_load_max_over_mean=1.284,
    rows_crossing_nodes=0.496,
    loads_in_common=0.934,
    loads="runs/first/loads.png",
    plan="runs/first/plan.json",
)

TEXT = """\
trained     3.4 million parameters, 8 experts per MoE layer, 1,200 steps on 4 processes, flowmoe
loss        5.601 nats per byte at the start, 1.981 at the end
held out    2.104 (± 0.042) on unseen text; byte frequencies give 3.241: it has learned from context
speed       51,234 tokens/s; a step takes 78.2 ms; model FLOPs: 31 % of the peak
network     31.2 ms of communication per step: 84 % hidden under computation, 5.1 ms exposed
balance     the busiest process computes 1.28 times the mean number of expert rows
checkpoint  runs/first/checkpoints/step-1200
report      penstock report runs/first (a page: timelines, what bound the step, loads)
again       the same command with plan.mode=replay plan.file=runs/first/plan.json
files       in that folder: metrics.jsonl, trace.json, tensorboard, loads.png
"""

DETAILS = """\
data        a library of Python source, 12.4 MB
experts     2 on each process
speed       40,000 tokens/s with reading, evaluation and saving
peak        0.08 TFLOP/s per rank (fastest product measured)
network     overlap efficiency 0.91 (1.00 = no order of the same tasks could be faster)
balance     50 % of rows go to another node
balance     expert loads overlap 93 % with those of the step before
metrics     runs/first/metrics.jsonl (one line of JSON per step)
loads       runs/first/loads.png (picture: how often each expert was chosen)
curves      tensorboard --logdir runs/first/tensorboard
trace       runs/first/trace.json (open https://ui.perfetto.dev and drop the file there)
"""


@pytest.mark.parametrize(
    ("tp_size", "etp_size", "words"),
    [
        (2, 4, "on 4 processes (2 share attention, 4 share each expert), flowmoe"),
        (2, 1, "on 4 processes (2 share attention), flowmoe"),
        (1, 2, "on 4 processes (2 share each expert), flowmoe"),
    ],
)
def test_processes_that_share_parameters(tp_size: int, etp_size: int, words: str) -> None:
    summary = replace(SUMMARY, tp_size=tp_size, etp_size=etp_size)
    assert words in summary.to_text(400)
    found = summary.to_dict()
    assert (found["tp_size"], found["etp_size"]) == (tp_size, etp_size)


def test_text_of_a_good_run() -> None:
    """Ten lines; a log has the rest."""
    assert SUMMARY.to_text() == TEXT and SUMMARY.details() == DETAILS


def test_what_went_wrong_takes_the_place_of_what_says_least() -> None:
    slow = (Straggler(rank=1, factor=1.5),)
    text = replace(SUMMARY, interrupted=True, skipped_steps=2, stragglers=slow).to_text()
    labels = [line.split("  ")[0] for line in text.splitlines()]
    assert len(labels) == 10 and {"stopped", "skipped", "slow ranks", "checkpoint", "report"} <= set(labels)


@pytest.mark.parametrize("eval_loss", [3.241, 3.5])
def test_a_model_no_better_than_byte_frequencies_is_called_that(eval_loss: float) -> None:
    text = " ".join(replace(SUMMARY, eval_loss=eval_loss).to_text().split())
    assert f"{eval_loss:.3f} (± 0.042) on unseen text" in text
    assert "and the model is no better yet" in text
    assert "learned" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"eval_loss": 3.2}, "the difference is too little to tell"),
        ({"eval_noise": None}, "one batch is too little to tell"),
    ],
)
def test_what_may_be_noise_is_not_called_learning(change: dict[str, float | None], words: str) -> None:
    text = " ".join(replace(SUMMARY, **change).to_text().split())  # type: ignore[arg-type]  # either field
    assert words in text and ": it has learned" not in text


@pytest.mark.parametrize("eval_loss", [float("nan"), float("inf")])
def test_a_diverged_run_is_called_that(eval_loss: float) -> None:
    text = replace(SUMMARY, eval_loss=eval_loss).to_text()
    assert "the training diverged" in text
    assert "learned" not in text


def test_a_run_without_evaluation_claims_nothing() -> None:
    text = replace(SUMMARY, eval_loss=None).to_text()
    assert "not evaluated" in text
    assert "learned" not in text


def test_a_single_process_has_nothing_to_hide() -> None:
    alone = replace(
        SUMMARY, processes=1, num_local_experts=8, steps=1, communication_s=0.0, exposed_communication_s=0.0
    )
    text = alone.to_text()
    assert alone.hidden_communication == 1.0
    assert "network" not in text
    assert "8 experts per MoE layer, 1 step on 1 process," in text


def test_only_files_that_exist_are_named() -> None:
    summary = replace(SUMMARY, checkpoint=None, trace=None, tensorboard=None)
    text = summary.to_text() + summary.details()
    assert "runs/first/metrics.jsonl" in text
    assert not any(word in text for word in ("checkpoint", "perfetto", "tensorboard", "trace"))


def test_a_long_path_stays_in_one_piece() -> None:
    path = "/" + "a-long_folder-" * 12 + "/step-00000001"
    assert path in replace(SUMMARY, checkpoint=path).to_text()


def test_dict_is_plain_data() -> None:
    data = json.loads(json.dumps(SUMMARY.to_dict()))
    assert data["corpus_unigram_entropy"] == 3.241
    assert data["hidden_communication"] == pytest.approx(1 - 0.0051 / 0.0312)
    assert data["outputs"] == {
        "checkpoint": "runs/first/checkpoints/step-1200",
        "metrics": "runs/first/metrics.jsonl",
        "trace": "runs/first/trace.json",
        "tensorboard": "runs/first/tensorboard",
        "plan": "runs/first/plan.json",
        "cluster": None,
        "loads": "runs/first/loads.png",
    }
