"""Decides whether moving samples or experts pays in this run, by what was observed in a few steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.autotune.deciding import decided_slowly
from penstock.autotune.observing import OBSERVED_STEPS, Observer
from penstock.autotune.planned import Order, Planned
from penstock.decision import Decision
from penstock.decision.field import NOTHING_MOVES, Movable
from penstock.plan import MemoryBudget, Problem, estimate_memory, evaluate
from penstock.plan.lost import corrected, miss
from penstock.plan.moving import WORTH, Weighed, weigh
from penstock.runtime import PipelinedStack
from penstock.train.config import RunConfig

LEAST_STEPS = 20
"""Runs with fewer steps do not weigh placement: measuring would take most of their time."""


OBSERVED = f"the routing of the last {OBSERVED_STEPS} steps"


def is_open(config: RunConfig, planned: Planned) -> bool:
    """Tell whether it is open what moves, in a step in which something may, and costs were measured."""
    long = config.train.steps >= LEAST_STEPS
    return planned.file is not None and long and _movable(config, planned) != NOTHING_MOVES


def _movable(config: RunConfig, planned: Planned) -> Movable:
    placement, work = config.placement, planned.problem.workload
    open_ = placement.samples == "auto" or placement.experts == "auto"
    dropless = config.moe.order_name == "sort" and not config.moe.one_copy_per_rank
    joined = config.moe.joins_rows
    if not (open_ and dropless and work.ep_size > 1 and any(planned.problem.shape.moe_layers)):
        return NOTHING_MOVES
    by_rank = joined or config.moe.aux_loss_group == "microbatch"  # it depends on which samples share a rank
    return replace(placement.weighed, samples=("none",)) if by_rank else placement.weighed


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """The decision of rank 0. choice, order: of another plan, with moves; None = the plan in use stays."""

    lines: tuple[str, ...]
    choice: Decision | None = None
    order: Order | None = None


class Weighing:
    """Observes two steps and weighs moving by them. All ranks make and query it together."""

    def __init__(self, stack: PipelinedStack, config: RunConfig) -> None:
        self._stack, self._config = stack, config
        self._observer = Observer(stack)

    def end_step(self) -> bool:
        """Record a finished step; return whether it is time to decide."""
        return self._observer.end_step()

    def decide(self, planned: Planned, *, adopts: bool) -> Planned:
        """Return the plan with lines on what moving would bring; with moves, if they pay and `adopts`."""
        evidence = self._observer.close()
        problem = planned.problem
        if evidence is None or evidence.now_DBYE.shape[1] != problem.batch:
            return planned
        problem = replace(problem, evidence=evidence, movable=_movable(self._config, planned))
        verdict = decided_slowly(
            self._stack.machinery.control,
            lambda: _weighed(replace(planned, problem=problem), adopts),
            "weighing what moving samples and experts would bring",
            self._config.parallel.timeout_s,
        )
        noted = planned.noting(*verdict.lines)
        if verdict.choice is None or verdict.order is None:
            return noted.seeing(evidence)
        number, plan = planned.plans + 1, verdict.order.plan
        # Other plans were priced by even routing, so their times cannot be compared.
        another = replace(noted, choice=verdict.choice, plan=plan, number=number, plans=number, others=())
        return another.seeing(evidence)


def _weighed(planned: Planned, adopts: bool) -> _Verdict:
    """Return another plan where something is to move that stays now, or to stay that moves now."""
    problem, file = planned.problem, planned.file
    memory = None if file is None else MemoryBudget.of(file.memory_bytes)
    if memory is not None:  # what runs fits, whatever is estimated
        memory = MemoryBudget(bytes=max(memory.bytes, _needed_bytes(problem, planned.choice)))
    found = weigh(problem, [planned.choice], memory, OBSERVED, planned.lost)
    wanted = replace(found.best.choice, priority=planned.choice.priority)
    if not adopts or _moves(wanted) == _moves(planned.choice) or _stays(planned, found):
        return _Verdict(lines=found.lines)
    best = evaluate(problem, wanted)
    return _Verdict(lines=found.lines, choice=best.choice, order=Order.of(best.plan))


def _needed_bytes(problem: Problem, choice: Decision) -> int:
    return estimate_memory(problem, choice).total_bytes


def _stays(planned: Planned, found: Weighed) -> bool:
    """Tell whether what moves by the plan still pays, and other moves gain no more than predictions err."""
    choice = planned.choice
    if not found.moves or _moves(choice) == _moves(found.still.choice):
        return False
    now = evaluate(planned.problem, replace(choice, priority=found.best.choice.priority))
    now = corrected(now, miss(planned.lost, choice, found.still.choice))
    pays = not found.fits or now.predicted_s < WORTH * found.still.predicted_s
    return pays and found.best.predicted_s >= WORTH * now.predicted_s


def _moves(choice: Decision) -> tuple[object, ...]:
    """Return what moves by a choice, and how: the fields with and without which a settled plan is weighed."""
    slots = None if choice.experts == "none" else choice.replica_slots
    return choice.samples, choice.experts, slots
