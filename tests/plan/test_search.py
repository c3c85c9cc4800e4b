"""The joint search against brute force, against the published planners, and against itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given

from penstock.config import ConfigError
from penstock.cost import ClusterConfig
from penstock.decision import Decision, Field, register, unregister
from penstock.plan import (
    Candidate,
    FoundPlan,
    Problem,
    Progress,
    estimate_memory,
    evaluate,
    find_plan,
)
from penstock.plan import search as module
from penstock.plan.effort import Effort
from penstock.plan.published import PUBLISHED
from penstock.plan.space import neighbours, settled, space, valid
from tests.plan.problems import problem, problems
from tests.support.draws import draws


@pytest.fixture
def few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A space that brute force can walk."""
    from penstock.decision import record

    monkeypatch.setattr(record, "CHUNKS", (1, 2))
    monkeypatch.setattr(record, "ALL_REDUCE_PIECES", (1, 4))


@pytest.fixture(scope="module")
def usual() -> tuple[FoundPlan, list[Progress]]:
    """The plan of the usual problem, and what was told on the way."""
    steps: list[Progress] = []
    return find_plan(problem(), progress=steps.append), steps


@pytest.mark.slow
@pytest.mark.usefixtures("few_pieces")
@draws(12)
@given(problems())
def test_no_choice_is_better_than_the_plan(each: Problem) -> None:
    """Brute force simulates all; the search, which leaves most out, must not miss the best."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.SEARCHED, "usual", 0)
        found = find_plan(each, budget=1000)
    assert found.searched.complete
    everything = [evaluate(each, choice).predicted_s for choice in space(each)]
    assert found.best.predicted_s <= min(everything) * (1 + 1e-12)
    assert found.lower_bound_s <= found.best.predicted_s * (1 + 1e-12)


@pytest.mark.slow
def test_schedules_are_compared_by_the_dispatch_of_the_best() -> None:
    """A search that its budget ends had simulated some with the slow dispatch only."""
    slow_links = ClusterConfig(
        flops_per_s=2e11, link_bytes_per_s=5e7, intra_bytes_per_s=5e9, task_overhead_s=2e-5
    )
    each = problem((True,) * 12, dispatches=("flat", "node_once"), cluster=slow_links)
    found = find_plan(each, budget=0.3)
    assert found.searched.stopped is not None and found.best.choice.dispatch == "node_once"
    compared = {other.choice.schedule: other for other in reversed(found.others)}
    assert {"sequential", "moe_pipeline", "flowmoe"} <= compared.keys() | {found.best.choice.schedule}
    for other in compared.values():
        same = settled(each, replace(other.choice, dispatch="node_once"))
        assert other.predicted_s <= evaluate(each, same).predicted_s


@pytest.mark.slow
def test_partition_is_tried_with_the_best_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Degrees are searched with all of a layer's gradients in one gap, then gaps are planned for the best."""
    each, looked = problem((True, True, True)), []

    def noted(problem: Problem, choice: Decision) -> Candidate:
        found = evaluate(problem, choice)
        if problem is each and choice.schedule == "fsmoe":
            looked.append((found.predicted_s, choice))
        return found

    monkeypatch.setattr(module, "evaluate", noted)
    find_plan(each)
    published = PUBLISHED["fsmoe"](each)
    assert published.partition is not None
    best = min(looked, key=lambda pair: pair[0])[1]
    assert replace(best, partition=published.partition) in [choice for _, choice in looked]
    assert len({(choice.chunks, choice.backward_chunks) for _, choice in looked}) > 1


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("effort", ["low", "usual"])
@pytest.mark.parametrize("batch", [1, 4])
def test_never_worse_than_a_published_planner(effort: Effort, batch: int) -> None:
    each = problem(batch=batch)
    found = find_plan(each, effort=effort)
    for name, planner in PUBLISHED.items():
        assert found.best.predicted_s <= evaluate(each, planner(each)).predicted_s, name


