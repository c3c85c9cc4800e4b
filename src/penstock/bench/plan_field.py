"""The plan that the joint search chooses, beside four published ones, all predicted from one profile."""

from __future__ import annotations

from collections import Counter
from typing import Final

from penstock.autopilot.profiling import profile_run
from penstock.autopilot.run_problem import run_problem
from penstock.bench.config import BenchConfig
from penstock.bench.contender import Entry
from penstock.bench.scheduled import Scheduled, Stacks, timed
from penstock.plan import Candidate, evaluate, explain, find_plan
from penstock.plan.published import PUBLISHED
from penstock.topology import Layout

BESIDE: Final = ("sequential", "pipemoe", "flowmoe", "fsmoe")
"""Published planners whose plans are measured, too; the first is the base of all ratios."""

PLANNED: Final = "planned"


class PlanField:
    """Nothing is known of the runs that are predicted: the profile is measured before, task by task."""

    def __init__(self, config: BenchConfig, layout: Layout) -> None:
        self.label: str | None = None
        self._stacks = stacks = Stacks(config, layout)
        self.control = stacks.machinery.control
        file = profile_run(stacks.run_config, stacks.machinery, budget_s=config.compare.profile_s)
        problem = run_problem(stacks.run_config, layout, file)
        mine = find_plan(problem) if layout.rank == 0 else None  # one core each: searching twice takes longer
        found = self.control.gather(mine, "waiting for rank 0 to choose a plan")[0]
        assert found is not None, "rank 0 has searched"
        published = {name: evaluate(problem, PUBLISHED[name](problem)) for name in BESIDE}
        self.notes = explain(problem, found).lines
        self.entries = tuple(self._entry(*item) for item in [*published.items(), (PLANNED, found.best)])
        first = self.entries[0].plan
        assert first is not None, "every entry has a plan"
        self._alone = Scheduled(stacks.silent, first, stacks.batch)

    @property
    def traffic(self) -> Counter[int]:
        return self._stacks.machinery.transports.traffic

    def compute_alone_s(self, number: int) -> float:
        self.control.barrier("starting computation alone")
        return timed(self._alone.step, number)

    def close(self) -> None:
        self._stacks.close()

    def _entry(self, name: str, candidate: Candidate) -> Entry:
        stacks = self._stacks
        contender = Scheduled(stacks.real, stacks.real.adopt(candidate.plan), stacks.batch)
        return Entry(
            name=name,
            transport="penstock",
            contender=contender,
            plan=candidate.plan,
            simulated_s=candidate.predicted_s,
        )
