"""The report of a run: what it says, and that a browser can draw it."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from penstock.config import ConfigError
from penstock.decision import Decision
from penstock.graph import Name, Phase
from penstock.plan import PlanFile, evaluate
from penstock.report.loads import LoadCourse
from penstock.report.page.figures import (
    MOST_CELLS,
    NARROW,
    TURNS,
    loads_over_time_figure,
    shown_layers,
    timeline_figure,
)
from penstock.report.page.findings import Course, FinishedRun, KindOfTask, binding_of, kinds_of, title_of
from penstock.report.page.html import kind_rows, write_page
from penstock.report.page.render import BOX
from penstock.trace.step_file import StepFile
from penstock.words import lane_words
from tests.plan.problems import problem
from tests.report.page.examples import STEPS, course, finished, loads, step_file

OVER_STEPS = ("loss", "speed", "network", "balance", "busiest", "lasting", "dropped")
NOTHING = Course(**dict.fromkeys(Course.__dataclass_fields__, ()))


class Elements(HTMLParser):
    """The elements of a page: where figures are drawn, what menus offer, what leads elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: list[str] = []
        self.options: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.figures += [given["data-figure"]] if "data-figure" in given else []
        self.options += [given["value"]] if tag == "option" else []
        self.links += [given[key] for key in ("src", "href") if key in given]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} ends where another element is open"


def drawn(page: str) -> dict[str, Any]:
    """The figures that a page holds, every one checked by plotly's own rules."""
    found: dict[str, Any] = json.loads(re.findall(r"^const figures = (.*);$", page, re.M)[0])
    for figure in found.values():
        go.Figure(figure)
    return found


def unpredicted() -> StepFile:
    """Of a run of which nobody knew the cluster."""
    return replace(step_file(), predicted=None, predicted_s=None, typical_predicted_s=())


def without_library(page: str) -> str:
    return page.replace(get_plotlyjs(), "")


def elements(page: str) -> Elements:
    found = Elements()
    found.feed(without_library(page))
    assert found.open == []
    return found


@pytest.mark.parametrize(
    "run",
    [
        finished(),
        finished(step=None),
        finished(loads=None, settings=""),
        finished(step=step_file(1)),
        finished(step=replace(unpredicted(), path=())),
        finished(course=NOTHING, step=None, loads=None, missing=("step.json is not there.",)),
    ],
    ids=["all", "killed", "without loads", "one process", "no prediction", "nothing but the folder"],
)
def test_every_figure_has_its_place_and_nothing_leads_elsewhere(run: FinishedRun) -> None:
    page = write_page(run)
    figures, found = drawn(page), elements(page)
    assert {*found.figures, *found.options} == figures.keys()
    assert found.links == []
    assert "NaN" not in without_library(page).replace("isNaN", "")


def cards(run: FinishedRun) -> list[tuple[str, str]]:
    """Numbers and what is said of them."""
    return re.findall(r'<div class="card"><b>(.*?)</b><span>(.*?)</span></div>', write_page(run))


def test_cards_say_of_which_steps_they_are() -> None:
    step = replace(
        step_file(),
        predicted_s=0.08,
        measured_s=0.09,
        bound_s=0.06,
        typical_steps=10,
        traced_steps=2,
        traced_s=0.12,
    )
    (_, whole), (part, of), (reached, traced), *_ = cards(finished(step=step))
    assert whole == "per step (median), update included"
    assert part == "90.00 ms"
    assert of == "forward and backward of steps 21 to 30 (median); +12 % against the predicted 80.00 ms"
    assert (reached, traced.partition(":")[0]) == ("0.50", "overlap efficiency of steps 29 and 30 (traced)")
    once = replace(step, typical_steps=1, traced_steps=1)
    assert "of step 30;" in cards(finished(step=once))[1][1]
    apart = cards(finished(step=replace(step, step=42, first_step=2, measured_s=9.0)))
    assert apart[1][1].startswith("forward and backward of the last 10 timed steps, up to step 42 (median);")
    assert apart[1][1].endswith("these steps were slower") and "the last 2 timed steps" in apart[2][1]
    older = replace(step, traced_steps=None, traced_s=None)
    (_, of), (reached, traced) = cards(finished(step=older))[1:3]
    assert of.startswith("forward and backward of the last steps (median);")
    assert (reached, traced.partition(":")[0]) == ("0.67", "overlap efficiency of the last steps (traced)")


