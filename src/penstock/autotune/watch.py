"""Watches the step time while training, finds out what has changed, and plans again.

Times of steps go into `Watch`, and an alarm comes out; records of tasks before and now tell why.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median, median_high, median_low

from penstock.autotune.choose.start import find
from penstock.autotune.planned import Order, Planned
from penstock.autotune.problem import hierarchical_among, run_problem
from penstock.autotune.profile.links import measure_links
from penstock.autotune.profile.measure import rates_with_links
from penstock.cost import ClusterFile
from penstock.cost.cluster_file import LinkModel
from penstock.cost.measured import Kind, MeasuredCost
from penstock.graph import Lane
from penstock.mesh import Mesh
from penstock.plan import Candidate, evaluate
from penstock.plan.effort import Searched
from penstock.plan.moving import staying
from penstock.plan.plan_config import DROPPED_STEPS
from penstock.plan.plan_file import OtherPlan
from penstock.plan.predict import interval_s
from penstock.runtime import Machinery
from penstock.trace import TaskRecord
from penstock.train.config import RunConfig
from penstock.words import lane_words, within

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A change of the step time since the plan was adopted.

    Attributes:
        before_s: Median of the baseline.
        now_s: Median of the last steps.
    """

    before_s: float
    now_s: float


class Watch:
    """Compares the last steps with the first ones under the same plan.

    The first `DROPPED_STEPS` steps are ignored; the median of the following `lasting_steps` is the baseline.
    It raises the alarm when the median of the last `lasting_steps` differs by more than `threshold` (1.15
    times or 1/1.15 at 0.15), in either direction, and both halves of these steps agree: a shorter
    disturbance does not count. After an alarm the baseline restarts, so one change is one alarm.

    All ranks pass the same times, so all see the same alarm after the same step.
    """

    def __init__(self, threshold: float, lasting_steps: int) -> None:
        self.threshold, self.lasting_steps = threshold, lasting_steps
        self.reset()

    def reset(self) -> None:
        """Restart the baseline, since another plan is in use."""
        self._seen = 0
        self._reference: list[float] = []
        self._recent: deque[float] = deque(maxlen=self.lasting_steps)

    @property
    def learning(self) -> bool:
        """Whether the next step belongs to the baseline."""
        return DROPPED_STEPS <= self._seen < DROPPED_STEPS + self.lasting_steps

    @property
    def learnt(self) -> bool:
        """Whether the last step has completed the baseline."""
        return self._seen == DROPPED_STEPS + self.lasting_steps

    @property
    def suspects(self) -> bool:
        """Whether the last step was slower or faster than usual."""
        return bool(self._recent) and self._side([self._recent[-1]]) != 0

    def note(self, seconds: float) -> Drift | None:
        """Record the seconds of a step on the slowest rank; return the change if there is one."""
        if self.learning:
            self._reference.append(seconds)
        elif len(self._reference) == self.lasting_steps:
            self._recent.append(seconds)
        self._seen += 1
        if len(self._recent) < self.lasting_steps:
            return None
        # Both halves of the last steps, and all of them, must deviate in the same direction.
        times, half = list(self._recent), self.lasting_steps // 2
        sides = {self._side(part) for part in (times[:half], times[half:], times)}
        if len(sides) != 1 or sides == {0}:
            return None
        drift = Drift(before_s=median(self._reference), now_s=median(self._recent))
        self.reset()
        return drift

    def _side(self, times: list[float]) -> int:
        """Return 1: slower, -1: faster, 0: as before. Half of the times are not enough for either."""
        usual_s, limit = median(self._reference), 1 + self.threshold
        return (median_low(times) > limit * usual_s) - (median_high(times) < usual_s / limit)


# ---- which durations have changed --------------------------------------------------------------------------


