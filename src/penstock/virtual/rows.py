"""How many rows every rank sends to every expert, in every piece of a step.

Shapes: P ranks, B samples per rank, R microbatches, C slices, Y MoE layers, E experts (total), G groups of
ranks that hold all experts, S source and T target rank in such a group, N experts of one rank.
"""

from __future__ import annotations

import numpy as np

from penstock.cost import Workload, split_sizes
from penstock.placement import ExpertPlacement
from penstock.step import StepShape
from penstock.virtual.apportion import Counts, apportion


def cut_rows(counts_PBYE: Counts, shape: StepShape, work: Workload) -> Counts:
    """Rows that each rank sends to each expert in each piece: [P, R, C, Y, E].

    Dropless they follow the counts. With a capacity_factor every expert has its slots, used or not.
    """
    if work.capacity_factor is not None or work.slots_per_sample:
        return _even(counts_PBYE, shape, work)
    ranks, _, layers, experts = counts_PBYE.shape
    rows = np.zeros((ranks, shape.microbatches, shape.slices, layers, experts), dtype=np.int64)
    first = 0
    for m, samples in enumerate(split_sizes(work.batch, shape.microbatches)):
        _cut_microbatch(counts_PBYE[:, first : first + samples], work, rows[:, m])
        first += samples
    return rows


def by_source_and_target(rows_PE: Counts, placement: ExpertPlacement) -> Counts:
    """Rows of one piece by who sends them and who holds their expert: [G, S, T, N]."""
    by_position = rows_PE if placement.is_even else rows_PE[:, list(placement.by_position)]
    return by_position.reshape(-1, placement.ranks, placement.ranks, placement.slots)


def _even(counts_PBYE: Counts, shape: StepShape, work: Workload) -> Counts:
    ranks, _, layers, experts = counts_PBYE.shape
    rows = np.empty((ranks, shape.microbatches, shape.slices, layers, experts), dtype=np.int64)
    for m in range(shape.microbatches):
        for c in range(shape.slices):
            rows[:, m, c] = work.rows(m, shape.microbatches, c, shape.slices) // work.num_experts
    return rows


def _cut_microbatch(counts_PBYE: Counts, work: Workload, rows_PCYE: Counts) -> None:
    """Add the samples' counts to the slices. A slice is a range of the microbatch's tokens.

    Where a slice's border cuts a sample, each part gets its even share of the sample's experts.
    """
    length, copies = work.seq_len, work.top_k
    ends = np.cumsum(split_sizes(counts_PBYE.shape[1] * length, rows_PCYE.shape[1]))
    piece = 0
    for sample in range(counts_PBYE.shape[1]):
        left, token, end = counts_PBYE[:, sample], sample * length, (sample + 1) * length
        while token < end:
            while ends[piece] <= token:  # slices may be empty
                piece += 1
            stop = min(end, int(ends[piece]))
            part = apportion(left, (stop - token) * copies)
            rows_PCYE[:, piece] += part
            left, token = left - part, stop
