"""A plan is saved, read, edited and replayed; what does not fit is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError, Table, Within
from penstock.decision import TAIL, Decision, Field, Partition, Portion, Slot, register, unregister
from penstock.plan import Candidate, PlanFile, Problem, evaluate
from penstock.plan.candidate import whole_s
from penstock.plan.optimizers import sharing_updates
from penstock.plan.space import space
from tests.plan.problems import problem, problems
from tests.support.draws import draws

Edit = Callable[[dict[str, Any]], object]


def saved(path: Path, each: Problem, found: Candidate) -> PlanFile:
    PlanFile.of(each, found, model="tiny", cluster="two-nodes", why=("because",)).save(path)
    return PlanFile.read(path)


def edited(path: Path, edit: Edit) -> PlanFile:
    table = json.loads(path.read_text())
    edit(table)
    path.write_text(json.dumps(table))
    return PlanFile.read(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    saved(path, problem(), evaluate(problem(), Decision(schedule="flowmoe", microbatches=2)))
    return path


@pytest.mark.parametrize(
    ("edit", "key", "why"),
    [
        (lambda t: t["choice"].update(microbatches=3), "choice.microbatches", "the order in the file has 2"),
        (lambda t: t["sizes"].update(layers=3), "sizes.layers", "the order in the file has"),
        (lambda t: t.update(schedule=["schedule x", "compute: nothing"]), "schedule", "not a task name"),
        (lambda t: t["sizes"].update(batch_per_rank=1), "choice.microbatches", "a batch of 1 samples"),
        (lambda t: t.update(interval_s=[2.0, 1.0]), "interval_s", "the smaller first"),
    ],
)
def test_parts_that_contradict_each_other_are_named(path: Path, edit: Edit, key: str, why: str) -> None:
    PlanFile.read(path).check_alone("it")
    with pytest.raises(ConfigError, match=why) as caught:
        edited(path, edit).check_alone("plan.json")
    assert caught.value.key == f"plan.json.{key}"


@draws(10)
@given(problems(), st.randoms(use_true_random=False))
def test_what_is_saved_is_read_and_replayed(
    tmp_path_factory: pytest.TempPathFactory, each: Problem, rng: Any
) -> None:
    choice = rng.choice(list(space(each)))
    found = evaluate(each, choice)
    file = saved(tmp_path_factory.mktemp("plans") / "deep" / "plan.json", each, found)
    assert file.choice == choice
    assert (file.predicted_s, file.memory_bytes, file.why) == (
        whole_s(each, found),
        found.memory_bytes,
        ("because",),
    )
    replayed = file.step_plan(each)
    assert replayed.schedule == found.plan.schedule
    assert replayed.shape == found.plan.shape


@pytest.mark.parametrize("each", [problem(), sharing_updates(problem())])
def test_the_lower_bound_is_that_of_all_passes(each: Problem, path: Path) -> None:
    once, thrice = (saved(path, now, evaluate(now, Decision())) for now in (each, replace(each, passes=3)))
    assert 2 * once.lower_bound_s < thrice.lower_bound_s <= thrice.predicted_s


FURTHER = (
    Field(
        name="tp",
        type=Annotated[int, Within(1, 8, "a node has no more")],
        default=1,
        values=lambda *_: (1, 2),
    ),
    Field(name="placement", type=str, default="static", values=lambda *_: ("static", "sample")),
    Field(
        name="share",
        type=Annotated[float, Within(0, 1, "a share")],
        default=0.0,
        values=lambda *_: (0.0, 0.5),
    ),
)
DECIDED = Table({"tp": 2, "placement": "sample", "share": 0.5})


@pytest.fixture
def further() -> Iterator[None]:
    for field in FURTHER:
        register(field)
    yield
    for field in FURTHER:
        unregister(field.name)


@pytest.mark.parametrize("key", ["schedule", "microbatches", "all_reduce_chunk_bytes", "dispatch"])
def test_a_decision_that_is_missing_is_not_the_usual_one(path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"choice\.{key}: is missing"):
        edited(path, lambda table: table["choice"].pop(key))


def test_what_the_schedule_does_not_read_may_be_missing(path: Path) -> None:
    before = PlanFile.read(path)
    assert edited(path, lambda table: table["choice"].pop("priority")) == before


def test_a_file_without_a_choice_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"choice\.schedule: is missing"):
        edited(path, lambda table: table.pop("choice"))


@pytest.mark.usefixtures("further")
def test_partitions_and_registered_decisions_survive(tmp_path: Path) -> None:
    each = problem()
    half = Portion(size_bytes=1 << 19, slot=TAIL)
    gap = Portion(size_bytes=1 << 19, slot=Slot(layer=0, part="moe"))
    choice = Decision(
        schedule="fsmoe",
        partition=Partition(((Portion(size_bytes=1 << 20, slot=TAIL),), (gap, half))),
        more=DECIDED,
    )
    found = evaluate(each, choice)
    file = saved(tmp_path / "plan.json", each, found)
    assert file.choice == choice
    assert file.step_plan(each).schedule == found.plan.schedule
    written = json.loads((tmp_path / "plan.json").read_text())["choice"]["more"]
    assert written == {"placement": "sample", "share": 0.5, "tp": 2}


def test_microbatches_that_a_schedule_does_not_read_contradict_nothing(tmp_path: Path) -> None:
    """A run's section [schedule] has two of them, whatever its schedule and batch are."""
    each = problem(batch=1)
    found = evaluate(each, Decision(schedule="lina", microbatches=2))
    file = saved(tmp_path / "plan.json", each, found)
    file.check_alone("plan.json")
    assert file.step_plan(each).schedule == found.plan.schedule


