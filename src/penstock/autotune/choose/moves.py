"""Observes what gates choose, sample by sample, in a few steps of training: the evidence for moving.

Shapes: D groups of ranks with the same samples, B samples of such a group, Y MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.apportion import Counts
from penstock.autotune.planned import Order, Planned, decided_slowly
from penstock.cost.placed import Evidence
from penstock.decision import Decision
from penstock.decision.field import NOTHING_MOVES, Movable
from penstock.mesh import Group
from penstock.moe.choices import GateSums
from penstock.moe.tokens import Tokens
from penstock.plan import MemoryBudget, Problem, estimate_memory, evaluate
from penstock.plan.lost import corrected, miss
from penstock.plan.moving import WORTH, Weighed, weigh
from penstock.runtime import PipelinedStack
from penstock.train.config import RunConfig

OBSERVED_STEPS = 2
"""One step from which guests would be planned, and the next one, in which they would be used."""

LayerCounts = Mapping[int, Counts]
"""How often each expert was chosen, [E], by sample id."""


class Observer:
    """Counts the choices of every sample while it is open. All ranks open, query and close it together."""

    def __init__(self, stack: PipelinedStack) -> None:
        self._stack = stack
        self._layers = [part.moe for part in stack.parts.parts if part.moe is not None]
        self._chosen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._layers]
        self._steps: list[list[LayerCounts]] = []
        self._hooks: list[RemovableHandle] = [
            layer.gate.register_forward_hook(partial(self._note, place))
            for place, layer in enumerate(self._layers)
        ]

    def end_step(self) -> bool:
        """Record a finished step; return whether enough steps have been observed."""
        self._steps.append([_by_sample(each) for each in self._chosen])
        for chosen in self._chosen:
            chosen.clear()
        return len(self._steps) == OBSERVED_STEPS

    def close(self) -> Evidence | None:
        """Return what all ranks have observed; None where some group had no samples."""
        for hook in self._hooks:
            hook.remove()
        everyone = self._stack.machinery.control.gather(self._steps, "gathering what samples chose")
        before, now = ([steps[number] for steps in everyone] for number in range(OBSERVED_STEPS))
        found = [self._assembled(each) for each in (before, now)]
        return None if found[0] is None or found[1] is None else Evidence(found[0], found[1])

    def _note(self, place: int, gate: nn.Module, given: tuple[Any, ...], choice: Any) -> None:
        """Record a gate's choices in a training pass; evaluations, and gates asked ahead, do not count."""
        tokens: Tokens = given[1]
        if not gate.training or tokens.keys is None or tokens.clean:
            return
        sums: GateSums = choice.sums
        self._chosen[place].append((tokens.keys.sample_ids_B, sums.chosen_BE))

    def _assembled(self, everyone: Sequence[Sequence[LayerCounts]]) -> Counts | None:
        """Return counts of one step, [D, B, Y, E], samples in the first layer's order, as in every group."""
        mesh = self._stack.machinery.layout.mesh
        groups = mesh.groups(Group.TENSOR)
        total: list[dict[int, Counts]] = [{} for _ in self._layers]
        for place, layer in enumerate(total):
            for ranks in groups:
                for rank in ranks if self._splits_tokens else ranks[:1]:
                    for sample, counts_E in everyone[rank][place].items():
                        layer[sample] = layer.get(sample, 0) + counts_E
        held = [sorted(everyone[ranks[0]][0]) for ranks in groups]
        samples = min(map(len, held))
        if not samples:
            return None
        return np.array([[[layer[s] for layer in total] for s in here[:samples]] for here in held])

    @property
    def _splits_tokens(self) -> bool:
        """Whether ranks that share attention each have a part of every sample's tokens at the gates."""
        shape = self._stack.plan.shape
        return any(shape.tokens_of(n) == "split" for n, is_moe in enumerate(shape.moe_layers) if is_moe)


def _by_sample(chosen: Sequence[tuple[Tensor, Tensor]]) -> LayerCounts:
    return {
        sample: counts_E
        for ids_B, chosen_BE in chosen
        for sample, counts_E in zip(ids_B.tolist(), chosen_BE.cpu().numpy(), strict=True)
    }


# ---- decides whether moving samples or experts pays in this run,  ------------------------------------------


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
        learnt = replace(noted.learnt, others=())
        another = replace(noted, choice=verdict.choice, plan=plan, number=number, plans=number, learnt=learnt)
        return another.seeing(evidence)


def _weighed(planned: Planned, adopts: bool) -> _Verdict:
    """Return another plan where something is to move that stays now, or to stay that moves now."""
    problem, file = planned.problem, planned.file
    memory = None if file is None else MemoryBudget.of(file.memory_bytes)
    if memory is not None:  # what runs fits, whatever is estimated
        memory = MemoryBudget(bytes=max(memory.bytes, _needed_bytes(problem, planned.choice)))
    found = weigh(problem, [planned.choice], memory, OBSERVED, planned.learnt.lost)
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
    now = corrected(now, miss(planned.learnt.lost, choice, found.still.choice))
    pays = not found.fits or now.predicted_s < WORTH * found.still.predicted_s
    return pays and found.best.predicted_s >= WORTH * now.predicted_s


def _moves(choice: Decision) -> tuple[object, ...]:
    """Return what moves by a choice, and how: the fields with and without which a settled plan is weighed."""
    slots = None if choice.experts == "none" else choice.replica_slots
    return choice.samples, choice.experts, slots
