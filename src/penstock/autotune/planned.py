"""A plan in use, what is remembered of others, and how plans get from rank 0 to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.cost import ClusterConfig, ClusterFile, ProfiledCluster, StepCost
from penstock.cost.cluster_file import MoveModel
from penstock.cost.devices import Computing
from penstock.cost.model_flops import ModelFlops
from penstock.cost.placed import Evidence
from penstock.decision import Decision, PlacementConfig
from penstock.features.build import build_graph
from penstock.plan import Candidate, PlanFile, Problem, estimate_memory, predict_s
from penstock.plan.candidate import whole_s
from penstock.plan.effort import Searched
from penstock.plan.plan_file import MOST_OTHERS, LostTrial, OtherPlan
from penstock.plan.predict import bound, closing_s, interval_s, predicted_timeline
from penstock.runtime.features.expert_replicas.manager import ExpertMoving
from penstock.schedule import Schedule, StepPlan
from penstock.step import StepShape
from penstock.train.assemble import expert_moving
from penstock.train.config import RunConfig
from penstock.train.output import CLUSTER_FILE, PLAN_FILE
from penstock.train.pilot import Forecast
from penstock.words import within


@dataclass(frozen=True, kw_only=True)
class Learnt:
    """What a run remembers of other plans, and of trials.

    Attributes:
        misses: Measured over predicted seconds per step, by schedule that was tried.
        others: The next best plans, those that were tried first.
        won: The plan that was tried and kept, with its seconds per step; None without a trial.
        lost: Trials of moving that were lost, whatever the plan in use.
    """

    misses: Mapping[str, float] = field(default_factory=dict)
    others: tuple[OtherPlan, ...] = ()
    won: OtherPlan | None = None
    lost: tuple[LostTrial, ...] = ()

    @staticmethod
    def of(paper: PlanFile) -> Learnt:
        """Return what the file of a plan says."""
        won = None
        if paper.trial_s:
            words = paper.choice.words
            won = OtherPlan(words=words, predicted_s=paper.predicted_s, measured_s=paper.trial_s)
        return Learnt(others=paper.others, won=won, lost=paper.lost)

    def of_trial(self, won: OtherPlan, left: Iterable[OtherPlan]) -> Learnt:
        """Return the record after a trial which a plan has won."""
        tried = {each.words: each for each in left}
        rest = (each for each in self.others if each.words not in (*tried, won.words))
        return replace(self, won=won, others=(*tried.values(), *rest)[:MOST_OTHERS])


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan in use and the problem that it solves; the same on all ranks.

    Attributes:
        file: The file that describes the cluster, if one does.
        lines: The explanation of the choice.
        to_try: Other plans that may turn out to be faster, with the seconds that were predicted for a whole
            step, the most promising first.
        searched: What the search has done; None without a search.
        number: The number by which messages refer to the plan.
        plans: How many numbers have been given.
        learnt: What the run remembers of other plans.
    """

    problem: Problem
    choice: Decision
    plan: StepPlan
    file: ClusterFile | None = None
    lines: tuple[str, ...] = ()
    to_try: tuple[tuple[Order, float], ...] = ()
    searched: Searched | None = None
    number: int = 1
    plans: int = 1
    learnt: Learnt = Learnt()

    @staticmethod
    def of(paper: PlanFile, path: Path, problem: Problem, file: ClusterFile | None) -> Planned:
        """Return the plan in the file at `path`, for this problem."""
        plan, learnt = paper.step_plan(problem, str(path)), Learnt.of(paper)
        return Planned(
            problem=problem, choice=paper.choice, plan=plan, file=file, lines=paper.why, learnt=learnt
        )

    @property
    def name(self) -> str:
        """Name such as `plan 2`, by which messages refer to the plan once it has been described."""
        return f"plan {self.number}"

    @property
    def trial_s(self) -> float | None:
        """Seconds that a step took when this choice was tried; None if it was not tried."""
        won = self.learnt.won
        return won.measured_s if won is not None and won.words == self.choice.words else None

    def expected_s(self, candidate: Candidate) -> float:
        """Return the predicted seconds times the miss of the schedule, or the mean miss if never tried."""
        misses = self.learnt.misses
        usual = sum(misses.values()) / len(misses) if misses else 1.0
        return whole_s(self.problem, candidate) * misses.get(candidate.choice.schedule, usual)

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a whole step, including clipping and update, as it is measured."""
        return predict_s(self.problem, self.choice, self.plan) + closing_s(self.problem)

    @property
    def predicted_words(self) -> str:
        """Text such as `: 812.0 ms per step predicted`, the update included.

        It is "" where nothing was measured from which to predict.
        """
        if self.file is None:
            return ""
        seconds = within(self.predicted_s, interval_s(self.problem, self.predicted_s))
        return f": {seconds} per step predicted"

    def flops(self, device: str, precision: Computing) -> ModelFlops:
        """Return the operations that the model requires, and the peak of these devices in this precision."""
        problem = self.problem
        return ModelFlops.of(problem.workload, problem.shape.moe_layers, self.file, device, precision)

    def forecast(self) -> Forecast | None:
        """Simulate a step and return what is expected of it.

        None where the cluster was neither measured nor described: the defaults of section [cluster] are of no
        machine, so a step says nothing about them.
        """
        if self.file is None and self.problem.cluster == ClusterConfig():
            return None
        timeline = predicted_timeline(self.problem, self.choice, self.plan)
        if self.file is None:
            return Forecast("the rates of section [cluster], which are not measured", timeline)
        measured = "the measurements" if self.file.measured is not None else "the numbers"
        return Forecast(f"{measured} in {CLUSTER_FILE}", timeline)

    def moving(self, placement: PlacementConfig) -> ExpertMoving | None:
        """Return how the replicas of the next step are planned; None where experts stay."""
        work = self.problem.workload_of(self.choice)
        cost = StepCost(self.plan.shape, work, self.problem.cluster)
        return expert_moving(placement, self.choice, cost, self.plan)

    def seeing(self, evidence: Evidence | None) -> Planned:
        """Return the plan priced by observed routing if it moves anything: even routing never rewards moving.

        A plan that moves nothing is priced like the plans with which a search compares it. The memory of
        both is that of the routing which was observed last.
        """
        moves = self.choice.samples != "none" or self.choice.experts != "none"
        observed = evidence or self.problem.observed
        problem = replace(self.problem, evidence=evidence if moves else None, observed=observed)
        return replace(self, problem=problem)

    def learning(self, moves: tuple[MoveModel, ...], lost: tuple[LostTrial, ...]) -> Planned:
        """Return the plan with what trials tell: how long transfers of moves take, and which trials lost."""
        learnt = replace(self.learnt, lost=lost)
        if self.file is None or not moves:
            return replace(self, learnt=learnt)
        file = replace(self.file, moves=moves)
        problem = replace(self.problem, cluster=ProfiledCluster.build(file))
        return replace(self, file=file, problem=problem, learnt=learnt)

    def another(self, order: Order) -> Planned:
        """Return the plan that another choice makes, with the next number; the same choice keeps its own."""
        number = self.plans + 1
        now = self if order.choice == self.choice else replace(self, number=number, plans=number)
        return replace(now, choice=order.choice, plan=order.plan)

    def noting(self, *lines: str) -> Planned:
        """Return the plan with more lines of explanation; lines that it has already are not repeated."""
        return replace(self, lines=tuple(dict.fromkeys((*self.lines, *lines))))

    def save(self, folder: Path, model: str) -> None:
        """Write the cluster and the plan into the run's folder, on one rank."""
        if self.file is not None:
            self.file.save(folder / CLUSTER_FILE)
        candidate = Candidate(
            choice=self.choice,
            plan=self.plan,
            predicted_s=predict_s(self.problem, self.choice, self.plan),
            bound=bound(self.problem, self.choice, self.plan),
            memory_bytes=estimate_memory(self.problem, self.choice).total_bytes,
        )
        cluster = self.file.name if self.file is not None else "section [cluster]"
        paper = PlanFile.of(
            self.problem, candidate, model=model, cluster=cluster, why=self.lines, search=self.searched
        )
        learnt = self.learnt
        paper = replace(paper, others=learnt.others, trial_s=self.trial_s, lost=learnt.lost)
        paper.telling_use().save(folder / PLAN_FILE)


@dataclass(frozen=True, kw_only=True)
class Order:
    """A plan as it is sent between ranks: small, since the graph of its step is built where it arrives.

    Attributes:
        text: The order of tasks, as `Schedule.text` writes it.
    """

    choice: Decision
    shape: StepShape
    text: str

    @staticmethod
    def of(choice: Decision, plan: StepPlan) -> Order:
        return Order(choice=choice, shape=plan.shape, text=plan.schedule.text())

    @property
    def plan(self) -> StepPlan:
        graph = build_graph(self.shape)
        return StepPlan(graph, Schedule.parse(self.text, graph), self.shape)


def with_choice(config: RunConfig, choice: Decision) -> RunConfig:
    """Return the run with the choice written into sections [schedule], [placement] and [moe]."""
    rounded = None if choice.comm_dtype == "none" else choice.comm_dtype
    return replace(
        config,
        schedule=config.schedule.saying(choice),
        placement=choice.in_placement(config.placement),
        # The model is built for these.
        moe=replace(config.moe, dispatch=choice.dispatch, comm_dtype=rounded or config.moe.comm_dtype),
        plan=replace(config.plan, comm_dtype="given", recompute=choice.recompute),
    )
