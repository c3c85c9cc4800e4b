"""The words at the end of a run: one whole text, then what changes when a run was less fortunate."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from penstock.config import ConfigError
from penstock.cost.cluster_file import Fit, LinkModel
from penstock.cost.clusters import find_cluster
from penstock.decision import Decision
from penstock.plan import evaluate
from penstock.report import RunSummary
from penstock.report.loads import CELL, COLD, EVEN, HOT, NUMBERS, LoadCourse, colours, draw_loads
from penstock.report.plan import _table
from penstock.report.profile import _task_title, _ticks, draw_profile, link_bandwidth, profile_text
from penstock.trace.analysis import Straggler
from tests.cost.test_clusters import MEASURED
from tests.plan.problems import problem

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
    peak_flops="80 GFLOP/s per rank (fastest product measured)",
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
peak        80 GFLOP/s per rank (fastest product measured)
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


def test_a_resumed_run_says_in_which_step_its_loss_began() -> None:
    assert "5.601 nats per byte in step 601, " in replace(SUMMARY, first_step=601).to_text()


def test_text_of_a_good_run() -> None:
    """Ten lines; a log has the rest."""
    assert SUMMARY.to_text() == TEXT and SUMMARY.details() == DETAILS


def test_what_went_wrong_takes_the_place_of_what_says_least() -> None:
    slow = (Straggler(rank=1, factor=1.5),)
    text = replace(SUMMARY, interrupted=True, skipped_steps=2, stragglers=slow).to_text()
    labels = [line.split("  ")[0] for line in text.splitlines()]
    assert len(labels) == 10 and {"stopped", "skipped", "slow ranks", "checkpoint", "report"} <= set(labels)


ALONE = {
    "processes": 1,
    "num_local_experts": 8,
    "steps": 1,
    "communication_s": 0.0,
    "exposed_communication_s": 0.0,
}


@pytest.mark.parametrize(
    ("change", "words", "unsaid"),
    [
        ({"eval_loss": 3.241}, "3.241 (± 0.042) on unseen text", "learned"),
        ({"eval_loss": 3.5}, "and the model is no better yet", "learned"),
        ({"eval_loss": 3.2}, "the difference is too little to tell", ": it has learned"),
        ({"eval_noise": None}, "one batch is too little to tell", ": it has learned"),
        ({"eval_loss": float("nan")}, "the training diverged", "learned"),
        ({"eval_loss": float("inf")}, "the training diverged", "learned"),
        ({"eval_loss": None}, "not evaluated", "learned"),
        (ALONE, "8 experts per MoE layer, 1 step on 1 process,", "network"),
    ],
)
def test_no_more_is_claimed_than_is_known(change: dict[str, Any], words: str, unsaid: str) -> None:
    summary = replace(SUMMARY, **change)
    text = " ".join(summary.to_text().split())
    assert words in text and unsaid not in text
    assert change is not ALONE or summary.hidden_communication == 1.0


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


# ---- plans -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "shown"), [(110, True), (60, False)])
def test_only_columns_that_are_shown_are_explained(width: int, shown: bool) -> None:
    """In a narrow terminal some are left out."""
    each = problem()
    found = [evaluate(each, Decision(schedule=name)) for name in ("flowmoe", "moe_pipeline")]
    head, *_, legend = _table(found, width, dispatches=False).splitlines()
    assert ("bound" in head.split()) is shown
    assert ("bound: lower bound" in legend) is shown
    assert "chunks: forward/backward" in legend


def test_one_plan_is_marked_also_where_another_takes_as_long() -> None:
    each = problem()
    found = [evaluate(each, Decision(schedule="moe_pipeline")) for _ in range(2)]
    _, first, second, _ = _table(found, 110, dispatches=False).splitlines()
    assert first.startswith("→") and not second.startswith("→") and "+0.0 %" in second


# ---- loads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 20])
@pytest.mark.slow
def test_a_picture_is_written_however_many_layers_there_are(tmp_path: Path, layers: int) -> None:
    loads = np.random.default_rng(0).integers(0, 9, (3, layers, 4))
    loads[0] = 0
    path = draw_loads(LoadCourse(tuple(range(layers)), (1, 2, 3), loads), tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_colours_go_from_blue_by_way_of_white_to_orange() -> None:
    """A quarter of the mean, the mean, four times the mean."""
    cells = colours(np.array([[1, 4, 16, 0, 0, 3, 4, 4]]))[::CELL, ::CELL]
    assert [tuple(map(int, cells[0, i])) for i in (0, 1, 2)] == [COLD, EVEN, HOT]
    assert colours(np.zeros((1, 2), dtype=np.int64)).shape == (CELL, 2 * CELL, 3)


def course(steps: int) -> LoadCourse:
    drawn = np.random.default_rng(1).integers(0, 2**40, (steps, 2, 3))
    return LoadCourse((1, 4), tuple(range(5, 5 + steps)), drawn)


@pytest.mark.parametrize("steps", [1, 4])
def test_loads_are_read_as_they_were_saved(tmp_path: Path, steps: int) -> None:
    course(2).save(tmp_path)
    course(steps).save(tmp_path)
    found = LoadCourse.read(tmp_path / NUMBERS)
    assert (found.layers, found.steps) == (course(steps).layers, course(steps).steps)
    assert np.array_equal(found.loads_SYE, course(steps).loads_SYE)
    assert [each.name for each in tmp_path.iterdir()] == [NUMBERS]


@pytest.mark.parametrize(
    "arrays",
    [
        {"layers": [1], "steps": [1]},
        {"layers": [1], "steps": [1, 2], "loads": np.ones((1, 1, 3), dtype=int)},
        {"layers": [1], "steps": [1], "loads": np.ones((1, 1, 3))},
        {"layers": [1], "steps": [1], "loads": np.array([None])},
        {"layers": [1], "steps": [], "loads": np.ones((0, 1, 3), dtype=int)},
        {"layers": [1], "steps": [1], "loads": np.ones((1, 1, 0), dtype=int)},
        {"layers": [1, 1], "steps": [1], "loads": np.ones((1, 2, 3), dtype=int)},
        {"layers": [1], "steps": [2, 1], "loads": np.ones((2, 1, 3), dtype=int)},
        {"layers": [1], "steps": [1], "loads": -np.ones((1, 1, 3), dtype=int)},
    ],
)
def test_other_arrays_are_refused_with_the_name_of_the_file(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / NUMBERS, **arrays)
    with pytest.raises(ConfigError, match=NUMBERS):
        LoadCourse.read(tmp_path / NUMBERS)


@pytest.mark.parametrize("at", ["version", "flags", "method", "rows"])
def test_a_damaged_archive_is_refused_with_the_name_of_the_file(tmp_path: Path, at: str) -> None:
    """Its directory asks for what zipfile lacks, or an array says that it is larger than any memory."""
    course(2).save(tmp_path)
    path = tmp_path / NUMBERS
    data = bytearray(path.read_bytes())
    place = {"version": 6, "flags": 8, "method": 10}.get(at)
    if place is not None:
        data[data.index(b"PK\x01\x02") + place] = 0x63
        path.write_bytes(data)
    else:
        header = io.BytesIO()
        facts = {"descr": "<i8", "fortran_order": False, "shape": (2**50,)}
        np.lib.format.write_array_header_1_0(header, facts)
        with ZipFile(path, "w") as archive:
            for name in ("layers", "steps", "loads"):
                archive.writestr(f"{name}.npy", header.getvalue())
    with pytest.raises(ConfigError, match=NUMBERS):
        LoadCourse.read(path)


# ---- profiles ----------------------------------------------------------------------------------------------


def link(collective: str, ranks: int, op: str = "") -> LinkModel:
    return LinkModel(
        collective=collective, group="ep", lane="inter", ranks=ranks, alpha_s=0.0, beta_s_per_byte=1e-8, op=op
    )


@pytest.mark.parametrize(
    ("collective", "op", "share"),
    [
        ("all_to_all", "", 3 / 4),
        ("all_gather", "", 3 / 4),
        ("reduce_scatter", "", 3 / 4),
        ("all_reduce", "", 6 / 4),
        ("uneven_all_to_all", "", 6 / 5),
        ("broadcast", "", 3),
        ("point_to_point", "", 1),
        ("hierarchical_1d", "DG", 1),
        ("hierarchical_1d", "D", 1),
        ("hierarchical_2d", "D", 1 / 2),
    ],
)
def test_bandwidth_is_that_of_the_busiest_link(collective: str, op: str, share: float) -> None:
    """Of four ranks on two nodes: bytes over that link per byte of the model's argument."""
    file = replace(MEASURED, nodes=2, ranks_per_node=2, slowness=())
    assert link_bandwidth(file, link(collective, 4, op)) == pytest.approx(share * 1e8)


