"""Parm's Algorithm 1 (INFOCOM 2024): which of its two schedules an MoE layer takes, by fitted lines.

Sizes are in bytes. ETM is what the ranks that share attention send to experts together, y = ETM * etp / tp
what each of them hands to the all-to-all over all shards, BLM their tokens.

    S1   2 A2A(y) + AG(BLM)            tokens are gathered at the end, where all ranks want them
    S2   A2A(y) + SAA(y)               SAA: the second all-to-all, and AG(ETM) at the same time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.cost import AlphaBeta
from penstock.decision import Decision
from penstock.features.expert_sharding.feature import expert_forms
from penstock.mesh import Group
from penstock.plan.problem import Problem

SLICES = (1, 2, 4, 8)
"""The numbers of slices of the simultaneous pair that are tried."""


@dataclass(frozen=True, kw_only=True)
class ParmModels:
    """The fitted lines that the algorithm needs.

    Attributes:
        all_to_all: The all-to-all over experts and their shards.
        gather: The gather of tokens or rows among ranks that share attention.
        pair: SAA as one operation, by the size of its all-to-all.
    """

    all_to_all: AlphaBeta
    gather: AlphaBeta
    pair: AlphaBeta


@dataclass(frozen=True, kw_only=True)
class ParmSizes:
    """Bytes of one layer in one direction.

    Attributes:
        y_bytes: What a rank hands to the all-to-all over all shards.
        gathered_bytes: The tokens that S1 gathers.
        converted_bytes: The tokens that S2 gathers where blocks have split tokens.
    """

    y_bytes: float
    gathered_bytes: float
    converted_bytes: float = 0.0


def s1_s(models: ParmModels, sizes: ParmSizes) -> float:
    """Return the seconds of the communication of S1 (Formula 13)."""
    return 2 * models.all_to_all.seconds(sizes.y_bytes) + models.gather.seconds(sizes.gathered_bytes)


def s2_s(models: ParmModels, sizes: ParmSizes) -> float:
    """Return the seconds of the communication of S2 (Formula 14)."""
    pair_s = models.pair.seconds(sizes.y_bytes)
    return models.all_to_all.seconds(sizes.y_bytes) + pair_s + models.gather.seconds(sizes.converted_bytes)


def algorithm_1(models: ParmModels, sizes: ParmSizes) -> Literal["s1", "s2"]:
    """Return the schedule of a layer."""
    return "s1" if s1_s(models, sizes) < s2_s(models, sizes) else "s2"


def overlapped_s(all_to_all_s: float, gather_s: float, slices: int) -> float:
    """Return the seconds of both in slices of these durations: one is gathered while the next is sent."""
    return all_to_all_s + (slices - 1) * max(all_to_all_s, gather_s) + gather_s


def _pair_s(lines: tuple[AlphaBeta, AlphaBeta], etm_over_y: float, y_bytes: float, slices: int) -> float:
    """Return the seconds of an all-to-all of `y_bytes` and the gather after it, in slices, by both lines."""
    sent, gathered = lines
    slice_s = sent.seconds(y_bytes / slices), gathered.seconds(y_bytes * etm_over_y / slices)
    return overlapped_s(*slice_s, slices)


def derived_pair(all_to_all: AlphaBeta, gather: AlphaBeta, etm_over_y: float, y_bytes: float) -> AlphaBeta:
    """Estimate the line of an unmeasured pair near `y_bytes`, with the best number of slices there.

    Args:
        etm_over_y: The bytes that are gathered over those of the all-to-all.
    """
    lines = all_to_all, gather
    slices = min(SLICES, key=lambda count: _pair_s(lines, etm_over_y, y_bytes, count))
    once_s, twice_s = (_pair_s(lines, etm_over_y, times * y_bytes, slices) for times in (1, 2))
    slope = (twice_s - once_s) / y_bytes if y_bytes else 0.0
    return AlphaBeta(alpha_s=once_s - slope * y_bytes, beta_s_per_byte=slope)


def parm_models(problem: Problem) -> ParmModels:
    """Return a cluster's lines, measured or by its rates; an unknown pair is derived from the other two."""
    span = problem.workload.span(Group.EXPERT_SHARDS)
    sent, gathered = _lines(problem)
    y_bytes = parm_sizes(problem).y_bytes
    pair = problem.cluster.pair(span) or derived_pair(sent, gathered, _etm_over_y(problem), y_bytes)
    return ParmModels(all_to_all=sent, gather=gathered, pair=pair)


def parm_sizes(problem: Problem) -> ParmSizes:
    """Return the sizes of an MoE layer of a problem.

    Where blocks have split tokens, S1 gathers none; S2 gathers once, since the sums of attention then go to
    all ranks. Attention has gathered before what the gate of S2 needs besides these sums.
    """
    work, sharing = problem.workload, problem.shape.sharing
    rows = work.rows(0, 1, 0, 1, work.tp_size)
    blm_bytes = work.hidden_bytes(work.tokens(0, 1))
    split = sharing.tokens == "split"
    return ParmSizes(
        y_bytes=work.wire_bytes(rows * work.etp_size),
        gathered_bytes=0.0 if split else blm_bytes,
        converted_bytes=blm_bytes if split else 0.0,
    )


def parm_choice(problem: Problem) -> Decision:
    """Return the schedule that Algorithm 1 takes: one for all MoE layers of a step, which have equal sizes.

    S1 and S2 are the same where every rank has attention of its own. Without sharing there is neither, and
    the choice is plain expert parallelism.
    """
    if not shares_experts(problem):
        return Decision(dispatch=problem.workload.dispatch)
    form = algorithm_1(parm_models(problem), parm_sizes(problem)) if problem.workload.tp_size > 1 else "s1"
    if form == "s1":
        return Decision(schedule="parm_s1")
    # The fastest number of slices of the pair by its two lines.
    y_bytes, lines, ratio = parm_sizes(problem).y_bytes, _lines(problem), _etm_over_y(problem)
    slices = min(SLICES, key=lambda count: _pair_s(lines, ratio, y_bytes, count))
    return Decision(schedule="parm_s2", chunks=slices, backward_chunks=slices)


def shares_experts(problem: Problem) -> bool:
    """Return whether there is a choice: ranks that share attention or experts, a flat dispatch, and nothing
    that has to move."""
    return not problem.shape.sharing.is_none and len(expert_forms(problem, problem.dispatches)) > 1


def _lines(problem: Problem) -> tuple[AlphaBeta, AlphaBeta]:
    work, axes = problem.workload, Group.EXPERT_SHARDS
    gather = problem.cluster.inside("all_gather", work.tp_size)
    return problem.cluster.all_to_all(work.span(axes), axes), gather


def _etm_over_y(problem: Problem) -> float:
    return problem.workload.tp_size / problem.workload.etp_size
