"""Rows travel rounded only where the user allows it, and then it is said what that saves."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from penstock.autotune.planned import with_choice
from penstock.autotune.problem import assumed_problem
from penstock.config import ConfigError
from penstock.cost import ClusterConfig
from penstock.decision import Decision
from penstock.decision.record import FIELDS, RowForm
from penstock.moe import MoEConfig
from penstock.plan import PlanFile, explain, find_plan
from penstock.plan.plan_config import PlanConfig
from penstock.plan.space import values
from penstock.topology import Layout
from penstock.train.config import RunConfig
from tests.plan.problems import problem

EVERY = get_args(RowForm)
LAYOUT = Layout(world_size=4, ep_size=4, rank=0, node_size=2)


@pytest.mark.slow
def test_a_search_that_may_rounds_rows_and_says_what_that_saves() -> None:
    slow_link = ClusterConfig(flops_per_s=1e12, memory_bytes_per_s=1e11, link_bytes_per_s=2e7)
    given = problem(dispatches=("flat", "node_once"), cluster=slow_link)
    open_ = replace(given, comm_dtypes=EVERY)
    exact, rounded = (find_plan(each, effort="low") for each in (given, open_))
    assert exact.best.choice.comm_dtype == "none"
    assert rounded.best.choice.comm_dtype == "int8"
    assert rounded.best.predicted_s < exact.best.predicted_s
    first = explain(open_, rounded).lines[0]
    assert "rows as int8" in first and "rounded: plan.comm_dtype" in first
    assert "rounded" not in explain(given, exact).lines[0]
    file = PlanFile.of(open_, rounded.best, model="tiny", cluster="two-nodes", why=())
    assert file.step_plan(open_).schedule == rounded.best.plan.schedule
    with pytest.raises(ConfigError, match=r"Set plan\.comm_dtype=auto"):
        file.step_plan(given)


def test_rows_that_are_joined_are_not_rounded_too() -> None:
    each = replace(problem(dispatches=("flat", "node_once")), comm_dtypes=EVERY)
    tried = {
        name: values(each, Decision(dispatch=name), FIELDS["comm_dtype"]) for name in ("flat", "node_once")
    }
    assert tried == {"flat": EVERY, "node_once": ("none",)}


@pytest.mark.slow
def test_only_the_user_opens_the_choice_and_what_was_chosen_stays() -> None:
    exact = RunConfig(moe=MoEConfig(num_experts=4))
    lossy = replace(exact, plan=PlanConfig(mode="auto", comm_dtype="auto"))
    assert assumed_problem(exact, LAYOUT).comm_dtypes == ("none",)
    assert assumed_problem(lossy, LAYOUT).comm_dtypes == EVERY
    taken = with_choice(lossy, Decision(comm_dtype="bfloat16"))
    assert (taken.moe.comm_dtype, taken.plan.comm_dtype) == ("bfloat16", "given")
    assert assumed_problem(taken, LAYOUT).comm_dtypes == ("none",)
    assert with_choice(lossy, Decision()).moe.comm_dtype is None
