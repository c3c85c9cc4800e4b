"""The plan that the joint search chooses, beside four published ones, all predicted from one profile."""

from __future__ import annotations

from typing import Final

from penstock.autopilot.profiling import profile_run
from penstock.autopilot.run_problem import run_problem
from penstock.bench.config import BenchConfig
from penstock.bench.contender import Entry
from penstock.bench.field import ModelField
from penstock.bench.scheduled import Scheduled, Stacks
from penstock.plan import Candidate, evaluate, explain, find_plan
from penstock.plan.published import PUBLISHED
from penstock.topology import Layout

BESIDE: Final = ("sequential", "pipemoe", "flowmoe", "fsmoe")
"""Published planners whose plans are measured, too; the first is the base of all ratios."""

PLANNED: Final = "planned"


class PlanField(ModelField):
    """Nothing is known of the runs that are predicted: the profile is measured before, task by task."""

    def __init__(self, config: BenchConfig, layout: Layout) -> None:
        stacks = Stacks(config, layout)
        file = profile_run(stacks.run_config, stacks.machinery, budget_s=config.compare.profile_s)
        problem = run_problem(stacks.run_config, layout, file)
        mine = find_plan(problem) if layout.rank == 0 else None  # one core each: searching twice takes longer
        found = stacks.machinery.control.gather(mine, "waiting for rank 0 to choose a plan")[0]
        assert found is not None, "rank 0 has searched"
        published = {name: evaluate(problem, PUBLISHED[name](problem)) for name in BESIDE}
        plans = {**published, PLANNED: found.best}
        entries = [_entry(stacks, name, candidate) for name, candidate in plans.items()]
        super().__init__(stacks, entries, explain(problem, found).lines)


def _entry(stacks: Stacks, name: str, candidate: Candidate) -> Entry:
    plan = stacks.real.adopt(candidate.plan)
    return Entry(
        name=name,
        transport="penstock",
        contender=Scheduled(stacks.real, plan, stacks.batch),
        plan=candidate.plan,
        simulated_s=candidate.predicted_s,
    )
