"""A plan in use, how it travels between ranks, and what it makes of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.cost import ClusterFile
from penstock.decision import Decision
from penstock.plan import Candidate, PlanFile, Problem, estimate_memory, predict_s
from penstock.plan.effort import Searched
from penstock.plan.predict import alone
from penstock.schedule import Schedule, StepPlan
from penstock.step import StepShape, build_graph
from penstock.train.config import RunConfig
from penstock.train.pilot import CLUSTER_FILE, PLAN_FILE


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A plan that was not chosen."""

    choice: Decision
    plan: StepPlan
    predicted_s: float


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan in use, and what it is the answer to. The same on all ranks.

    file: of the cluster, if a file describes it. lines: what people are told of the choice. rivals: others
    that may turn out to be faster, the most promising first. misses: by schedule that has been tried, how
    many times as long a step has taken as it promised to.
    """

    problem: Problem
    choice: Decision
    plan: StepPlan
    file: ClusterFile | None = None
    lines: tuple[str, ...] = ()
    rivals: tuple[Rival, ...] = ()
    misses: Mapping[str, float] = field(default_factory=dict)
    searched: Searched | None = None

    def expected_s(self, candidate: Candidate) -> float:
        """What is predicted, as far off as with its schedule before; as with all on average if it is new."""
        misses = self.misses.values()
        usual = sum(misses) / len(misses) if misses else 1.0
        return candidate.predicted_s * self.misses.get(candidate.choice.schedule, usual)

    @property
    def predicted_s(self) -> float:
        return predict_s(self.problem, self.choice, self.plan)

    def noting(self, line: str) -> Planned:
        """The same with one more line on how it came about."""
        return replace(self, lines=tuple(dict.fromkeys((*self.lines, line))))

    def save(self, folder: Path, model: str) -> None:
        """Leave the cluster and the plan in the run's folder; for one rank."""
        if self.file is not None:
            self.file.save(folder / CLUSTER_FILE)
        candidate = Candidate(
            choice=self.choice,
            plan=self.plan,
            predicted_s=self.predicted_s,
            bound=alone(self.problem).bound(self.choice, self.plan),
            memory_bytes=estimate_memory(self.problem, self.choice).total_bytes,
        )
        cluster = self.file.name if self.file is not None else "section [cluster]"
        paper = PlanFile.of(
            self.problem, candidate, model=model, cluster=cluster, why=self.lines, search=self.searched
        )
        paper.save(folder / PLAN_FILE)


@dataclass(frozen=True, kw_only=True)
class Order:
    """A step plan as it travels between ranks: small, and the graph is built where it arrives."""

    shape: StepShape
    text: str

    @staticmethod
    def of(plan: StepPlan) -> Order:
        return Order(shape=plan.shape, text=plan.schedule.text())

    @property
    def plan(self) -> StepPlan:
        graph = build_graph(self.shape)
        return StepPlan(graph, Schedule.parse(self.text, graph), self.shape)


def with_choice(config: RunConfig, choice: Decision) -> RunConfig:
    """The same run with sections [schedule] and [moe] saying what was chosen."""
    schedule, moe = config.schedule.saying(choice), replace(config.moe, dispatch=choice.dispatch)
    return replace(config, schedule=schedule, moe=moe)
