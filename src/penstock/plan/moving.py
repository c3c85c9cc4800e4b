"""Whether it pays to move samples or experts: good plans priced once more, with measured routing.

A search prices even routing, with which moves gain nothing. Here the best plans are compared with themselves:
with samples moved, with experts moved by each planner, and with both. The cost of moves (solving, counts,
residuals, weights, gradients) is part of the simulated step as tasks, so one number decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from penstock.cost import routing_sizes
from penstock.cost.placed import Evidence
from penstock.decision import Decision, Movable
from penstock.decision.record import FIELDS
from penstock.features.expert_replicas.feature import why_experts_stay
from penstock.features.expert_replicas.prices import LATE
from penstock.features.sample_placement.feature import why_samples_stay
from penstock.graph import RefusalError
from penstock.mesh import Group, holders, standing_ranks
from penstock.plan.candidate import Candidate, evaluate
from penstock.plan.plan_file import PLACED, LostTrial, corrected, miss
from penstock.plan.problem import QUICK, Problem
from penstock.words import change, counted, gib
from penstock.workloads import RoutingConfig, RoutingSizes, routing_of, routing_of_layers

WORTH = 0.97
"""Moves must shorten a step to less than this part of its time; predictions err by about as much."""


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """Priced moves. refused: by reason, the names of the moves that the step cannot have."""

    found: list[Candidate] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A plan with and without moves.

    Attributes:
        problem: The step, with the routing by which both are priced.
        still: The plan without moves.
        best: The fastest plan of all, where moving is worth it or nothing else fits; else `still`.
        lines: Text on samples, on experts and on both, as far as they may move, with the reasons; also on
            moves that could not be weighed.
        fits: Whether the plan without moves fits into memory.
    """

    problem: Problem
    still: Candidate
    best: Candidate
    lines: tuple[str, ...]
    fits: bool = True

    @property
    def moves(self) -> bool:
        """Whether moving pays."""
        return self.best.choice != self.still.choice

    @property
    def verdict(self) -> str:
        """A line with the plan that follows."""
        return f"{PLACED}  {self.best.choice.words if self.moves else 'nothing is to move'}"


def with_routing(problem: Problem, routing: RoutingConfig, movable: Movable) -> Problem:
    """Return the problem with evidence: a step routed like a workload's second step, known from its first.

    Args:
        routing: The workload.
        movable: What may move.
    """
    return replace(problem, evidence=known_routing(problem, routing), movable=movable)


def weigh(
    problem: Problem,
    choices: Sequence[Decision],
    memory_bytes: int | None = None,
    routing: str = "the given routing",
    lost: Sequence[LostTrial] = (),
    ends: Callable[[], bool] = lambda: False,
) -> Weighed:
    """Compare the best of `choices` with itself moving.

    Args:
        problem: The step with evidence, and with what may move.
        choices: The plans to compare; the best of them without moves is the one that may move.
        memory_bytes: The memory of a rank, which plans with moves must fit; None = not known.
        routing: The name of the evidence, as text.
        lost: Trials by which the predictions of moves are corrected.
        ends: Tells whether the time is over; moves that are left then are not weighed.

    Raises:
        RefusalError: If no choice is possible without moves.
    """

    def price(tried: Iterable[Decision], *, always: bool = False) -> _Priced:
        priced = _Priced()
        for choice in tried:
            try:
                if not always and ends():
                    raise RefusalError(LATE)
                candidate = evaluate(problem, choice)
                priced.found.append(corrected(candidate, miss(lost, choice, staying(problem, choice))))
            except RefusalError as error:
                priced.refused.setdefault(str(error), []).append(_moves(choice))
        return priced

    plain = price((_settled(problem, choice) for choice in choices), always=True)
    if not plain.found:
        raise RefusalError(f"there is no plan to compare moves with: {'; '.join(plain.refused)}")
    still = _least(plain.found)
    samples = price(_moving(problem, still.choice, "samples"))
    experts = price(
        replace(moving, replica_slots=slots)
        for moving in _moving(problem, still.choice, "experts")
        for slots in FIELDS["replica_slots"].values(problem, moving)
    )
    possible = problem.movable.samples, problem.movable.experts
    whys = why_samples_stay(problem, still.choice), why_experts_stay(problem, still.choice)
    for priced, values, why in zip((samples, experts), possible, whys, strict=True):
        if why and len(values) > 1:  # what the problem leaves open cannot move with this choice
            priced.refused[why] = []
    most = math.inf if memory_bytes is None else memory_bytes
    alone = [_least(fit) for each in (samples, experts) if (fit := _usable(each.found, most))]
    both = price([replace(alone[1].choice, samples=alone[0].choice.samples)] if len(alone) == 2 else [])
    moving = [each for some in (samples, experts, both) for each in _usable(some.found, most)]
    best, fits = _least(moving or [still]), still.memory_bytes <= most
    best = best if not fits or best.predicted_s < WORTH * still.predicted_s else still
    labelled = ("Samples", samples), ("Experts", experts), ("Both   ", both)
    lines = [line for what, priced in labelled for line in _lines(problem, what, still, priced, most, lost)]
    if any(priced.found for _, priced in labelled):
        lines[:0] = _base(problem, still, choices, routing, fits)
    return Weighed(problem=problem, still=still, best=best, lines=tuple(lines), fits=fits)