@pytest.mark.slow
def test_tiles_of_a_resumed_run_are_of_its_last_start() -> None:
    """Other machines, another number of ranks or another plan may have run the steps before."""
    whole, since = course(), 20
    slow = (*[9.0] * (since - 1), *whole.iteration_s[since - 1 :])
    rates = tuple(1.0 if step < since else 1000.0 for step in whole.step)
    resumed = tuple(step == since for step in whole.step)
    run = finished(course=replace(whole, iteration_s=slow, tokens_per_s=rates, resumed=resumed))
    found = {words: number for number, words in cards(run)}
    assert found["per step (median), update included"] == "102.0 ms"
    assert found["tokens per second of steps (median)"] == "1,000"
    assert "loss of the last step; 5.000 at the start" in found
    page = write_page(run)
    assert f"of steps {since} to {STEPS}." in page
    for name in OVER_STEPS:
        begun = [shape for shape in drawn(page)[name]["layout"]["shapes"] if shape["line"]["dash"] == "dash"]
        assert [shape["x0"] for shape in begun] == [since]
    assert page.count(TURNS["dashed"]) == page.count(TURNS["dotted"]) == len(OVER_STEPS)
    steady = write_page(finished(course=replace(whole, plan=("one",) * STEPS)))
    assert not any(words in steady for words in TURNS.values())


def test_a_part_that_is_longer_than_the_whole_is_explained() -> None:
    usual = course()
    slow = (*usual.iteration_s[:-2], 0.5, 0.7)
    step = replace(
        step_file(), predicted_s=0.2, measured_s=0.55, typical_steps=2, traced_steps=2, traced_s=0.55
    )
    of = cards(finished(step=step, course=replace(usual, iteration_s=slow)))[1][1]
    assert of.endswith(
        "longer than a median step of the run: these steps were slower, 600.0 ms with their updates"
    )
    another = replace(usual, iteration_s=(*usual.iteration_s[:-2], 0.3, 0.4))
    assert cards(finished(step=step, course=another))[1][1].endswith("these steps were slower"), "of rank 0"
    unknown = replace(step, step=STEPS + 9)
    assert cards(finished(step=unknown))[1][1].endswith("these steps were slower")


def test_a_plan_beside_no_others_names_the_one_that_was_next_before_its_routing_was_known() -> None:
    each = problem()
    following = "Next     flowmoe: 2 microbatches; 5.00 ms (+3 %)"
    file = PlanFile.of(each, evaluate(each, Decision()), model="m", cluster="c", why=(following,))
    assert not file.others
    page = write_page(finished(plan=file))
    assert "Then the next best was flowmoe: 2 microbatches; 5.00 ms (+3\N{NO-BREAK SPACE}%).</p>" in page
    assert "<p>No other plan is recorded" in write_page(finished(plan=replace(file, why=())))


def test_names_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script>"
    page = write_page(finished(name=evil, settings=evil, missing=(evil,)))
    assert evil not in without_library(page)
    elements(page)


@pytest.mark.parametrize("place", [0, 1])
def test_every_task_is_a_bar_in_both_runs(place: int) -> None:
    """In its lane's row, at its time, with its name."""
    step = step_file()
    figure = timeline_figure(step, place)
    rows = dict(
        zip(figure["layout"]["yaxis"]["tickvals"], figure["layout"]["yaxis"]["ticktext"], strict=True)
    )
    runs: dict[str, dict[str, tuple[str, float, float]]] = defaultdict(dict)
    critical = sum(link.rank == place and link.end_s > link.start_s for link in step.path)
    assert sum(len(each["x"]) for each in figure["data"] if each["name"] == "critical path") == critical
    for trace in (each for each in figure["data"] if each["name"] != "critical path"):
        columns = zip(trace["y"], trace["base"], trace["x"], trace["hovertext"], strict=True)
        for row, start_ms, length_ms, text in columns:
            name, run = (
                re.findall(r"<b>(.*?)</b>", text)[0],
                re.findall(r"<br>(predicted|measured):", text)[0],
            )
            runs[run][name] = rows[row], start_ms, start_ms + length_ms
    assert step.predicted is not None
    for run, spans in (("predicted", step.predicted), ("measured", step.measured)):
        expected = zip(step.tasks, step.lanes, spans.start_s[place], spans.end_s[place], strict=True)
        assert len(runs[run]) == len(step.tasks)
        for task, lane, start_s, end_s in expected:
            found, *span_ms = runs[run][task]
            assert found == lane_words(lane, nodes=False)
            assert span_ms == pytest.approx([1e3 * start_s, 1e3 * end_s], abs=1e-3)
    top, bottom = (max(row for row in rows if row < 3), min(row for row in rows if row > 3))
    assert top < bottom, "predicted stands above measured"


