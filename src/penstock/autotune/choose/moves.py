"""Decides whether moving samples or experts pays in this run, by what gates choose in a few of its steps.

Shapes: D groups of ranks with the same samples, B samples of such a group, Y MoE layers, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.apportion import Counts
from penstock.autotune.planned import Order, Planned
from penstock.cost.placed import Evidence
from penstock.decision import Decision
from penstock.features.field import NOTHING_MOVES, Movable
from penstock.mesh import Group
from penstock.moe.routers import RouterSums, Tokens
from penstock.plan import estimate_memory, evaluate
from penstock.plan.effort import time_limit
from penstock.plan.moving import WORTH, Weighed, weigh
from penstock.plan.plan_config import AUTO
from penstock.plan.plan_file import corrected, miss
from penstock.runtime import PipelinedStack
from penstock.train.config import RunConfig

OBSERVED_STEPS = 2
"""One step from which replicas would be planned, and the next one, in which they would be used."""
OBSERVED = f"the routing of the last {OBSERVED_STEPS} steps"
LEAST_STEPS = 20
"""Runs with fewer steps do not weigh placement: measuring would take most of their time."""

LayerCounts = Mapping[int, Counts]
"""How often each expert was chosen, [E], by sample id."""


def is_open(config: RunConfig, planned: Planned) -> bool:
    """Tell whether a run that plans leaves it open what moves, in a step in which something may."""
    long = config.plan.mode == AUTO and config.train.steps >= LEAST_STEPS
    return planned.file is not None and long and _movable(config, planned) != NOTHING_MOVES


def _movable(config: RunConfig, planned: Planned) -> Movable:
    placement, work = config.placement, planned.problem.workload
    open_ = placement.samples == "auto" or placement.experts == "auto"
    dropless = config.moe.permutation_name == "sort" and not config.moe.one_copy_per_rank
    if not (open_ and dropless and work.ep_size > 1 and any(planned.problem.shape.moe_layers)):
        return NOTHING_MOVES
    # The loss may depend on which samples share a rank.
    stay = config.moe.joins_rows or config.moe.aux_loss_group == "microbatch"
    return replace(placement.weighed, samples=("none",)) if stay else placement.weighed


class Weighing:
    """Counts what every sample chooses in two steps, and weighs moving by it. All ranks use it together."""

    def __init__(self, stack: PipelinedStack, config: RunConfig) -> None:
        self._stack, self._config = stack, config
        self._layers = [part.moe for part in stack.parts.parts if part.moe is not None]
        self._chosen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self._layers]
        self._steps: list[list[LayerCounts]] = []
        self._hooks: list[RemovableHandle] = [
            layer.gate.register_forward_hook(partial(self._note, place))
            for place, layer in enumerate(self._layers)
        ]

    def end_step(self) -> bool:
        """Record a finished step; return whether it is time to decide."""
        step: list[LayerCounts] = []
        for chosen in self._chosen:
            pairs = (zip(ids_B.tolist(), chosen_BE.cpu().numpy(), strict=True) for ids_B, chosen_BE in chosen)
            step.append(dict(chain.from_iterable(pairs)))
            chosen.clear()
        self._steps.append(step)
        return len(self._steps) == OBSERVED_STEPS

    def decide(self, planned: Planned, *, adopts: bool) -> Planned:
        """Return the plan with lines on what moving would bring; with moves, if they pay and `adopts`."""
        for hook in self._hooks:
            hook.remove()
        everyone = self._stack.machinery.control.gather(self._steps, "gathering what samples chose")
        before, now = ([steps[number] for steps in everyone] for number in range(OBSERVED_STEPS))
        loads = [self._assembled(each) for each in (before, now)]
        # None where some group had no samples.
        evidence = None if loads[0] is None or loads[1] is None else Evidence(loads[0], loads[1])
        problem = planned.problem
        if evidence is None or evidence.now_DBYE.shape[1] != problem.batch:
            return planned
        problem = replace(problem, evidence=evidence, movable=_movable(self._config, planned))
        lines, order = self._stack.machinery.control.decided(
            lambda: _weighed(replace(planned, problem=problem), adopts),
            "weighing what moving samples and experts would bring",
            slowly=True,
        )
        planned = planned.noting(*lines)
        if order is not None:
            # Other plans were priced by even routing, so their times cannot be compared.
            learnt = replace(planned.learnt, others=())
            planned = replace(planned.another(order), learnt=learnt)
        return planned.seeing(evidence)

    def _note(self, place: int, gate: nn.Module, given: tuple[Any, ...], choice: Any) -> None:
        """Record a gate's choices in a training pass; evaluations, and gates asked ahead, do not count."""
        tokens: Tokens = given[1]
        if not gate.training or tokens.keys is None or tokens.clean:
            return
        sums: RouterSums = choice.sums
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


def _weighed(planned: Planned, adopts: bool) -> tuple[tuple[str, ...], Order | None]:
    """Return, on rank 0, what moving would bring, in lines, and another plan where one `adopts` it.

    In that plan something moves that stays now, or stays that moves now.
    """
    problem, file = planned.problem, planned.file
    memory_bytes = None if file is None else file.memory_bytes
    if memory_bytes is not None:  # what runs fits, whatever is estimated
        needed_bytes = estimate_memory(problem, planned.choice).total_bytes
        memory_bytes = max(memory_bytes, needed_bytes)
    over = time_limit(time.monotonic)  # all ranks wait, and what moves would bring is no need
    weighed = weigh(problem, [planned.choice], memory_bytes, OBSERVED, planned.learnt.lost, over)
    wanted = replace(weighed.best.choice, priority=planned.choice.priority)
    if not adopts or _moves(wanted) == _moves(planned.choice) or _stays(planned, weighed):
        return weighed.lines, None
    best = evaluate(problem, wanted)
    return weighed.lines, Order.of(best.choice, best.plan)


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