def test_a_leg_has_the_nodes_that_its_link_says() -> None:
    """Two ranks of a node share an expert, so the four of a group are on four nodes."""
    file, leg = replace(MEASURED, nodes=4, ranks_per_node=2, slowness=()), link("hierarchical_2d", 4, "D")
    assert link_bandwidth(file, replace(leg, nodes=4)) == pytest.approx(3 / 4 * 1e8)


def test_nothing_crosses_a_link_inside_a_node_of_one_rank() -> None:
    assert link_bandwidth(MEASURED, link("hierarchical_2d", 2, "DG")) is None


def test_groups_that_were_measured_once_share_a_row() -> None:
    world = replace(MEASURED.links[0], group="world")
    slower = replace(world, group="rail", alpha_s=1.0)
    text = profile_text(replace(MEASURED, links=(*MEASURED.links, world, slower)))
    rows = [line for line in text.splitlines() if "| all_to_all" in line]
    assert len(rows) == 2 and "ep world" in rows[0] and "rail" in rows[1]
    assert "world: all ranks" in text and "rail: those of them" in text
    assert "100" in rows[0] and " 400 " in rows[0] and "0.990" in rows[0] and "2.0 %" in rows[0]


def test_all_parts_are_shown() -> None:
    text = profile_text(MEASURED)
    assert text.startswith("measured: 2 ranks on 2 nodes, p, PyTorch 2, 2026-11-21")
    for shown in (
        "AT.F",
        "AT: attention",
        ".F: forward",
        "1.50",
        "1.10",
        "copy",
        "10.0 GB/s",
        "5.0 %",
        "rank 1 1.50",
    ):
        assert shown in text
    for said in (
        "transfers take 1.30 times as long during computation as alone; in steps 1.10 times as long as above",
        "9 real steps took 1.05 times as long as their parts say",
        "to take 0.95 to 1.05 times their prediction",
        *MEASURED.doubts,
    ):
        assert said in text
    assert all(len(line) <= 110 for line in text.splitlines())