def in_full(problem: Problem, weighed: Weighed, choice: Decision) -> Weighed:
    """Return `weighed` with the order that `choice` asks for: moves were weighed with a quick rule."""
    if not weighed.moves:
        return weighed
    best = evaluate(problem, replace(weighed.best.choice, priority=choice.priority))
    return replace(weighed, best=best)


def _usable(candidates: Sequence[Candidate], most_bytes: float) -> list[Candidate]:
    """Return the candidates that fit; with more replica slots only where these shorten the step enough."""
    fitting = [each for each in candidates if each.memory_bytes <= most_bytes]
    usable: list[Candidate] = []
    for replicas in sorted({each.choice.num_replica_slots for each in fitting}):
        more = [each for each in fitting if each.choice.num_replica_slots == replicas]
        if not usable or _least(more).predicted_s < WORTH * _least(usable).predicted_s:
            usable += more
    return usable


def _settled(problem: Problem, choice: Decision) -> Decision:
    """Return the choice without open moves and with a quick rule, so that like is compared with like."""
    free = choice.reads("priority") and "priority" not in dict(problem.forced)
    quick = QUICK if free else choice.priority
    return replace(staying(problem, choice), priority=quick)


def staying(problem: Problem, choice: Decision) -> Decision:
    """Return the choice without the moves that the problem leaves open."""
    moves = (FIELDS[name].values(problem, choice) for name in ("samples", "experts"))
    samples, experts = (min(each, key=lambda move: move != "none") for each in moves)  # none, or the first
    settled = replace(choice, samples=samples, experts=experts)
    return replace(settled, replica_slots=FIELDS["replica_slots"].values(problem, settled)[0])


def _moving(problem: Problem, choice: Decision, name: Literal["samples", "experts"]) -> list[Decision]:
    """Return the choice with each other value of a field in which something moves."""
    values = FIELDS[name].values(problem, choice)
    return [choice.deciding(name, each) for each in values if each not in ("none", choice.value(name))]


def _least(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda each: each.predicted_s)


# ---- words -------------------------------------------------------------------------------------------------


def _base(
    problem: Problem, still: Candidate, choices: Sequence[Decision], routing: str, fits: bool
) -> list[str]:
    """Return what moves are compared with, and why it is not the time predicted for the plan before."""
    of = "forward and backward take"
    of = of if still.plan.shape.updating is None else "the step, updates included, takes"
    quick = any(choice.reads("priority") and choice.priority != QUICK for choice in choices)
    order = " (ordered by a quick rule, as with every move below)" if quick else ""
    short = "" if fits else f", which needs {gib(still.memory_bytes)} per rank and does not fit"
    instead = f"with {routing} instead of even routing, {of} {still.predicted} without moves{order}{short}"
    sample = sample_words(problem)
    stands = [f"Sample   moves weighed on {sample}, which stand for all"] if sample else []
    return [f"Moving   {instead}", *stands]


def _lines(
    problem: Problem,
    what: str,
    still: Candidate,
    priced: _Priced,
    most_bytes: float,
    lost: Sequence[LostTrial],
) -> Iterator[str]:
    """Yield whether the best of some moves pays, and which moves could not be weighed."""
    if priced.found:
        yield _line(problem, what, still, priced.found, most_bytes, lost)
    for why, moves in priced.refused.items():
        names = ", ".join(dict.fromkeys(moves))
        yield f"{what}  not weighed: {names}{': ' if names else ''}{why}"


