"""A decision from the documentation: nothing of it stands in the package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.config import ConfigError, Table, load, to_dict, to_toml
from penstock.decision import Decision, ScheduleConfig
from penstock.decision.record import FIELDS
from penstock.graph import ScheduleError
from penstock.models import ModelConfig
from penstock.moe import MoEConfig
from penstock.plan import PlanFile, Subject, evaluate, explain, find_plan
from penstock.plan.space import neighbours, space
from penstock.report.plan import PlanReport
from penstock.train.assemble import build_stack
from penstock.train.config import RunConfig
from tests.plan.problems import problem
from tests.support.pages import EXTENDING, blocks, run_block
from tests.support.parity import executed_as_planned, logical, machinery
from tests.support.ranks import Pools

RANKS = 2
LATE = Table({"late_weights": True})
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_len=8, vocab_size=32)
MOE = MoEConfig(num_experts=4, top_k=2, moe_ffn_hidden_size=12)


@contextmanager
def own_decision() -> Iterator[None]:
    """What the page registers; everything is as before afterwards."""
    before = dict(FIELDS)
    try:
        (code,) = blocks(EXTENDING, "A decision")
        run_block(code)
        yield
    finally:
        FIELDS.clear()
        FIELDS.update(before)


@pytest.fixture
def page() -> Iterator[None]:
    with own_decision():
        yield


@pytest.mark.usefixtures("page")
def test_it_is_searched() -> None:
    choices = list(space(problem()))
    assert {choice.value("late_weights") for choice in choices if choice.schedule == "lina"} == {False, True}
    assert not any(choice.value("late_weights") for choice in choices if choice.schedule == "penstock")
    near = list(neighbours(problem(), Decision(schedule="flowmoe")))
    assert Decision(schedule="flowmoe", more=LATE) in near


@pytest.mark.usefixtures("page")
def test_it_changes_the_step() -> None:
    usual, late = (evaluate(problem(), Decision(more=more)).plan for more in (Table(), LATE))
    assert {str(task.phase) for task in usual.graph.tasks if task.op == "X"} == {"F", "B"}
    assert {str(task.phase) for task in late.graph.tasks if task.op == "X"} == {"F", "I", "W"}
    with pytest.raises(ScheduleError, match="weight_gradients stands twice"):
        evaluate(problem(), Decision(schedule="penstock", more=LATE))


@pytest.mark.slow
@pytest.mark.usefixtures("page")
def test_it_is_told_and_shown() -> None:
    each = problem()
    found = find_plan(each, effort="low")
    subject = Subject(title="tiny", cluster_name="two-nodes", problem=each)
    report = PlanReport(subject=subject, found=found, explanation=explain(each, found), seconds=1.0)
    shown = " ".join(report.to_text(200).split())
    assert f"late_weights {found.best.choice.value('late_weights')}" in shown
    assert "schedule order late_weights R" in shown
    assert Decision(more=LATE).words == "sequential: whole batch, flat dispatch, late_weights True"


@pytest.mark.usefixtures("page")
def test_a_plan_file_keeps_it(tmp_path: Path) -> None:
    found = evaluate(problem(), Decision(schedule="flowmoe", more=LATE))
    path = tmp_path / "plan.json"
    PlanFile.of(problem(), found, model="tiny", cluster="two-nodes").save(path)
    file = PlanFile.read(path)
    assert file.choice == found.choice
    assert file.step_plan(problem()).digest == found.plan.digest


@pytest.mark.usefixtures("page")
def test_a_configuration_sets_it(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[schedule.more]\nlate_weights = true\n")
    config = load(RunConfig, path)
    assert config.schedule.more == LATE
    assert load(RunConfig, None, ["schedule.more.late_weights=true"]) == config
    assert not load(RunConfig, path, ["schedule.more.late_weights=false"]).schedule.value("late_weights")
    path.write_text(to_toml(config))
    assert load(RunConfig, path) == config
    assert to_dict(config.schedule)["more"] == {"late_weights": True}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("schedule.more.late_weights=2", "schedule.more.late_weights = 2: must be true or false"),
        ("schedule.more.early=true", "Registered: late_weights."),
        ("schedule.more=3", "schedule.more = 3: must be a table of names and values"),
        ("schedule.more.microbatches=2", "Set it beside more."),
    ],
)
@pytest.mark.usefixtures("page")
def test_what_it_cannot_be_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, None, [override])
    assert words in str(caught.value)


def test_without_it_the_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"more\.late_weights = true: no such decision is registered"):
        ScheduleConfig(more=LATE)


def step(rank: int, late: bool) -> tuple[float, dict[str, Tensor], bool, set[str]]:
    with own_decision():
        schedule = ScheduleConfig(name="flowmoe", more=LATE if late else Table())
        config = RunConfig(model=MODEL, moe=MOE, schedule=schedule)
        stack = build_stack(config, machinery(RANKS, RANKS, rank), torch.float64)
        text = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(rank))
        loss = stack(text[:, :-1], text[:, 1:])
        loss.backward()
        gradients = {name: p.grad for name, p in stack.model.named_parameters() if p.grad is not None}
        ran = {str(record.task.phase) for record in stack.records() if record.task.op == "X"}
        return loss.item(), logical(stack, gradients), executed_as_planned(stack), ran


def test_two_ranks_run_it_and_gradients_are_as_without_it(ranks: Pools) -> None:
    pool = ranks(RANKS)
    for usual, late in zip(pool.run(step, False), pool.run(step, True), strict=True):
        assert late[2] and late[3] == {"F", "I", "W"} and usual[3] == {"F", "B"}
        assert late[0] == pytest.approx(usual[0], rel=1e-12)
        for name, gradient in late[1].items():
            assert (gradient - usual[1][name]).norm() <= 1e-10 * usual[1][name].norm(), name


@pytest.mark.usefixtures("page")
def test_deciding_the_default_is_deciding_nothing() -> None:
    """Two plans that are one have one description, one file and one place in what a search knows."""
    plain = Decision(schedule="flowmoe")
    assert Decision(schedule="flowmoe", more=LATE).deciding("late_weights", False) == plain
    assert plain.deciding("late_weights", True).more == LATE