def test_a_file_written_by_hand_shows_what_it_has() -> None:
    link = replace(MEASURED.links[0], collective="reduce_scatter", fit=None)
    text = profile_text(replace(find_cluster("fsmoe-testbed-b"), links=(link,)))
    assert text.startswith("fsmoe-testbed-b: 32 ranks on 8 nodes\n")
    assert "reduce_scatter" in text and "kernel" not in text and "FSMoE" in text


def test_the_figure_shows_every_line(tmp_path: Path) -> None:
    path = draw_profile(MEASURED, tmp_path / "new" / "folder")
    assert path.name == "profile.png" and path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 5000


def test_a_rate_that_explains_nothing_is_not_printed() -> None:
    noisy = replace(MEASURED.links[0].fit or Fit(r2=0, residual=0, points=()), r2=0.1)
    file = replace(MEASURED, links=(replace(MEASURED.links[0], fit=noisy),))
    rate = link_bandwidth(file, file.links[0])
    assert rate is not None
    text = profile_text(file)
    assert f"{rate / 1e6:.1f}" not in text
    assert "| ? | 0.100 |" in " ".join(text.split())
    assert "?: R2 is below 0.5" in text
    assert "?" not in profile_text(MEASURED)


def test_labels_of_panels_do_not_touch() -> None:
    """Neither on an axis of less than a decade, nor does what a task does leave the picture."""
    assert _ticks(2.46e-4, 6.3e-4) == pytest.approx([3e-4, 4e-4])
    assert 2 <= len(_ticks(1e3, 1e7)) <= 4
    task = replace(MEASURED.tasks[0], op="OP", phase="B")
    assert _task_title(task) == "OP.B\n... of partial parameters"


@pytest.mark.parametrize("points", [1, 2, 3])
def test_two_points_do_not_say_how_well_a_line_fits(points: int) -> None:
    link = MEASURED.links[0]
    assert link.fit is not None
    exact = Fit(r2=1.0, residual=0.0, points=link.fit.points[:points])
    text = " ".join(profile_text(replace(MEASURED, links=(replace(link, fit=exact),))).split())
    assert ("| 1.000 | 0.0 % |" in text) is (points == 3)
    assert ("| ? | ? |" in text) is (points < 3)
    assert ("R2 and residual ?: fewer than 3 points" in text) is (points < 3)