MOST_NAMED = 8
"""More ranks than this are counted in messages, with only the first ones named."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Ratios of task durations, now over before.

    Attributes:
        transfers: Ratios by lane, for lanes on which anything is sent; a collective counts with its shortest
            duration in a group, since the rest is waiting, and in the slowest group.
        compute: Ratios by rank.
        threshold: Smaller changes are noise.
        nodes: Whether there are several nodes.
    """

    transfers: Mapping[Lane, float]
    compute: tuple[float, ...]
    threshold: float
    nodes: bool = False

    @property
    def links_changed(self) -> bool:
        return any(map(self.differs, self.transfers.values()))

    @property
    def compute_changed(self) -> bool:
        return any(map(self.differs, self.compute))

    @property
    def text(self) -> str:
        """The changes in words; empty if there are none."""
        parts = [
            f"transfers over the {lane_words(lane, nodes=self.nodes)} take {ratio:.2f}x as long as before"
            for lane, ratio in self.transfers.items()
            if self.differs(ratio)
        ]
        changed = {rank: ratio for rank, ratio in enumerate(self.compute) if self.differs(ratio)}
        for slower in (True, False):
            if alike := {rank: ratio for rank, ratio in changed.items() if (ratio > 1) is slower}:
                who = "all ranks" if len(alike) == len(self.compute) else _ranks(alike)
                parts.append(f"computation on {who} takes {median(alike.values()):.2f}x as long as before")
        return ", ".join(parts)

    def differs(self, ratio: float) -> bool:
        return ratio > 1 + self.threshold or ratio < 1 / (1 + self.threshold)


def diagnose(
    before: Sequence[Iterable[TaskRecord]],
    now: Sequence[Iterable[TaskRecord]],
    threshold: float,
    mesh: Mesh,
    *,
    nodes: bool = False,
) -> Diagnosis:
    """Compare records of the same plan and return the changes.

    Args:
        before, now: Records of some steps each, by rank.
        threshold: Smaller changes are noise.
        mesh: The ranks; in groups of one nothing is sent.
        nodes: Whether there are several nodes.
    """
    transfers = {}
    for lane in (Lane.INTRA, Lane.INTER):
        earlier, later = (
            _seconds((r for r in chain(*ranks) if r.lane is lane and r.task.axes not in mesh.silent), mesh)
            for ranks in (before, now)
        )
        if earlier:
            transfers[lane] = _ratio(earlier, later)
    computed = (
        [_seconds((r for r in rank if r.lane.computes), mesh) for rank in ranks] for ranks in (before, now)
    )
    return Diagnosis(
        transfers=transfers,
        compute=tuple(map(_ratio, *computed)),
        threshold=threshold,
        nodes=nodes,
    )


def _seconds(records: Iterable[TaskRecord], mesh: Mesh) -> dict[Kind, float]:
    return MeasuredCost.from_records(records, lambda _: 0.0, mesh).seconds


def _ratio(before: Mapping[Kind, float], now: Mapping[Kind, float]) -> float:
    """Return the ratio of the sums of both, so that long tasks count by their length."""
    assert before.keys() == now.keys(), "the same tasks ran"
    earlier_s = sum(before.values())
    return sum(now.values()) / earlier_s if earlier_s > 0 else 1.0


def _ranks(numbers: Iterable[int]) -> str:
    names = list(map(str, numbers))
    if len(names) > MOST_NAMED:
        return f"{len(names)} ranks ({', '.join(names[:MOST_NAMED])}, ...)"
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


# ---- another plan ------------------------------------------------------------------------------------------


LINKS_SHARE = 0.5
"""Fraction of the profiling time at the start that measuring the links again may take."""
WORTH = 0.99
"""Another plan is adopted if its predicted time is below this fraction of the present plan's."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The decision of rank 0.

    Attributes:
        order: The plan to run.
        why: The explanation of the plan.
        line: The change in words.
        others: The next best plans.
    """

    order: Order
    why: tuple[str, ...]
    line: str
    searched: Searched
    others: tuple[OtherPlan, ...]