def test_narrow_bars_keep_their_colour() -> None:
    """An edge of its own would leave nothing of it, whatever the path."""
    step = step_file()
    figure = timeline_figure(step, 0)
    least_ms = NARROW * figure["layout"]["xaxis"]["range"][1]
    narrow = 0
    for trace in figure["data"][:-1]:
        edges = trace["marker"]["line"]
        assert edges["color"] == BOX
        for length_ms, width in zip(trace["x"], edges["width"], strict=True):
            assert width == 0 if length_ms < 0.99 * least_ms else width < 1
            narrow += width == 0
    assert narrow


def test_without_a_prediction_the_measured_step_stands_alone() -> None:
    step = unpredicted()
    page = without_library(write_page(finished(step=step)))
    assert "There is no prediction" in page and "against the predicted" not in page
    assert "<th>predicted</th>" not in page and "end of the predicted step" not in page
    figure = timeline_figure(step, 0)
    assert [each["text"].split("<")[1] for each in figure["layout"]["annotations"]] == ["b>measured"]
    assert figure["layout"]["shapes"] == []
    kinds = kinds_of(step)
    assert {kind.predicted_s for kind in kinds} == {None}
    assert [kind.measured_s for kind in kinds] == sorted((kind.measured_s for kind in kinds), reverse=True)
    assert sum(kind.measured_s for kind in kinds) == pytest.approx(sum(step.typical_measured_s))
    with pytest.raises(ConfigError):
        replace(step, predicted=step_file().predicted)


def test_kinds_sum_up_to_all_tasks_and_the_largest_error_comes_first() -> None:
    step = step_file()
    kinds = kinds_of(step)
    assert sum(kind.count for kind in kinds) == len(step.tasks)
    assert sum(kind.predicted_s or 0.0 for kind in kinds) == pytest.approx(sum(step.typical_predicted_s))
    assert sum(kind.difference_s for kind in kinds) == pytest.approx(
        sum(step.typical_measured_s) - sum(step.typical_predicted_s)
    )
    errors = [abs(kind.difference_s) for kind in kinds]
    assert errors == sorted(errors, reverse=True)
    attention = [place for place, task in enumerate(step.tasks) if Name.parse(task)[1:3] == ("AT", "F")]
    (kind,) = [kind for kind in kinds if (kind.op, kind.phase) == ("AT", "F")]
    assert kind.measured_s == pytest.approx(sum(step.typical_measured_s[place] for place in attention))


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_of_a_task_has_words(phase: Phase) -> None:
    kind = KindOfTask(op="AT", phase=phase, lane="compute", count=1, predicted_s=1.0, measured_s=1.0)
    assert kind.title.startswith(title_of("AT"))


def test_what_bound_the_step_is_told_in_shares_of_its_path() -> None:
    binding = binding_of(step_file())
    assert binding is not None
    assert binding.length_s == pytest.approx(step_file().measured_s)
    assert binding.compute_share + binding.network_share + binding.gap_share == pytest.approx(1.0)
    first, verdict = binding.sentences()
    assert f"{100 * binding.compute_share:.0f} % computation" in first
    assert "by" in verdict and "at most" in verdict
    alone = binding_of(step_file(1))
    assert alone is not None and alone.network_share == 0.0
    assert "nothing crosses a network" in alone.sentences()[1]


@pytest.mark.slow
def test_heat_maps_of_large_models_stay_small() -> None:
    large = LoadCourse(tuple(range(60)), tuple(range(256)), np.ones((256, 60, 256), dtype=np.int64))
    cells = 0
    for place in shown_layers(large):
        (heat,) = loads_over_time_figure(large, place)["data"]
        cells += len(heat["x"]) * len(heat["y"])
    assert 0 < cells <= 1.1 * MOST_CELLS
    assert shown_layers(loads()) == [0, 1]


def test_columns_are_as_long_as_the_run() -> None:
    lengths = {len(getattr(course(), name)) for name in Course.__dataclass_fields__}
    assert lengths == {len(course().step)}


def test_without_plotly_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(
        ConfigError, match=r"needs the package plotly. Install it: pip install 'penstock\[report\]'"
    ):
        write_page(finished())


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_network_is_between_nodes_where_there_are_several(nodes: int) -> None:
    step = replace(step_file(), nodes=nodes)
    ticks = timeline_figure(step, 0)["layout"]["yaxis"]["ticktext"]
    lanes = {row.cells[0] for row in kind_rows(kinds_of(step), nodes=nodes > 1)}
    assert ("network between nodes" in ticks) == ("between nodes" in lanes) == (nodes > 1)