@pytest.mark.slow
def test_the_same_problem_has_the_same_plan(usual: tuple[FoundPlan, list[Progress]]) -> None:
    first, second = usual[0], find_plan(problem())
    assert first.best.choice == second.best.choice
    assert first.best.plan.schedule.digest == second.best.plan.schedule.digest
    assert [each.choice for each in first.others] == [each.choice for each in second.others]


@pytest.mark.slow
def test_the_plan_is_what_it_says(usual: tuple[FoundPlan, list[Progress]]) -> None:
    each, (found, _) = problem(), usual
    best = found.best
    best.plan.schedule.check(best.plan.graph)
    assert evaluate(each, best.choice).predicted_s == best.predicted_s
    assert best.bound.seconds <= best.predicted_s
    assert best.memory_bytes == estimate_memory(each, best.choice).total_bytes
    seconds = [other.predicted_s for other in found.others]
    assert seconds == sorted(seconds) and best.predicted_s <= seconds[0]
    assert {other.choice.schedule for other in found.others} >= {"sequential", "moe_pipeline", "flowmoe"}


@pytest.mark.slow
def test_local_search_is_no_worse_than_its_rules(
    usual: tuple[FoundPlan, list[Progress]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.SEARCHED, "usual", 0)
    assert usual[0].best.predicted_s <= find_plan(problem()).best.predicted_s


@pytest.mark.parametrize("bandwidth", [2e8, 2e9])
def test_nothing_that_differs_in_one_decision_is_better_than_a_quick_plan(bandwidth: float) -> None:
    """It goes down until no neighbour is better, and what bounds rule out is not."""
    each = problem(batch=8)
    each = replace(each, cluster=replace(each.cluster, link_bytes_per_s=bandwidth))
    best = find_plan(each, effort="quick").best
    near = [evaluate(each, choice).predicted_s for choice in neighbours(each, best.choice)]
    assert best.predicted_s <= min(near) * (1 + 1e-12)


def test_progress_is_shown_and_never_goes_back(usual: tuple[FoundPlan, list[Progress]]) -> None:
    _, steps = usual
    assert {step.stage for step in steps} >= {"first plans", "published planners", "better orders"}
    best = [step.best_s for step in steps if step.best_s is not None]
    assert best == sorted(best, reverse=True)


# ---- long models -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_long_model_is_looked_at_through_a_short_one() -> None:
    long = problem((True,) * 40)
    short = module.sketch(long)
    assert short.shape.num_layers == module.FEW_LAYERS + 2
    told = list[Progress]()
    found = find_plan(long, progress=told.append)
    best = [step.best_s for step in told if step.best_s is not None]
    assert best == sorted(best, reverse=True)  # of the long model, also while the short one is looked at
    assert found.best.plan.shape.num_layers == 40
    for planner in PUBLISHED.values():
        assert found.best.predicted_s <= evaluate(long, planner(long)).predicted_s


def test_no_more_work_is_reported_than_is_allowed() -> None:
    told = list[Progress]()
    find_plan(problem(), budget=0.001, progress=told.append)
    assert told and all(step.done <= step.total for step in told)


def test_a_period_is_kept_whole() -> None:
    short = module.sketch(problem((False, *(True, False, False) * 8, True)))
    assert short.shape.moe_layers == (False, *(True, False, False) * 2, True)


def test_layers_that_do_not_repeat_are_all_kept() -> None:
    each = problem((True, False, True, True, False, False, True, True, True, False, True, False))
    assert module.sketch(each) is each


def test_a_thousand_ranks_and_64_layers() -> None:
    each = problem((True,) * 64)
    big = replace(
        each, workload=replace(each.workload, world_size=1024, expert_all_reduce_bytes=(4096,) * 64)
    )
    choice = Decision(schedule="penstock", microbatches=4, priority="critical_path")
    found = evaluate(big, choice)
    assert found.bound.seconds <= found.predicted_s
    timeline = big.simulate(choice, found.plan)
    assert timeline.iteration_s == found.predicted_s
    assert all(interval.end.shape == (1024,) for interval in list(timeline.times.values())[:5])


# ---- memory ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_does_not_fit_is_not_chosen() -> None:
    """Fewer microbatches need more for what is under way."""
    each = problem(batch=8)
    needs = sorted({estimate_memory(each, choice).total_bytes for choice in space(each)})
    room_bytes = needs[0]
    found = find_plan(each, memory_bytes=room_bytes)
    assert found.best.memory_bytes <= room_bytes < needs[-1]
    assert all(other.memory_bytes <= room_bytes for other in found.others)


def test_if_nothing_fits_the_error_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        find_plan(problem(), memory_bytes=1 << 20)
    text = str(caught.value)
    assert "1 MiB" in text and "most of it for weights" in text and "more nodes" in text


# ---- registered decisions ---------------------------------------------------------------------------------


WARMTH = Field(
    name="warmth",
    type=int,
    default=0,
    values=lambda asked, choice: (5, 7) if choice.reads("chunks") else (0,),
)


@pytest.fixture
def warmth() -> Iterator[None]:
    register(WARMTH)
    yield
    unregister(WARMTH.name)


@pytest.mark.slow
@pytest.mark.usefixtures("warmth")
def test_a_registered_decision_takes_part() -> None:
    found = {(choice.schedule, choice.value("warmth")) for choice in space(problem())}
    assert {("moe_pipeline", 5), ("moe_pipeline", 7), ("flowmoe", 0)} <= found
    assert ("flowmoe", 5) not in found and ("moe_pipeline", 0) not in found
    plan = find_plan(problem())
    own = [each.choice for each in (plan.best, *plan.others) if each.choice.schedule == "penstock"]
    assert own and all(choice.value("warmth") in (5, 7) for choice in own)


@pytest.mark.parametrize("name", ["warmth", "microbatches", "partition"])
@pytest.mark.usefixtures("warmth")
def test_a_name_is_registered_once(name: str) -> None:
    with pytest.raises(ValueError, match="registered already"):
        register(replace(WARMTH, name=name))


def test_a_name_is_one_that_can_be_written() -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        register(replace(WARMTH, name="how warm"))


@draws(20)
@given(problems())
def test_neighbours_of_valid_choices_are_valid(each: Problem) -> None:
    everything = set(space(each))
    start = valid(each, Decision(schedule="penstock", microbatches=2, chunks=5))
    assert start in everything
    for choice in neighbours(each, start):
        assert choice in everything and choice != start


@pytest.mark.slow
def test_small_steps_are_cut_less_where_one_thread_hands_out_all_tasks() -> None:
    """Where handing out the tasks of a step takes as long as the device needs for them."""
    threads = problem()
    one = problem(cluster=replace(threads.cluster, issue_task_s=5e-4, issue_kernel_s=5e-5))
    many, few = (find_plan(each, effort="low").best for each in (threads, one))
    assert len(few.plan.graph.tasks) < len(many.plan.graph.tasks)
    same = evaluate(one, many.choice)
    assert few.predicted_s < same.predicted_s and many.predicted_s < few.predicted_s


@pytest.mark.slow
@draws(6)
@given(problems())
def test_a_search_finds_the_same_whatever_another_has_worked_out(each: Problem) -> None:
    """What a quick search leaves in a basis spares a full one work, and decides nothing."""
    shared = module.Basis(each, None)
    quick = [find_plan(each, effort="quick", basis=known) for known in (None, shared)]
    full = [find_plan(each, budget=0.2, basis=known) for known in (None, shared)]
    for alone, after in (quick, full):
        assert (after.best.choice, after.best.predicted_s) == (alone.best.choice, alone.best.predicted_s)
        assert [other.choice for other in after.others] == [other.choice for other in alone.others]
        assert (after.searched, after.lower_bound_s) == (alone.searched, alone.lower_bound_s)
