"""Moving samples and experts as decisions: set, searched, told of, and saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import ConfigError, load, to_toml
from penstock.decision import Decision, Movable, PlacementConfig, ScheduleConfig
from penstock.features.expert_replicas.prices import splits_exactly
from penstock.graph import ScheduleError
from penstock.plan import PlanFile, evaluate
from penstock.plan.space import neighbours, space
from penstock.report.plan import _table
from penstock.schedule import SCHEDULES, cut
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS
from penstock.train.config import RunConfig
from tests.plan.problems import problem
from tests.steps import SHARED, gradients_of
from tests.test_expert_form import shared

BOTH = Movable(samples=("none", "netmoe"), experts=("none", "planned"), replica_slots=(1, 2))


def test_it_is_a_section_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[placement]\nsamples = "netmoe"\nexperts = "pro_prophet"\nreplica_slots = 2\n')
    config = load(RunConfig, file, ["placement.every=10", "placement.split=last_step"])
    choice = config.schedule.decision("flat", config.placement)
    assert (choice.samples, choice.experts, choice.replica_slots) == ("netmoe", "pro_prophet", 2)
    assert choice.split == "last_step"
    file.write_text(to_toml(config))
    assert load(RunConfig, file) == config
    assert choice.in_placement(config.placement) == config.placement
    with pytest.raises(ConfigError, match="there is no such setting"):
        load(ScheduleConfig, None, ["samples=netmoe"])
    with pytest.raises(ConfigError, match="replica_slots = 0: must be from 1 to 64"):
        load(RunConfig, None, ["placement.replica_slots=0"])
    with pytest.raises(ConfigError, match="Did you mean pro_prophet"):
        load(RunConfig, None, ["placement.experts=prophet"])


def test_by_default_nothing_moves() -> None:
    for placement in (None, PlacementConfig(), PlacementConfig(replica_slots=3)):
        choice = ScheduleConfig().decision("flat", placement)
        assert (choice.samples, choice.experts, choice.num_replica_slots) == ("none", "none", 0)
        assert "move" not in choice.words


def test_twice_the_replica_slots_are_weighed_where_it_is_open_how_experts_move() -> None:
    assert PlacementConfig(replica_slots=3).weighed.replica_slots == (3, 6)
    assert PlacementConfig(replica_slots=64).weighed.replica_slots == (64,)
    assert PlacementConfig(replica_slots=3, experts="planned").weighed.replica_slots == (3,)
    assert PlacementConfig(replica_slots=3).movable.replica_slots == (3,)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_cuts_a_step_that_moves(name: str) -> None:
    shape = StepShape(moe_layers=(True, False))
    plain, moving = Decision(schedule=name), Decision(schedule=name, samples="netmoe", experts="planned")
    found = cut(replace(moving, replica_slots=2), shape, gradients_of(shape))
    assert (found.moves_samples, found.replica_slots, found.gathers_loads) == (True, 2, True)
    still = replace(found, moves_samples=False, replica_slots=0, gathers_loads=False)
    assert still == cut(plain, shape, gradients_of(shape))


def test_what_may_move_is_searched_where_rows_are_gathered() -> None:
    each = replace(shared(SHARED), movable=BOTH)
    tried = {(d.form, d.samples, d.experts, d.replica_slots) for d in space(each)}
    moved = {(s, e, n) for s in BOTH.samples for e, n in (("none", 1), ("planned", 1), ("planned", 2))}
    others = {(form, "none", "none", 1) for form in FORM_TOKENS}
    assert tried == {("gather", *values) for values in moved} | others
    assert not any(d.samples != "none" or d.num_replica_slots for d in space(problem()))
    assert all(near.form == "gather" for near in neighbours(each, Decision()) if near.samples != "none")


def test_it_is_told_of_and_has_columns_where_some_plan_moves() -> None:
    plain = Decision()
    moving = replace(plain, samples="netmoe", experts="least_loaded", replica_slots=2)
    assert replace(moving, experts="none").words == f"{plain.words}, samples move (netmoe)"
    assert moving.words.endswith(
        "samples move (netmoe), experts move (least_loaded, 2 replica slots per rank)"
    )
    candidate = evaluate(problem(), plain)
    assert "samples" not in _table([candidate], 110, dispatches=False)
    head, first, second, *_ = _table(
        [candidate, replace(candidate, choice=moving)], 140, dispatches=False
    ).splitlines()
    assert first[head.index("samples") :].split()[:2] == ["-", "-"]
    assert second[head.index("samples") :].split()[:3] == ["netmoe", "least", "loaded"]


def test_a_plan_file_keeps_it_and_older_ones_move_nothing(tmp_path: Path) -> None:
    each, path = problem(), tmp_path / "plan.json"
    found = evaluate(each, Decision(schedule="lina"))
    moving = replace(found.choice, samples="netmoe", experts="planned", replica_slots=2)
    PlanFile.of(each, replace(found, choice=moving), model="m", cluster="c").save(path)
    assert PlanFile.read(path).choice == moving
    table = json.loads(path.read_text())
    for name in ("samples", "experts", "replica_slots"):
        del table["choice"][name]
    path.write_text(json.dumps(table))
    file = PlanFile.read(path)
    assert file.choice == found.choice
    assert file.step_plan(each).digest == found.plan.digest


def test_rows_are_split_by_the_loads_of_their_step_where_they_can_be() -> None:
    work = problem().workload
    assert splits_exactly(Decision(experts="planned"), work)
    for other in (
        Decision(experts="planned", split="last_step"),
        Decision(experts="planned", samples="netmoe"),
        Decision(experts="shadowing"),
        Decision(experts="planned", dispatch="node_once"),
    ):
        assert not splits_exactly(other, work)
    asked = Decision(experts="planned", split="exact")
    assert splits_exactly(asked, work) and not splits_exactly(
        replace(asked, experts="none", dispatch="node_once"), work
    )
    assert "(planned, a replica slot per rank, split by the loads of each step)" in asked.words
    with pytest.raises(
        ConfigError, match=r'placement.split = "exact": moe.one_copy_per_rank=true sends one row for'
    ):
        splits_exactly(asked, replace(work, one_copy_per_rank=True))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            Decision(experts="pro_prophet", split="exact"),
            "placement.experts=pro_prophet gives replicas the rows of their own ranks",
        ),
        (
            Decision(experts="planned", split="exact", samples="netmoe"),
            "placement.samples=netmoe places samples by where their rows go",
        ),
        (
            Decision(experts="planned", split="exact", dispatch="node_once"),
            "moe.dispatch=node_once sends one row for several experts",
        ),
    ],
)
def test_an_exact_split_that_cannot_be_is_refused_where_it_is_asked_for(asked: Decision, words: str) -> None:
    shape = StepShape(moe_layers=(True,))
    with pytest.raises(
        ScheduleError, match=f"placement.split = exact: {words}, so .* placement.split=last_step"
    ):
        cut(asked, shape, gradients_of(shape))
    cut(replace(asked, split="auto"), shape, gradients_of(shape))


def test_replicas_travel_in_pieces_where_gradients_do() -> None:
    shape = StepShape(moe_layers=(True,))
    gradients = gradients_of(shape)._replace(expert=700)
    for name, pieces in (("flowmoe", 6), ("sequential", 1)):
        choice = Decision(schedule=name, experts="planned", replica_slots=2, all_reduce_chunk_bytes=256)
        assert cut(choice, shape, gradients).replica_pieces == pieces
        assert cut(replace(choice, experts="none"), shape, gradients).replica_pieces == 1
    assert (
        cut(
            Decision(schedule="lina", experts="planned", all_reduce_chunk_bytes=1), shape, gradients
        ).replica_pieces
        == 64
    )
