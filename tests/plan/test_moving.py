"""Whether moving pays, by simulation: with skewed and even routing, and in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cost import routing_sizes
from penstock.cost.placed import Evidence
from penstock.decision import Decision, Movable
from penstock.plan import Problem, Subject, explain, find_plan
from penstock.plan.moving import WORTH, weigh, with_routing
from penstock.report.plan import PlanReport
from penstock.workloads import RoutingConfig, routing_of
from tests.plan.problems import problem

CHOICE = Decision(schedule="moe_pipeline")


def routed(text: str, movable: Movable) -> Problem:
    each = problem()
    routing = routing_of(RoutingConfig.parse(text), routing_sizes(each.workload, 2))
    return replace(each, evidence=Evidence(routing.counts(0), routing.counts(1)), movable=movable)


@pytest.mark.parametrize("planner", ["pro_prophet", "shadowing", "least_loaded", "planned"])
def test_guests_pay_where_an_expert_is_hot(planner: str) -> None:
    movable = Movable(experts=("none", planner), guest_slots=(1, 2))
    found = weigh(routed("hot_expert,hot_share=0.5", movable), [CHOICE, Decision()])
    assert found.moves and found.best.choice.experts == planner
    assert found.best.predicted_s < WORTH * found.still.predicted_s
    (line,) = found.lines
    assert line.startswith(f"Experts  moving pays: {planner} with ")
    assert " times the mean load, 1." in line


def test_even_routing_needs_none_and_it_is_said() -> None:
    found = weigh(routed("even", Movable(experts=("none", "planned"))), [CHOICE])
    assert not found.moves and found.best == found.still
    assert found.lines[0].startswith("Experts  moving does not pay: planned with 1 guest slot would take ")
    assert weigh(routed("even", Movable()), [CHOICE]).lines == ()


def test_a_step_is_priced_by_how_it_is_routed_and_layers_keep_their_own() -> None:
    each = routed("hot_expert", Movable())
    assert each.evidence is not None
    shape = each.cut(CHOICE)
    task = next(task for task in each.plan(CHOICE).graph.tasks if task.op == "X" and task.layer == 1)
    alone = each.only((1,))
    first = replace(task, name=task.name._replace(layer=0))
    assert (alone.cost(CHOICE, alone.cut(CHOICE))(first) == each.cost(CHOICE, shape)(task)).all()
    slow = replace(each, slowness=(1.0, 2.0, 1.0, 1.0))
    assert slow.cost(CHOICE, shape)(task)[1] == 2 * each.cost(CHOICE, shape)(task)[1]


def test_a_report_says_what_follows_from_a_routing() -> None:
    each = with_routing(problem(), RoutingConfig.parse("hot_expert"), Movable(experts=("none", "planned")))
    weighed = weigh(each, [CHOICE])
    found = find_plan(problem(), budget=0.01, effort="low")
    subject = Subject(title="a model", cluster_name="a cluster", problem=problem())
    report = PlanReport(
        subject=subject, found=found, explanation=explain(problem(), found), seconds=1.0, weighed=weighed
    )
    text = " ".join(report.to_text(200).split())
    assert weighed.lines[0].removeprefix("Experts").strip() in text
    assert f"Placed {weighed.best.choice.words}" in text
    moving = report.to_dict()["moving"]
    assert moving["pays"] and moving["best"]["experts"] == "planned" and moving["still"]["experts"] == "none"


def test_ranks_wait_as_their_loads_differ() -> None:
    """The hot rank of a layer has 40 % of the rows of four: the others wait for it, and it for nobody."""
    one = routed("hot_rank,hot_share=0.4", Movable()).only((0,))
    first, *others = sorted(one.paces, reverse=True)
    assert first == pytest.approx(4 * 0.4, rel=0.1)
    assert others == pytest.approx([4 * 0.2] * 3, rel=0.2)
    slow = replace(one, slowness=(2.0,) * 4)
    assert slow.paces == pytest.approx([2 * pace for pace in one.paces])
