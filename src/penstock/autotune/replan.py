"""Plans again during training, after the step time has changed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from penstock.autotune.deciding import decided_slowly
from penstock.autotune.diagnose import Diagnosis
from penstock.autotune.planned import Order, Planned
from penstock.autotune.profile import measure_links, rates_with_links
from penstock.autotune.run_problem import hierarchical_among, run_problem
from penstock.autotune.start import find
from penstock.cost import ClusterFile
from penstock.cost.cluster_file import LinkModel
from penstock.decision import Decision
from penstock.plan import Candidate, evaluate
from penstock.plan.effort import Searched
from penstock.plan.moving import staying
from penstock.plan.plan_file import OtherPlan
from penstock.plan.predict import interval_s
from penstock.runtime import Machinery
from penstock.train.config import RunConfig
from penstock.words import within

logger = logging.getLogger(__name__)

LINKS_SHARE = 0.5
"""Fraction of the profiling time at the start that measuring the links again may take."""
WORTH = 0.99
"""Another plan is adopted if its predicted time is below this fraction of the present plan's."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision of rank 0.

    why: the explanation of the plan; line: the change in words; searched: how much of the search was done;
    others: the next best plans.
    """

    choice: Decision
    order: Order
    why: tuple[str, ...]
    line: str
    searched: Searched
    others: tuple[OtherPlan, ...]


def replan(config: RunConfig, machinery: Machinery, planned: Planned, diagnosis: Diagnosis) -> Planned:
    """Measure again what has changed, and return the best plan for it; all ranks call this together.

    config: with the dispatch in use, which stays, since the model was built for it. Links are measured again
    if the durations of transfers have changed; a rank's computation is scaled by the ratio of its task
    durations.
    """
    assert planned.file is not None, "a cluster that was measured before"
    file = planned.file
    if diagnosis.links_changed and machinery.layout.world_size > 1:
        budget_s = LINKS_SHARE * config.plan.profile_s
        legs_of = hierarchical_among(config, machinery.layout)
        file = remeasured(file, measure_links(machinery, legs_of, budget_s))
    file = replace(file, slowness=_slowness(planned, diagnosis))
    problem = replace(run_problem(config, machinery.layout, file), observed=planned.problem.observed)
    now = replace(planned, problem=problem, file=file).seeing(planned.problem.evidence)
    verdict = decided_slowly(
        machinery.control,
        lambda: _decide(config, now, file, diagnosis),
        "choosing another plan",
        config.parallel.timeout_s,
    )
    logger.info(verdict.line)
    plan, searched = verdict.order.plan, verdict.searched
    if verdict.choice != now.choice:
        now = replace(now, problem=problem, number=now.plans + 1, plans=now.plans + 1)
    others = verdict.others
    return replace(
        now,
        choice=verdict.choice,
        plan=plan,
        lines=verdict.why,
        searched=searched,
        others=others,
        trial=None,
    )


def remeasured(file: ClusterFile, links: tuple[LinkModel, ...]) -> ClusterFile:
    """Return the file with these links, which keep what real steps told about them.

    A link that was not measured again stays.
    """
    before = {(link.collective, link.group, link.op): link for link in file.links}
    again = {(link.collective, link.group, link.op): link for link in links}
    known = {key: before.pop(key) for key in again if key in before}
    felt = (
        replace(link, in_steps=known[key].in_steps, beside=known[key].beside) if key in known else link
        for key, link in again.items()
    )
    links = (*felt, *before.values())
    return replace(file, links=links, rates=rates_with_links(file.rates, links, file.nodes))


def _decide(config: RunConfig, now: Planned, file: ClusterFile, diagnosis: Diagnosis) -> Verdict:
    """Return, on rank 0 only, the best plan found, or the present choice in a new order if that is as good.

    A search moves nothing that is open, since moving is weighed afterwards: the present choice is compared
    without moving, too.
    """
    problem = now.seeing(None).problem
    old = evaluate(problem, staying(problem, now.choice))
    found, lines = find(problem, file, config.plan.budget)
    new = min((found.best, *found.others), key=now.expected_s)
    changes = now.expected_s(new) < WORTH * now.expected_s(old)
    kept = old if old.choice == now.choice else evaluate(now.problem, now.choice)
    best, other = (new, old) if changes else (kept, new)
    predicted = f"predicted {_expected(now, best)} per step"
    if changes:
        apart = "" if old.choice == now.choice else " if nothing moves"
        predicted += f", {_expected(now, old)} with {now.name}{apart}"
        line = f"{diagnosis.text}: changing to plan {now.plans + 1}: {best.choice.words} ({predicted})"
    else:
        line = f"{diagnosis.text}: keeping {now.name} in a new order ({predicted})"
    why = lines if best is found.best else (line,) if changes else now.lines
    order = Order.of(best.plan)
    rest = [each for each in (other, found.best, *found.others) if each.choice != best.choice]
    others = OtherPlan.among(now.problem, rest)
    return Verdict(
        choice=best.choice, order=order, why=why, line=line, searched=found.searched, others=others
    )


def _expected(now: Planned, candidate: Candidate) -> str:
    """Return the expected step time in words, with its interval."""
    seconds = now.expected_s(candidate)
    return within(seconds, interval_s(now.problem, seconds))


def _slowness(planned: Planned, diagnosis: Diagnosis) -> tuple[float, ...]:
    before = planned.problem.slowness or (1.0,) * len(diagnosis.compute)
    if not diagnosis.compute_changed:
        return planned.problem.slowness
    return tuple(
        old * (ratio if diagnosis.differs(ratio) else 1.0)
        for old, ratio in zip(before, diagnosis.compute, strict=True)
    )