def replan(config: RunConfig, machinery: Machinery, planned: Planned, diagnosis: Diagnosis) -> Planned:
    """Measure again what has changed, and return the best plan for it; all ranks call this together.

    Links are measured again if the durations of transfers have changed; a rank's computation is scaled by the
    ratio of its task durations.

    Args:
        config: The run as it was asked for; the dispatch and the form of rows in use stay, since the model
            was built for them, and so does what is recomputed.
    """
    assert planned.file is not None, "a cluster that was measured before"
    file, choice = planned.file, planned.choice
    moe = replace(config.moe, dispatch=choice.dispatch)
    config = replace(config, moe=moe, plan=replace(config.plan, recompute=choice.recompute))
    if diagnosis.links_changed and machinery.layout.world_size > 1:
        budget_s = LINKS_SHARE * config.plan.profile_s
        legs_of = hierarchical_among(config, machinery.layout)
        file = remeasured(file, measure_links(machinery, legs_of, budget_s))
    slowness = planned.problem.slowness
    if diagnosis.compute_changed:
        before = slowness or (1.0,) * len(diagnosis.compute)
        slowness = tuple(
            old * (ratio if diagnosis.differs(ratio) else 1.0)
            for old, ratio in zip(before, diagnosis.compute, strict=True)
        )
    if file.ranks == machinery.layout.world_size:
        file = replace(file, slowness=slowness)
    problem = run_problem(config, machinery.layout, file)
    observed, forms = planned.problem.observed, (choice.comm_dtype,)
    problem = replace(problem, slowness=slowness, observed=observed, comm_dtypes=forms)
    now = replace(planned, problem=problem, file=file).seeing(planned.problem.evidence)
    verdict = machinery.control.decided(
        lambda: _decide(config, now, file, diagnosis), "choosing another plan", slowly=True
    )
    logger.info(verdict.line)
    if verdict.order.choice != now.choice:
        now = replace(now, problem=problem)
    learnt = replace(now.learnt, others=verdict.others, won=None)
    chosen = now.another(verdict.order)
    return replace(chosen, lines=verdict.why, searched=verdict.searched, learnt=learnt)


def remeasured(file: ClusterFile, links: tuple[LinkModel, ...]) -> ClusterFile:
    """Return the file with these links, which keep what real steps told about them.

    A link that was not measured again stays.
    """
    before = {link.measures: link for link in file.links}
    updated = []
    for link in links:
        earlier = before.pop(link.measures, link)
        updated.append(replace(link, in_steps=earlier.in_steps, contended=earlier.contended))
    links = (*updated, *before.values())
    return replace(file, links=links, rates=rates_with_links(file.rates, links, file.nodes))


def _decide(config: RunConfig, now: Planned, file: ClusterFile, diagnosis: Diagnosis) -> Verdict:
    """Return, on rank 0 only, the best plan found, or the present choice in a new order if that is as good.

    A search moves nothing that is open, since moving is weighed afterwards: the present choice is compared
    without moving, too.
    """
    problem = now.seeing(None).problem
    old = evaluate(problem, staying(problem, now.choice))
    solved = find(problem, file, config.plan.budget).warned()
    result = solved.found
    new = min((result.best, *result.others), key=now.expected_s)
    changes = now.expected_s(new) < WORTH * now.expected_s(old)
    kept = old if old.choice == now.choice else evaluate(now.problem, now.choice)
    best, other = (new, old) if changes else (kept, new)

    def expected(candidate: Candidate) -> str:
        seconds = now.expected_s(candidate)
        return within(seconds, interval_s(now.problem, seconds))

    predicted = f"predicted {expected(best)} per step"
    if changes:
        apart = "" if old.choice == now.choice else " if nothing moves"
        predicted += f", {expected(old)} with {now.name}{apart}"
        line = f"{diagnosis.text}: changing to plan {now.plans + 1}: {best.choice.words} ({predicted})"
    else:
        line = f"{diagnosis.text}: keeping {now.name} in a new order ({predicted})"
    why = solved.lines if best is result.best else (line,) if changes else now.lines
    order = Order.of(best.choice, best.plan)
    rest = [each for each in (other, result.best, *result.others) if each.choice != best.choice]
    others = OtherPlan.among(now.problem, rest)
    return Verdict(order=order, why=why, line=line, searched=result.searched, others=others)