def test_without_its_schedule_the_order_is_made_anew(path: Path) -> None:
    def edit(table: dict[str, Any]) -> None:
        table["choice"]["microbatches"] = 4
        del table["schedule"]

    plan = edited(path, edit).step_plan(problem())
    assert plan.shape.microbatches == 4
    plan.schedule.check(plan.graph)


def test_an_order_of_ones_own_is_run_as_it_stands(path: Path) -> None:
    """Two tasks that need not be in this order change places."""

    def edit(table: dict[str, Any]) -> None:
        lane = next(i for i, line in enumerate(table["schedule"]) if line.startswith("compute"))
        line = table["schedule"][lane].replace("L0.EM.m0.F L0.EM.m1.F", "L0.EM.m1.F L0.EM.m0.F")
        assert line != table["schedule"][lane]
        table["schedule"][lane] = line

    before = PlanFile.read(path).step_plan(problem())
    after = edited(path, edit).step_plan(problem())
    assert after.graph.tasks == before.graph.tasks
    assert after.schedule.digest != before.schedule.digest


def put(section: str | None, key: str, value: object) -> Edit:
    def edit(table: dict[str, Any]) -> None:
        (table if section is None else table[section])[key] = value

    return edit


def portions(layers: list[list[object]]) -> Edit:
    """A partition for FSMoE; without any gradient to reduce, ranks would drift apart."""

    def edit(table: dict[str, Any]) -> None:
        table["schedule"] = None
        table["choice"] |= {"schedule": "fsmoe", "partition": {"portions": layers}}

    return edit


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        (put("choice", "schedule", "flowmo"), "choice.schedule"),
        (put("choice", "microbatches", 0), "choice.microbatches"),
        (put("choice", "microbatches", "two"), "choice.microbatches"),
        (put("choice", "all_reduce_chunk_bytes", 3), "choice.all_reduce_chunk_bytes"),
        (put("choice", "priority", "luck"), "choice.priority"),
        (put("choice", "more", 3), "choice.more"),
        (put("choice", "microbatch", 2), "choice.microbatch"),
        (put(None, "version", 9), "version"),
        (put("sizes", "layers", None), "sizes.layers"),
        (portions([[], [{"size_bytes": 0, "slot": {"layer": 0, "part": "moe"}}]]), "choice.partition"),
        *((put(None, "predicted_s", value), "predicted_s") for value in (math.nan, math.inf, -1.0, 0)),
        *((put(None, "lower_bound_s", value), "lower_bound_s") for value in (math.nan, math.inf, -1.0)),
    ],
)
def test_a_wrong_value_is_named_when_it_is_read(path: Path, edit: Edit, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        edited(path, edit)
    assert caught.value.key == f"{path}.{key}" and caught.value.hint


@pytest.mark.parametrize(
    ("edit", "key"),
    [
        (put("choice", "microbatches", 4), "schedule"),
        (put(None, "schedule", ["schedule flowmoe", "compute: L0.EM.m0"]), "schedule"),
        (put("choice", "dispatch", "hierarchical_2d"), "choice.dispatch"),
        (put("choice", "microbatches", 8), "choice.microbatches"),
        (put("sizes", "layers", 3), "sizes.layers"),
        (portions([[]]), "choice.partition"),
        (portions([[], []]), "choice.partition.portions[0]"),
    ],
)
def test_what_does_not_fit_is_named_when_it_is_replayed(path: Path, edit: Edit, key: str) -> None:
    file = edited(path, edit)
    with pytest.raises(ConfigError) as caught:
        file.step_plan(problem(), path.name)
    assert caught.value.key == f"plan.json.{key}" and caught.value.hint


@pytest.mark.parametrize("more", [[["tp", 2]], {"tp": 2}])
def test_a_decision_that_nobody_registered_is_refused(path: Path, more: object) -> None:
    with pytest.raises(ConfigError, match=r"plan.json.choice.more.tp = 2: no such decision is registered"):
        edited(path, put("choice", "more", more))
    with pytest.raises(ConfigError, match="Set it beside more"):
        edited(path, put("choice", "more", {"microbatches": 2}))


@pytest.mark.usefixtures("further")
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tp", 9, "more.tp = 9: must be from 1 to 8 (a node has no more)"),
        ("tp", "two", "must be a whole number"),
        ("share", math.inf, "must be from 0 to 1"),
        ("placement", 1, "must be text"),
        ("pp", 2, "Registered: tp, placement, share."),
    ],
)
def test_a_registered_decision_keeps_its_type_and_bounds(
    path: Path, name: str, value: object, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        edited(path, put("choice", "more", [[name, value]]))
    assert words in str(caught.value)


def test_a_decision_that_is_registered_no_more_is_refused_when_it_is_replayed(tmp_path: Path) -> None:
    each = problem()
    register(FURTHER[0])
    try:
        choice = Decision(more=Table({"tp": 2}))
        file = saved(tmp_path / "plan.json", each, evaluate(each, choice))
        file.step_plan(each)
    finally:
        unregister(FURTHER[0].name)
    with pytest.raises(ConfigError, match=r"mine\.choice\.more\.tp = 2"):
        file.step_plan(each, "mine")


def test_an_explanation_is_of_one_choice(path: Path) -> None:
    words = PlanFile.read(path).choice.words
    rounded = f"{words} (5 MiB of rows per rank and step instead of 10 MiB, rounded: plan.comm_dtype)"
    assert edited(path, put(None, "why", [f"Plan     {rounded}"])).explains_choice
    placed = f"Placed   {words}, experts move (planned, a replica slot per rank)"
    assert not edited(path, put(None, "why", [f"Plan     {words}", placed])).explains_choice
    edited(path, put(None, "why", [f"Plan     {words}", "Time     1 ms"]))
    assert PlanFile.read(path).explains_choice
    assert not edited(path, put("choice", "dispatch", "hierarchical_1d")).explains_choice
    assert not edited(path, put("choice", "microbatches", 4)).explains_choice
    assert edited(path, put(None, "why", ["order frozen again"])).explains_choice, "it explains nothing"
    assert edited(path, put(None, "why", [])).explains_choice


def test_a_file_says_last_what_a_run_has_changed_to(path: Path) -> None:
    file = PlanFile.read(path)
    first = replace(file, why=(f"Plan     {file.choice.words}", "Limit    ..."))
    assert first.telling_use() == first
    changed = replace(first, choice=replace(file.choice, microbatches=4))
    assert not changed.explains_choice and changed.telling_use().explains_choice
    assert changed.telling_use().why == (*first.why, f"In use   {changed.choice.words}")
    back = replace(changed.telling_use(), choice=file.choice)
    assert back.telling_use().why == first.why, "a plan that it has left is not told any more"
