"""Plans with AdamW and with a sharded AdamW: memory per rank by ZeRO's stage 1, and whole iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol

from penstock.config import ConfigError
from penstock.cost import Workload
from penstock.decision import Decision
from penstock.mesh import Group
from penstock.plan.candidate import whole_s
from penstock.plan.predict import interval_s
from penstock.plan.problem import Problem
from penstock.plan.search import FoundPlan
from penstock.step.shape import Updating
from penstock.words import gib, within


class Find(Protocol):
    """Finds the plan of a problem."""

    def __call__(self, problem: Problem, starts: tuple[Decision, ...] = (), /) -> FoundPlan:
        """Return the plan; `starts` are choices that are tried besides the search's own."""
        ...


SHARDED = "a sharded AdamW"

NEAR = 1.005
"""How many times as long as the shorter iteration, by quick plans, another layout's may be to be planned in
full."""


@dataclass(frozen=True, kw_only=True)
class Updated:
    """A plan with one of the two optimisers.

    Attributes:
        found: The plan; None if no plan with this optimiser fits into memory.
        refusal: Why there is no plan.
    """

    problem: Problem
    found: FoundPlan | None
    refusal: ConfigError | None = None

    @property
    def iteration_s(self) -> float:
        """Predicted seconds, clipping and updates included; infinite without a plan."""
        return float("inf") if self.found is None else whole_s(self.problem, self.found.best)

    @property
    def words(self) -> str:
        """Seconds and memory as text, or that the optimiser does not fit."""
        of = "AdamW" if self.problem.shape.updating is None else SHARDED
        if self.found is None:
            return f"{of} does not fit"
        seconds = within(self.iteration_s, interval_s(self.problem, self.iteration_s))
        return f"{seconds} with {of} ({gib(self.found.best.memory_bytes)} per rank)"


def sharing_updates(problem: Problem, *, releases: bool = False) -> Problem:
    """Return the step with an optimiser of which every data-parallel rank owns a share, and with clipping.

    Args:
        releases: See `Updating`.
    """
    edp = problem.mesh.size(Group.EXPERT_DATA) > 1
    updating = Updating(clips=True, edp=edp, releases=releases)
    work = problem.workload
    if not edp:
        work = updating_experts(work, problem.shape.moe_layers)
    return replace(problem, workload=work, shape=replace(problem.shape, updating=updating))


def updating_experts(work: Workload, moe_layers: Sequence[bool]) -> Workload:
    """Return the workload of ranks that each update all of their experts, of which nothing is summed."""
    own = int(work.expert_bytes) * work.placement.slots
    return replace(work, expert_all_reduce_bytes=tuple(own * each for each in moe_layers))


def find_updated(
    plain: Problem,
    sharded: Problem,
    find: Find,
    quick: Find | None = None,
    starts: tuple[Decision, ...] = (),
) -> tuple[Problem, FoundPlan, str]:
    """Return the plan with the optimiser whose whole iteration is shorter, or that fits.

    Args:
        find: Finds the plan of a problem.
        quick: Finds a plan that is nearly as good, by which the optimiser is chosen; None = no such way.
        starts: Decisions from which the first searches start.

    Returns:
        The problem with that optimiser, its plan, and a line that compares both.

    Raises:
        ConfigError: If neither fits: the error of the sharded problem.
    """
    both = [_found(each, quick or find, starts) for each in (plain, sharded)]
    best = min(both, key=attrgetter("iteration_s"))
    if best.found is None:
        assert both[1].refusal is not None, "nothing was found"
        raise both[1].refusal
    if quick is not None:
        at = both.index(best)
        both[at] = found = _improved(best, find)
        assert found.found is not None, "it is at least as good as before"
        # What a full search has found may serve the other optimiser as well, whose plan is a quick one.
        both[1 - at] = _improved(both[1 - at], quick, (found.found.best.choice,))
        best = min(found, both[1 - at], key=attrgetter("iteration_s"))
        if best is not found:
            best = both[1 - at] = _improved(best, find, (found.found.best.choice,))
    assert best.found is not None, "it has the shorter iteration"
    line = f"Update   predicted whole iterations: {both[0].words}, {both[1].words}"
    return best.problem, best.found, line


def _improved(updated: Updated, find: Find, starts: tuple[Decision, ...] = ()) -> Updated:
    """Return the plan of a further search, unless it is worse; of equal ones the last, which knows more."""
    return min(_found(updated.problem, find, starts), updated, key=attrgetter("iteration_s"))


def _found(problem: Problem, find: Find, starts: tuple[Decision, ...] = ()) -> Updated:
    try:
        return Updated(problem=problem, found=find(problem, starts))
    except ConfigError as error:
        return Updated(problem=problem, found=None, refusal=error)
