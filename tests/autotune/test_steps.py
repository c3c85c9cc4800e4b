"""What real steps tell of tasks, transfers and whole steps, where it is known what they are made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.autotune.profile.steps import Watched, transferred, with_steps, worth_running
from penstock.cost import ClusterFile, ProfiledCluster
from penstock.cost.cluster_file import LinkModel, StepFit, TaskModel
from penstock.decision import Decision
from penstock.plan import Problem, predict_s
from penstock.plan.predict import alone, task_cost
from penstock.timing import simulate
from tests.plan.problems import FILE, problem

CHOICES = (
    Decision(),
    Decision(schedule="flowmoe", microbatches=4),
    Decision(schedule="penstock", microbatches=2, chunks=2, backward_chunks=2, priority="critical_path"),
)
OPS = ("EM.F", "EM.B", "AT.F", "AT.B", "X.F", "X.B", "X.I", "X.W", "U.F", "U.B", "HD.F", "HD.B")
PLAIN = replace(
    FILE,
    tasks=tuple(
        TaskModel(op=op, phase=phase, alpha_s=2e-4, scale=40.0) for op, phase in (x.split(".") for x in OPS)
    ),
    links=tuple(
        LinkModel(collective=name, group=group, lane="inter", ranks=4, alpha_s=2e-4, beta_s_per_byte=1e-8)
        for name, group in (("all_to_all", "ep"), ("uneven_all_to_all", "ep"), ("all_reduce", "world"))
    ),
)
TRUTH = replace(
    PLAIN,
    tasks=tuple(replace(x, alpha_s=1.1 * x.alpha_s, scale=1.1 * x.scale, contended=1.3) for x in PLAIN.tasks),
    links=tuple(
        replace(x, in_steps=1.2, contended=1.15 if x.collective == "all_reduce" else 1.05)
        for x in PLAIN.links
    ),
)


def problem_of(file: ClusterFile) -> Problem:
    return problem((True, True), cluster=ProfiledCluster.build(file))


def watched(truth: Problem, choice: Decision, *, late: float = 1.0) -> Watched:
    """Three rounds of a plan as the simulator has them, the second half as long again; every iteration takes
    `late` times as long as its tasks say."""
    plan = problem_of(PLAIN).plan(choice)
    timeline = simulate(plan.schedule, plan.graph, task_cost(truth, choice, plan), truth.mesh)
    quiet = alone(problem_of(PLAIN)).cost(choice, plan.shape)
    spans_T2 = [(timeline.times[task].start[0], timeline.times[task].end[0]) for task in plan.graph.tasks]
    rounds = np.array([1.0, 1.5, 1.0])[None, :, None]
    spans_KRT2 = np.array(spans_T2)[None, None] * rounds[..., None] * np.ones((4, 1, 1, 1))
    quiet_T = np.array([float(np.max(quiet(task))) for task in plan.graph.tasks])
    return Watched(
        plan=plan,
        choice=choice,
        spans_KRT2=spans_KRT2,
        quiet_KRT=quiet_T * rounds * np.ones((4, 1, 1)),
        iterations_R=late * timeline.iteration_s * rounds[0, :, 0],
    )


def test_known_factors_are_recovered_and_predict_other_plans() -> None:
    truth = problem_of(TRUTH)
    found = with_steps(PLAIN, [watched(truth, choice, late=1.04) for choice in CHOICES], problem_of)
    assert found.doubts == ()
    for model, known in zip(found.tasks, TRUTH.tasks, strict=True):
        both = model.scale * model.contended, model.scale
        assert both == pytest.approx((known.scale * known.contended, known.scale), rel=0.06), model.op
    for link, line in zip(found.links, TRUTH.links, strict=True):
        assert (link.alpha_s, link.beta_s_per_byte) == (line.alpha_s, line.beta_s_per_byte), "still the line"
        assert line.contended is not None and link.contended is not None
        assert link.in_steps * link.contended == pytest.approx(1.2 * line.contended, rel=0.03)
    assert found.steps is not None and found.steps.steps == 9
    assert found.steps.ratio == pytest.approx(1.04, rel=0.02)
    other = Decision(schedule="flowmoe", microbatches=2)
    plan = truth.plan(other)
    assert predict_s(problem_of(found), other, plan) == pytest.approx(
        1.04 * predict_s(truth, other, plan), rel=0.02
    )


def test_what_scatters_too_much_is_left_as_it_was_and_said() -> None:
    steps = [watched(problem_of(TRUTH), choice) for choice in CHOICES]
    rng = np.random.default_rng(0)
    wild = [replace(x, quiet_KRT=x.quiet_KRT * rng.lognormal(0, 1.5, x.quiet_KRT.shape[-1])) for x in steps]
    late = [replace(x, iterations_R=n * x.iterations_R) for n, x in zip((1.0, 3.0, 9.0), wild, strict=True)]
    other = replace(PLAIN, steps=StepFit(ratio=1.3, low=1.2, high=1.4))  # of another layout
    found = with_steps(other, late, problem_of)
    assert found.steps is None and found.tasks == PLAIN.tasks
    assert any("all computation: not corrected by real steps" in doubt for doubt in found.doubts)
    assert found.doubts[-1].startswith("real steps ")


def test_a_transfer_takes_as_long_as_in_the_slowest_group() -> None:
    """There as on the rank that came last. All ranks are in one group where they reduce gradients."""
    plain = problem_of(PLAIN)
    work = replace(plain.workload, ep_size=2)
    before = watched(plain, Decision())
    start_KRT, end_KRT = before.spans_KRT2[..., 0], before.spans_KRT2[..., 1]
    factors_K11 = np.array([1.0, 4.0, 9.0, 3.0])[:, None, None]
    after = replace(
        before, spans_KRT2=np.stack((start_KRT, start_KRT + factors_K11 * (end_KRT - start_KRT)), -1)
    )

    def ratios(each: Watched) -> dict[str, float]:
        seen = transferred([each], lambda each: plain.cost(each.choice, each.plan.shape), work)
        return {collective: sightings[0].ratio for (collective, _), sightings in seen.items()}

    now = ratios(after)
    assert {name: now[name] / ratio for name, ratio in ratios(before).items()} == pytest.approx(
        {"all_to_all": 3.0, "all_reduce": 1.0}
    )


def test_plans_that_overlap_most_are_run() -> None:
    first = problem_of(PLAIN)
    choices = [CHOICES[1], replace(CHOICES[1], microbatches=1), CHOICES[2], CHOICES[0]]
    plans = [(choice.schedule, first.plan(choice)) for choice in choices]
    assert worth_running(plans) == [0, 2, 3]
    assert worth_running([plans[1], plans[0]]) == [0, 1]