def _line(
    problem: Problem,
    what: str,
    still: Candidate,
    moving: Sequence[Candidate],
    most_bytes: float,
    lost: Sequence[LostTrial],
) -> str:
    """Return whether the best of some moves pays: the step with and without it, and what the move saves."""
    if not (usable := _usable(moving, most_bytes)):
        leanest = min(moving, key=lambda each: each.memory_bytes)
        return f"{what}  does not fit: {_words(leanest)} needs {gib(leanest.memory_bytes)} per rank"
    best = _least(usable)
    verdict = "pays" if best.predicted_s < WORTH * still.predicted_s else "does not pay"
    verdict += " but fits" if still.memory_bytes > most_bytes and "not" in verdict else ""
    against = f"{best.predicted} ({change(best.predicted_s, still.predicted_s)})"
    err = miss(lost, best.choice, still.choice)
    tried = "" if err == 1 else f" by a trial, whose steps took {err:.2f} times as long as predicted"
    both = [
        (problem.routed_cost(each.choice, each.plan.shape), each.plan.graph.tasks) for each in (still, best)
    ]
    if best.choice.samples != "none":
        before, after = (routed.crossing_rows(tasks) for routed, tasks in both)
        where = "nodes" if problem.workload.nodes > 1 else "ranks"
        share = 0.0 if not before else 100 * (before - after) / before
        saved = f"{share:.0f} % of what crosses {where} is saved"
    else:
        before, after = (routed.imbalance(tasks) for routed, tasks in both)
        saved = f"the busiest rank has {before:.2f} times the mean load, {after:.2f} with it"
    return f"{what}  {_words(best)}: {against}, {verdict}{tried}; {saved}"


def _words(candidate: Candidate) -> str:
    choice = candidate.choice
    slots = (
        f"{choice.experts} with {counted(choice.num_replica_slots, 'replica slot')}"
        if choice.num_replica_slots
        else ""
    )
    samples = "" if choice.samples == "none" else choice.samples
    return " and ".join(word for word in (samples, slots) if word)


def _moves(choice: Decision) -> str:
    return " and ".join(name for name in (choice.samples, choice.experts) if name != "none")


# ---- a known routing of a large step by a sample of it: the expert groups that stand for all, and some
# layers
#
# Moves are weighed exactly up to EXACT_CELLS rows from rank to rank. Beyond that
# - one expert group stands for all (as many as fill whole nodes): all have equal experts and links, and their
#   samples differ by chance alone;
# - layers are ordered by the load of their busiest rank and cut into as many equal parts as SAMPLED_CELLS
#   allows, but at least LEAST_LAYERS. The middle layer of a part stands for all layers of the part.
#
# So time and memory to weigh moves grow as K P (P + E) + T P, with P ranks of an expert group, E experts, K
# layers of the sample and T tasks of the whole step; neither grows with the number of expert groups, and K P
# P stays below max(EXACT_CELLS, LEAST_LAYERS P P). Replicas are planned and samples assigned K times.


EXACT_CELLS: Final = 1 << 18
"""Numbers of rows from rank to rank, in all layers, up to which every layer and rank is weighed."""
SAMPLED_CELLS: Final = 1 << 16
"""The same in the sample of a larger step."""
LEAST_LAYERS: Final = 2
"""The fewest layers of a sample: one of the more even half of the layers, one of the others."""


def known_routing(problem: Problem, routing: RoutingConfig) -> Evidence:
    """Return a workload's first two steps as evidence: of the whole step, or of a sample of a large one."""
    sizes = sample_sizes(problem)
    moe_layers = sum(problem.shape.moe_layers)
    if sizes.moe_layers == moe_layers:
        steps = routing_of(routing, sizes)
        return Evidence(steps.counts(0), steps.counts(1))
    steps, columns = routing_of_layers(routing, sizes, moe_layers)
    return Evidence(steps.counts(0), steps.counts(1), columns)


def sample_sizes(problem: Problem) -> RoutingSizes:
    """Return the groups of ranks and the layers whose routing is worked out: all, unless these are many."""
    work, moe_layers = problem.workload, sum(problem.shape.moe_layers)
    if work.world_size * work.ep_size * moe_layers <= EXACT_CELLS:
        return routing_sizes(work, moe_layers)
    ranks = work.world_size if problem.slowness else standing_ranks(work.mesh, work.known_per_node)
    cells = ranks * work.ep_size
    layers = min(moe_layers, max(LEAST_LAYERS, SAMPLED_CELLS // cells))
    return routing_sizes(work.part(holders(ranks, work.tp_size)), layers)


def sample_words(problem: Problem) -> str:
    """Return which part of a step its evidence is, such as `4 of 64 MoE layers`; "" for all of it."""
    evidence, work, moe_layers = problem.evidence, problem.workload, sum(problem.shape.moe_layers)
    if evidence is None:
        return ""
    parts = []
    if evidence.columns:
        parts.append(f"{evidence.known_layers} of {counted(moe_layers, 'MoE layer')}")
    sampled, groups = (each.mesh.size(Group.EXPERT_DATA) for each in (evidence.part_of(work), work))
    if sampled < groups:
        parts.append(f"{sampled} of {counted(groups, 'expert group')}")
    return " and ".join(parts)
