"""How rows meet all shards of their experts, as a decision: searched, set, saved, told, and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import ConfigError, load
from penstock.decision import Decision, ScheduleConfig
from penstock.features.dispatch import DISPATCHES
from penstock.plan import PlanFile, Problem, evaluate
from penstock.plan.space import in_effect, neighbours, space, valid
from penstock.report.plan import _table
from penstock.schedule import SCHEDULES, cut
from penstock.step import Sharing, StepShape
from penstock.step.shape import FORM_TOKENS, ExpertForm
from tests.plan.problems import problem, with_sharing
from tests.steps import PLAIN, SHARED, decision, gradients_of, planned

DECIDED = [name for name, system in SCHEDULES.items() if "expert_form" in system.reads]
LEGS = "hierarchical_2d"


def shared(
    sharing: Sharing = SHARED, dispatches: tuple[str, ...] = ("flat",), *, moe: bool = True
) -> Problem:
    """Four ranks on two nodes, those of a node share attention, experts or both."""
    plain = problem((moe, moe), dispatches=dispatches)
    work = replace(
        plain.workload,
        tp_size=sharing.tp_size,
        etp_size=sharing.etp_size,
        ep_size=4 // sharing.etp_size,
        node_size=0,
        devices_per_node=2,
    )
    return replace(plain, shape=StepShape(moe_layers=(moe, moe), sharing=sharing), workload=work)


def tried(each: Problem) -> dict[str, set[tuple[str, str | None]]]:
    """By schedule, the dispatches and forms that a search tries together."""
    found: dict[str, set[tuple[str, str | None]]] = {}
    for choice in space(each):
        found.setdefault(choice.schedule, set()).add((choice.dispatch, choice.expert_form))
    return found


# ---- searched ----------------------------------------------------------------------------------------------


def test_where_nobody_shares_there_is_nothing_to_decide() -> None:
    assert tried(problem()) == {name: {("flat", None)} for name in PLAIN}
    assert set(tried(shared(moe=False))) == set(PLAIN)
    assert {form for _, form in set().union(*tried(shared(moe=False)).values())} == {None}


def test_every_form_is_tried_and_those_of_schedules_with_it() -> None:
    found = tried(shared())
    forms = {("flat", form) for form in FORM_TOKENS}
    assert found == {name: forms if name in DECIDED else {("flat", None)} for name in SCHEDULES}


@pytest.mark.parametrize(
    ("sharing", "forms", "missing"),
    [
        (Sharing(tp_size=2), {"gather", "s2", "baseline"}, "parm_s1"),
        (Sharing(etp_size=2), {"gather", "s1", "baseline"}, "parm_s2"),
    ],
)
def test_forms_that_are_others_are_not_tried_twice(sharing: Sharing, forms: set[str], missing: str) -> None:
    found = tried(shared(sharing))
    assert {form for _, form in found["lina"]} == forms
    assert set(SCHEDULES) - set(found) == {missing}


def test_legs_inside_nodes_are_tried_with_gathered_rows_alone() -> None:
    found = tried(shared(dispatches=("flat", LEGS)))
    assert found["penstock"] == {("flat", form) for form in FORM_TOKENS} | {(LEGS, "gather")}
    assert found["fsmoe"] == {("flat", None), (LEGS, None)}
    assert found["parm_s1"] == found["parm_s2"] == found["baseline_esp"] == {("flat", None)}
    assert set(tried(shared(dispatches=(LEGS,)))) == set(PLAIN)


def test_what_is_next_to_a_choice_can_be_run() -> None:
    each = shared(dispatches=("flat", LEGS))
    start = valid(each, Decision(schedule="lina", dispatch=LEGS))
    assert start.expert_form == "gather"
    for choice in neighbours(each, start):
        each.cut(choice)
    assert {choice.schedule for choice in neighbours(each, start)} == set(SCHEDULES)


# ---- what it means -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_its_own_form_or_the_one_decided(name: str) -> None:
    shape = StepShape(moe_layers=(True,), sharing=SHARED)
    own = SCHEDULES[name].expert_form
    for form in (None, *FORM_TOKENS):
        choice = decision(name, expert_form=form)
        assert choice.form == (own or form or "gather")
        assert cut(choice, shape, gradients_of(shape)).expert_form == choice.form
        assert bool(own) is not choice.reads("expert_form")


@pytest.mark.parametrize("form", [form for form in FORM_TOKENS if form != "gather"])
def test_a_form_that_wants_a_flat_dispatch_is_refused_with_another(form: ExpertForm) -> None:
    hops = DISPATCHES[LEGS].hops
    shape = StepShape(moe_layers=(True,), sharing=SHARED, dispatch=hops)
    with pytest.raises(
        ConfigError, match=rf'expert_form = "{form}": .* the {LEGS} dispatch has legs'
    ) as caught:
        planned("lina", shape, dispatch=LEGS, expert_form=form)
    assert caught.value.hint == "Set moe.dispatch=flat, or use expert_form=gather."
    name = next(name for name, system in SCHEDULES.items() if system.expert_form == form)
    with pytest.raises(ConfigError, match=rf'schedule = "{name}": sends rows to all shards'):
        planned(name, shape, dispatch=LEGS)
    alone = StepShape(moe_layers=(True,), dispatch=hops)
    assert planned(name, alone, dispatch=LEGS).graph == planned("sequential", alone, dispatch=LEGS).graph


# ---- set, told, saved --------------------------------------------------------------------------------------


def test_it_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "schedule.toml"
    file.write_text('name = "flowmoe"\nexpert_form = "s2"\n')
    assert load(ScheduleConfig, file).decision("flat").form == "s2"
    assert load(ScheduleConfig, file, ["expert_form=none"]).expert_form is None
    assert load(ScheduleConfig, file, ["name=parm_s1"]).decision("flat").form == "s1"
    with pytest.raises(ConfigError, match="expert_form") as caught:
        load(ScheduleConfig, file, ["expert_form=s3"])
    assert "s2" in str(caught.value) and "baseline" in str(caught.value)


def test_it_is_told_of_where_it_is_set() -> None:
    plain = Decision(schedule="lina")
    assert "form" not in plain.words
    assert replace(plain, expert_form="s1").words == (
        "lina: no chunks, all-reduce in pieces of 1.0 MiB, flat dispatch, expert form s1"
    )
    assert "form" not in replace(plain, schedule="fsmoe", expert_form="s1").words


def test_it_has_a_column_where_some_plan_sets_it() -> None:
    each = shared()
    names = ("lina", "parm_s2")
    candidates = [evaluate(each, Decision(schedule=name, chunks=2)) for name in names]
    assert "form" not in _table(candidates, 110, dispatches=False).splitlines()[0]
    candidates.append(evaluate(each, Decision(schedule="lina", expert_form="s2")))
    head, *rows = _table(candidates, 110, dispatches=False).splitlines()
    place = head.index("form")
    assert [row[place:].split()[0] for row in rows[:3]] == ["-", "-", "s2"]


def test_a_plan_file_keeps_it_and_older_ones_leave_it_to_the_schedule(tmp_path: Path) -> None:
    each, path = shared(), tmp_path / "plan.json"
    found = evaluate(each, Decision(schedule="lina", expert_form="s2"))
    PlanFile.of(each, found, model="m", cluster="c").save(path)
    file = PlanFile.read(path)
    assert file.choice == found.choice
    assert file.step_plan(each).digest == found.plan.digest
    table = json.loads(path.read_text())
    del table["choice"]["expert_form"]
    table["schedule"] = None
    path.write_text(json.dumps(table))
    assert PlanFile.read(path).choice.form == "gather"


def test_simultaneous_slices_are_chunks_of_one_number() -> None:
    """Backward is cut as forward is, whatever a decision says that the schedule does not read."""
    choice = decision("parm_s2", chunks=4, backward_chunks=3)
    choice.check()
    assert choice.degrees == (4, 4)
    assert choice.words == "parm_s2: 4 chunks, flat dispatch"
    assert ScheduleConfig(name="parm_s2").decision("flat").degrees == (2, 2)


def test_slices_are_told_where_something_is_gathered_in_them() -> None:
    said = Decision(schedule="parm_s2", chunks=2, backward_chunks=2)
    asked = problem((True,))
    assert in_effect(with_sharing(asked, 2, 2), said) == said
    assert in_effect(with_sharing(asked, 1, 2), said).words.startswith("parm_s2: no chunks")
