"""Whether moving pays, by simulation: with skewed and even routing, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.cost import ClusterConfig, routing_sizes
from penstock.cost.placed import Evidence
from penstock.decision import Decision, Movable, PlacementConfig
from penstock.features.expert_replicas.planners import PLANNERS, planning_s
from penstock.features.expert_replicas.prices import planned_replications, planning_share, replica_planning_s
from penstock.features.expert_replicas.problem import ExpertCosts
from penstock.features.sample_placement.prices import SampleMover
from penstock.graph import Graph, RefusalError, ScheduleError
from penstock.ops import Op
from penstock.plan import Problem, Subject, evaluate, explain, find_plan
from penstock.plan.moving import WORTH, in_full, weigh, with_routing
from penstock.plan.predict import closing_s
from penstock.report.plan import PlanReport
from penstock.step.rewrite import Stage
from penstock.workloads import RoutingConfig, routing_of
from tests.plan.problems import problem
from tests.support.searching import short_search

CHOICE = Decision(schedule="moe_pipeline")
Costs = Sequence[ExpertCosts]


def routed(text: str, movable: Movable) -> Problem:
    each = problem()
    routing = routing_of(RoutingConfig.parse(text), routing_sizes(each.workload, 2))
    return replace(each, evidence=Evidence(routing.counts(0), routing.counts(1)), movable=movable)


@pytest.mark.parametrize("planner", ["pro_prophet", "shadowing", "least_loaded", "planned"])
def test_replicas_pay_where_an_expert_is_hot(planner: str) -> None:
    movable = Movable(experts=("none", planner), replica_slots=(1, 2))
    found = weigh(routed("hot_expert,hot_share=0.5", movable), [CHOICE, Decision()])
    assert found.moves and found.best.choice.experts == planner
    assert found.best.predicted_s < WORTH * found.still.predicted_s
    base, line = found.lines
    assert base == (
        f"Moving   with the given routing instead of even routing, forward and backward take "
        f"{found.still.predicted} without moves"
    )
    assert line.startswith(f"Experts  {planner} with ") and ", pays; " in line
    assert " times the mean load, 1." in line


def test_moves_are_not_weighed_when_the_time_is_over() -> None:
    movable = Movable(experts=("none", "planned"), samples=("none", "netmoe"))
    each = routed("hot_expert,hot_share=0.5", movable)
    found = weigh(each, [CHOICE], ends=lambda: True)
    assert not found.moves and found.best == found.still == weigh(each, [CHOICE]).still
    assert any("planned" in line and "not weighed" in line for line in found.lines)


def test_even_routing_needs_none_and_it_is_said() -> None:
    found = weigh(routed("even", Movable(experts=("none", "planned"))), [CHOICE])
    assert not found.moves and found.best == found.still
    assert found.lines[1].startswith("Experts  planned with 1 replica slot: ")
    assert ", does not pay; " in found.lines[1]
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
    each = replace(each, passes=3)
    weighed = weigh(each, [CHOICE])
    found = find_plan(problem(), budget=0.01, effort="low")
    subject = Subject(title="a model", cluster_name="a cluster", problem=problem())
    report = PlanReport(
        subject=subject, found=found, explanation=explain(problem(), found), seconds=1.0, weighed=weighed
    )
    text = " ".join(report.to_text(200).split())
    assert all(" ".join(line.split()) in text for line in weighed.lines)
    assert f"Placed {weighed.best.choice.words}" in text
    moving = report.to_dict()["moving"]
    assert moving["pays"] and moving["best"]["experts"] == "planned" and moving["still"]["experts"] == "none"
    for name, plan in (("best", weighed.best), ("still", weighed.still)):
        update_s = 3 * plan.predicted_s + closing_s(each)
        assert moving[name]["predicted_s"] == pytest.approx(update_s), "every pass is routed so"


def test_ranks_wait_as_their_loads_differ() -> None:
    """The hot rank of a layer has 40 % of the rows of four: the others wait for it, and it for nobody."""
    one = routed("hot_rank,hot_share=0.4", Movable()).only((0,))
    first, *others = sorted(one.paces, reverse=True)
    assert first == pytest.approx(4 * 0.4, rel=0.1)
    assert others == pytest.approx([4 * 0.2] * 3, rel=0.2)
    slow = replace(one, slowness=(2.0,) * 4)
    assert slow.paces == pytest.approx([2 * pace for pace in one.paces])


def test_what_does_not_fit_is_not_taken_and_that_is_said() -> None:
    few = problem(cluster=ClusterConfig(flops_per_s=2e9, link_bytes_per_s=2e8))
    few = replace(few, workload=replace(few.workload, seq_len=16))  # replicas need more than they take away
    movable = Movable(samples=("none", "netmoe"), experts=("none", "planned"))
    each = with_routing(few, RoutingConfig.parse("hot_expert,hot_share=0.7"), movable)
    free = weigh(each, [CHOICE])
    assert free.moves and free.best.memory_bytes > free.still.memory_bytes and free.fits
    tight = weigh(each, [CHOICE], memory_bytes=free.best.memory_bytes - 1)
    assert tight.best.memory_bytes <= free.still.memory_bytes and tight.best.choice.experts == "none"
    _, samples, experts = tight.lines
    assert samples.startswith("Samples  netmoe: ") and "not fit" not in samples
    assert experts.startswith("Experts  does not fit: planned with 1 replica slot needs ")


def test_what_alone_fits_is_taken_however_little_it_gains() -> None:
    """Replicas gain less than predictions err, but take rows from a rank that has no room for them."""
    quick = ClusterConfig(flops_per_s=1e15, link_bytes_per_s=2e8)
    each = problem((True,), batch=64, cluster=quick, all_reduce_bytes=1 << 24)
    each = replace(each, workload=replace(each.workload, ffn_hidden_size=5120))
    each = with_routing(each, RoutingConfig.parse("hot_expert"), Movable(experts=("none", "least_loaded")))
    free = weigh(each, [CHOICE])
    assert not free.moves and free.fits
    tight = weigh(each, [CHOICE], memory_bytes=free.still.memory_bytes - 1)
    assert not tight.fits and tight.moves and tight.best.memory_bytes < free.still.memory_bytes
    base, experts = tight.lines
    assert base.endswith(" per rank and does not fit") and "does not pay but fits" in experts


def test_what_was_weighed_by_a_quick_rule_gets_the_order_that_was_asked_for() -> None:
    each = routed("hot_expert,hot_share=0.5", Movable(experts=("none", "planned")))
    asked = Decision(schedule="penstock", priority="search")
    found = weigh(each, [asked])
    with short_search():
        full = in_full(each, found, asked)
    assert found.best.choice.priority == "critical_path"
    assert found.lines[0].endswith(" without moves (ordered by a quick rule, as with every move below)")
    assert full.best.choice == replace(found.best.choice, priority="search")
    assert full.best.predicted_s <= found.best.predicted_s
    assert in_full(each, replace(found, best=found.still), asked).best == found.still


def test_what_is_given_moves_in_every_plan_that_is_compared() -> None:
    movable = Movable(samples=("none", "netmoe"), experts=("planned",), replica_slots=(2,))
    found = weigh(routed("hot_expert,hot_share=0.5", movable), [CHOICE])
    for each in (found.still, found.best):
        assert (each.choice.experts, each.choice.replica_slots) == ("planned", 2)
    assert [line.split()[0] for line in found.lines] == ["Moving", "Samples"]


def on_16_ranks(text: str, **sizes: int) -> Problem:
    """Fast links, slow devices; all is open. sizes: other sizes of the workload."""
    each = problem(batch=8, cluster=ClusterConfig(flops_per_s=5e9, link_bytes_per_s=2e9))
    work = replace(each.workload, num_experts=16, world_size=16, ep_size=16, **sizes)  # type: ignore[arg-type]
    movable = PlacementConfig(samples="none").weighed
    return with_routing(replace(each, workload=work), RoutingConfig.parse(text), movable)


@pytest.mark.slow
def test_twice_the_replica_slots_are_taken_where_loads_drift_and_they_fit() -> None:
    drifting = on_16_ranks("slow_drift,drift=0.3", seq_len=16, ffn_hidden_size=1024)
    two = weigh(drifting, [CHOICE])
    assert (two.best.choice.experts, two.best.choice.replica_slots) == ("planned", 2)
    assert two.lines[1].startswith("Experts  planned with 2 replica slots: ")
    one = weigh(drifting, [CHOICE], memory_bytes=two.best.memory_bytes - 1)
    assert one.best.choice.replica_slots == 1 and "with 1 replica slot: " in one.lines[1]
    assert two.best.predicted_s < WORTH * one.best.predicted_s
    steady = weigh(on_16_ranks("hot_expert,hot_share=0.7"), [CHOICE])
    assert steady.moves and steady.best.choice.replica_slots == 1, "a second one would bring next to nothing"


def test_moves_that_a_step_cannot_have_are_named_with_the_reason() -> None:
    each = routed("even", Movable(samples=("none", "netmoe"), experts=("none", "planned")))
    slots = replace(each, shape=replace(each.shape, exchange_counts=False))
    found = weigh(slots, [CHOICE])
    samples, experts = found.lines
    assert samples.startswith("Samples  not weighed: netmoe: pass sample_moves: layer 0 has a fixed number")
    assert experts.startswith("Experts  not weighed: planned: replica_slots: every expert has a fixed number")
    assert not found.moves and found.best == found.still
    with pytest.raises(RefusalError, match=r"no plan to compare moves with: pass sample_moves: layer 0 has"):
        weigh(replace(slots, movable=Movable(samples=("netmoe",))), [CHOICE])


def test_some_planners_are_weighed_where_others_cannot_be() -> None:
    exact = replace(CHOICE, split="exact")
    found = weigh(routed("hot_expert,hot_share=0.5", PlacementConfig(split="exact").weighed), [exact])
    assert found.moves and found.best.choice.experts in ("planned", "least_loaded")
    left_out = [line for line in found.lines if "not weighed" in line]
    assert [line.partition(": placement.split = exact: ")[0] for line in left_out] == [
        "Experts  not weighed: pro_prophet",
        "Experts  not weighed: shadowing",
        f"Both     not weighed: netmoe and {found.best.choice.experts}",
    ]


def test_what_stays_with_the_best_plan_is_said() -> None:
    each = problem(dispatches=("node_once",))
    asked = with_routing(each, RoutingConfig.parse("even"), Movable(samples=("none", "netmoe")))
    (line,) = weigh(asked, [Decision(dispatch="node_once")]).lines
    assert line == "Samples  not weighed: moe.dispatch=node_once sends one row for several experts"
    assert weigh(replace(asked, movable=Movable()), [Decision(dispatch="node_once")]).lines == ()


@dataclass(frozen=True)
class ForgetsToReduce:
    """A pass that is wrong only in steps whose experts move."""

    name = "forgets_to_reduce"
    stage = Stage.GRADIENTS

    def __call__(self, graph: Graph) -> Graph:
        moves = any(task.op == Op.REPLICA_PARAMETERS for task in graph.tasks)
        return Graph.of(task for task in graph.tasks if not (moves and task.op == Op.ALL_REDUCE))


def test_a_step_that_is_wrong_is_no_move_that_cannot_be_had() -> None:
    each = routed("even", Movable(experts=("none", "planned")))
    wrong = replace(each, shape=replace(each.shape, more=(ForgetsToReduce(),)))
    with pytest.raises(ScheduleError, match="gradients of L0 are not reduced"):
        weigh(wrong, [CHOICE])


def test_samples_are_priced_where_the_settings_would_put_them() -> None:
    each = routed("dirichlet,dirichlet_concentration=0.1", Movable(samples=("none", "netmoe")))
    choice = replace(CHOICE, samples="netmoe")
    blind = replace(each, placement=PlacementConfig(prediction="none", solver="kuhn_munkres"))
    cut = each.cut(choice)
    mover = SampleMover(work=each.workload, shape=cut, solver="kuhn_munkres", predicts=False)
    wanted = mover.placed(each.evidence.now_DBYE) if each.evidence else None
    found, usual = blind.placed(choice, cut), each.placed(choice, cut)
    assert found is not None and usual is not None and wanted is not None
    assert (found.held_YDB == wanted.held_YDB).all() and (found.held_YDB != usual.held_YDB).any()


def test_replicas_are_priced_with_the_slack_that_the_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Costs] = []

    def noted(*given: Any) -> Any:
        seen.append(given[4])
        return planned_replications(*given)

    monkeypatch.setattr("penstock.plan.problem.planned_replications", noted)
    each = routed("hot_expert,hot_share=0.5", Movable(experts=("none", "planned")))
    choice = replace(CHOICE, experts="planned")
    assert each.placed(choice, each.cut(choice)) is not None
    (costs,) = seen
    hidden_s = [costs_of_layer.slack_s(1e9) for costs_of_layer in costs]
    assert len(hidden_s) == 2 and max(map(max, hidden_s)) < 1e9, "not what Eq 8 takes for it"


@pytest.mark.parametrize("planner", PLANNERS)
def test_planning_replicas_takes_as_long_whenever_it_is_asked(planner: Any) -> None:
    movable = Movable(experts=("none", planner))
    choice = replace(CHOICE, experts=planner)
    found = []
    for each in (routed("hot_expert,hot_share=0.5", movable) for _ in range(2)):
        plan = each.plan(choice)
        placed, cost = each.placed(choice, plan.shape), each.cost(choice, plan.shape)
        (task,) = [task for task in plan.graph.tasks if task.op == Op.PLAN_REPLICAS]
        assert placed is not None and 0 < placed.planning_s <= float(cost(task)[0])
        found.append((placed.planning_s, evaluate(each, choice).predicted_s))
    assert found[0] == found[1]


def test_ranks_plan_their_layers_side_by_side() -> None:
    work = routed("even", Movable()).workload
    assert planning_share(work, 2) == 0.5, "two layers on four ranks: some plan one, some none"
    one = planning_s("planned", 4, 4)
    assert [replica_planning_s(work, "planned", layers) for layers in (1, 4, 5)] == [one, one, 2 * one]
