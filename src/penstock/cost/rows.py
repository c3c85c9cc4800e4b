"""Numbers of rows that every rank sends to every expert, in every piece of a step.

Shapes: D groups of ranks with the same samples, P ranks, B samples of such a group, R microbatches, C slices,
Y MoE layers, E experts (total), G groups of ranks that hold all experts, S source and T target in such a
group, H ranks that share every expert, N experts of one rank.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from penstock.apportion import Counts, apportion
from penstock.cost.workload import Workload, split_sizes
from penstock.mesh import Group
from penstock.placement import ExpertPlacement
from penstock.step import StepShape
from penstock.step.shape import FORM_TOKENS


def gate_shares(shape: StepShape) -> int:
    """Return the number of ranks that each have a part of every sample's tokens at the gate."""
    return shape.sharing.tp_size if FORM_TOKENS[shape.expert_form] == "split" else 1


def cut_rows(counts_DBYE: Counts, shape: StepShape, work: Workload) -> Counts:
    """Return the rows that each rank brings for each expert in each piece: [P, R, C, Y, E].

    Dropless, they follow the counts; ranks that share attention each have the rows of their own tokens, or
    all have the same rows. With a capacity_factor every expert has its slots, used or not; where rows are
    joined, it has the chosen rows up to the number of slots.
    """
    _, _, layers, experts = counts_DBYE.shape
    rows = np.zeros((work.world_size, shape.microbatches, shape.slices, layers, experts), dtype=np.int64)
    first = 0
    for m, samples in enumerate(split_sizes(work.batch, shape.microbatches)):
        if work.fixed_slots:
            slots = split_sizes(_slots(work, samples, gate_shares(shape)), shape.slices)
            rows[:, m] = np.array(slots)[:, None, None]
        else:
            _cut_microbatch(counts_DBYE[:, first : first + samples], shape, work, rows[:, m])
            if work.capacity_factor is not None:
                rows[:, m] = _kept(rows[:, m], _slots(work, samples, gate_shares(shape)))
        first += samples
    return rows


def dealt(rows_PRCYE: Counts, shape: StepShape, work: Workload) -> Counts:
    """Return the rows that every rank sends of those it brings: ranks with the same rows may deal them."""
    if shape.expert_form != "s2" or work.tp_size == 1:
        return rows_PRCYE
    turns = [work.mesh.place(rank, Group.TENSOR) for rank in range(work.world_size)]
    return in_turn(rows_PRCYE, np.array(turns)[:, None, None, None, None], work.tp_size)


def in_turn(rows: Counts, turn: Counts | int, shares: int) -> Counts:
    """Return the number of rows that one turn gets when rows are dealt to `shares` turns, counted from 0."""
    share: Counts = (rows - turn + shares - 1) // shares
    return share


def by_source_and_target(rows_PE: Counts, placement: ExpertPlacement, shards: int = 1) -> Counts:
    """Return rows of one piece by who brings them and who holds their expert: [G, S, H, T, N].

    A source is its place in the group and its shard. shards: ranks that share every expert.
    """
    by_position = rows_PE if placement.is_even else rows_PE[:, list(placement.by_position)]
    return by_position.reshape(-1, placement.ranks, shards, placement.ranks, placement.slots)


def _slots(work: Workload, samples: int, shares: int) -> int:
    """Return slots of an expert for one rank's tokens in a microbatch, by the longest part of samples."""
    if work.slots_per_sample:
        return samples * work.slots_per_sample
    return work.slots(samples * split_sizes(work.seq_len, shares)[0])


def _kept(rows_PCYE: Counts, slots: int) -> Counts:
    """Return rows that are kept when every expert takes at most `slots` of a rank, earlier slices first."""
    taken: Counts = np.minimum(rows_PCYE.cumsum(axis=1), slots)
    kept: Counts = np.diff(taken, axis=1, prepend=0)
    return kept


def _cut_microbatch(counts_DBYE: Counts, shape: StepShape, work: Workload, rows_PCYE: Counts) -> None:
    """Add the samples' counts to the slices of the ranks that have their tokens."""
    lengths = split_sizes(work.seq_len, gate_shares(shape))
    group, part = _owners(work, len(lengths))
    left = counts_DBYE
    for place, length in enumerate(lengths):
        mine = apportion(left, length * work.top_k)
        ranks = np.flatnonzero(part == place)
        sliced = np.zeros((len(left), *rows_PCYE.shape[1:]), dtype=np.int64)
        _cut_samples(mine, length, work.top_k, sliced)
        rows_PCYE[ranks] = sliced[group[ranks]]
        left = left - mine


@lru_cache(maxsize=16)
def _owners(work: Workload, parts: int) -> tuple[Counts, Counts]:
    """Return for every rank the group whose samples it has, and which part of their tokens."""
    ranks = range(work.world_size)
    part = [work.mesh.place(rank, Group.TENSOR) if parts > 1 else 0 for rank in ranks]
    return np.array([work.mesh.place(rank, Group.DATA) for rank in ranks]), np.array(part)


def _cut_samples(counts_DBYE: Counts, length: int, copies: int, rows_DCYE: Counts) -> None:
    """Add the samples' counts to the slices. A slice is a range of the microbatch's tokens.

    Where a slice's border cuts a sample, each part gets its even share of the sample's experts. length: of
    the samples; copies: of every token.
    """
    ends = np.cumsum(split_sizes(counts_DBYE.shape[1] * length, rows_DCYE.shape[1]))
    piece = 0
    for sample in range(counts_DBYE.shape[1]):
        left, token, end = counts_DBYE[:, sample], sample * length, (sample + 1) * length
        while token < end:
            while ends[piece] <= token:  # slices may be empty
                piece += 1
            stop = min(end, int(ends[piece]))
            part = apportion(left, (stop - token) * copies)
            rows_DCYE[:, piece] += part
            left, token = left - part, stop
