"""Numbers of rows that every rank brings for every expert, in every piece of a step, from those of samples.

They take O(P R C Y E) numbers for all ranks of the world: 2 MiB for a piece of a layer of 1,024 ranks and 256
experts.
Shapes: D groups of ranks with the same samples, P ranks, B samples of such a group, R microbatches, C slices,
Y MoE layers, E experts (total), G groups of ranks that hold all experts, S source and T target in such a
group, H ranks that share every expert, N experts of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from penstock.apportion import Counts, apportion
from penstock.mesh import Group, Mesh
from penstock.placement import ExpertPlacement, Replication
from penstock.routing.sizes import split_sizes


@dataclass(frozen=True, kw_only=True)
class BatchCut:
    """How the batch of a step is cut into pieces.

    Attributes:
        mesh: The ranks of the step.
        samples: The samples of a group of ranks with the same samples.
        seq_len: The tokens of a sample.
        top_k: The experts of a token.
        microbatches: The parts of the samples.
        slices: The parts of a microbatch's tokens, or of its slots.
        token_shards: The ranks that each have a part of every sample's tokens at the router.
        slots: The slots of every expert for one rank's tokens, by microbatch; () = dropless.
        fixed: Whether slots travel whether they are used or not.
    """

    mesh: Mesh
    samples: int
    seq_len: int
    top_k: int
    microbatches: int
    slices: int
    token_shards: int = 1
    slots: tuple[int, ...] = ()
    fixed: bool = False

    def rows(self, counts_DBYE: Counts) -> Counts:
        """Return the rows that each rank brings for each expert in each piece: [P, R, C, Y, E].

        Dropless, they follow the counts; ranks that share attention each have the rows of their own tokens,
        or all have the same rows. With a capacity every expert has its slots, used or not; where rows are
        joined, it has the chosen rows up to the number of slots.
        """
        shape = self.mesh.world_size, self.microbatches, self.slices, *counts_DBYE.shape[2:]
        rows, first = np.zeros(shape, dtype=np.int64), 0
        for m, samples in enumerate(split_sizes(self.samples, self.microbatches)):
            if self.fixed:
                rows[:, m] = np.array(split_sizes(self.slots[m], self.slices))[:, None, None]
            else:
                # The slices of the ranks that have the samples' tokens.
                rows_PCYE = rows[:, m]
                group_P, part_P = _owners(self.mesh, self.token_shards)
                left = counts_DBYE[:, first : first + samples]
                for part, length in enumerate(split_sizes(self.seq_len, self.token_shards)):
                    of_part = apportion(left, length * self.top_k)
                    ranks = np.flatnonzero(part_P == part)
                    left = left - of_part
                    # Slices are ranges of tokens; a sample on a border is shared evenly.
                    sliced = np.zeros((len(left), *rows_PCYE.shape[1:]), dtype=np.int64)
                    ends = np.cumsum(split_sizes(samples * length, self.slices))
                    borders = np.union1d(ends, np.arange(samples + 1) * length).tolist()
                    for start, stop in pairwise(borders):
                        rest = of_part[:, start // length]
                        cut = apportion(rest, (stop - start) * self.top_k)
                        sliced[:, np.searchsorted(ends, start, side="right")] += cut
                        rest -= cut
                    rows_PCYE[ranks] = sliced[group_P[ranks]]
                if self.slots:  # earlier slices first
                    taken = np.minimum(rows[:, m].cumsum(axis=1), self.slots[m])
                    rows[:, m] = np.diff(taken, axis=1, prepend=0)
            first += samples
        return rows

    def rows_in_all(self, counts_DBYE: Counts) -> Counts:
        """Return the rows that each rank brings for each expert in all pieces together: [P, Y, E].

        Without slots no row is lost where pieces end, so that the pieces need not be made.
        """
        if self.slots or self.fixed:
            summed: Counts = self.rows(counts_DBYE).sum(axis=(1, 2))
            return summed
        group_P, part_P = _owners(self.mesh, self.token_shards)
        rows = np.zeros((self.mesh.world_size, *counts_DBYE.shape[2:]), dtype=np.int64)
        left = counts_DBYE
        for part, length in enumerate(split_sizes(self.seq_len, self.token_shards)):
            of_part = apportion(left, length * self.top_k)
            ranks = np.flatnonzero(part_P == part)
            rows[ranks] = of_part.sum(axis=1)[group_P[ranks]]
            left = left - of_part
        return rows


@lru_cache(maxsize=16)
def _owners(mesh: Mesh, parts: int) -> tuple[Counts, Counts]:
    """Return for every rank the group whose samples it has, and which part of their tokens."""
    ranks = range(mesh.world_size)
    part = [mesh.place(rank, Group.TENSOR) if parts > 1 else 0 for rank in ranks]
    return np.array([mesh.place(rank, Group.DATA) for rank in ranks]), np.array(part)


def by_source_and_target(rows_PE: Counts, placement: ExpertPlacement, shards: int = 1) -> Counts:
    """Return rows of one piece by who brings them and who holds their expert: [G, S, H, T, N].

    A source is its place in the group and its shard.

    Args:
        shards: The ranks that share every expert.
    """
    by_position = rows_PE if placement.is_even else rows_PE[:, list(placement.by_position)]
    return by_position.reshape(-1, placement.ranks, shards, placement.ranks, placement.slots)


# ---- where samples and experts are, once they move ---------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """Places of samples and experts in one step whose samples or experts move.

    Attributes:
        held_YDB: The sample at every place before each MoE layer, and after the last one, [Y + 1, D, B].
            Samples are numbered group by group, as the batch has them.
        replications: The replication of every MoE layer, the same in all expert groups; () = experts stay.
        planning_s: The seconds in which a rank plans its share of the next step's replicas.
    """

    held_YDB: Counts
    replications: tuple[Replication, ...] = ()
    planning_s: float = 0.0

    def leaving(self, counts_DBYE: Counts) -> Counts:
        """Return counts of the samples that are at every place when rows leave for the experts of a layer."""
        return _seen(counts_DBYE, self.held_YDB[:-1])

    def arriving(self, counts_DBYE: Counts) -> Counts:
        """Return counts of the samples that are at every place when a layer's rows have come home."""
        return _seen(counts_DBYE, self.held_YDB[1:])

    def moved(self, moe_layer: int, first: int, last: int) -> Counts:
        """Return how many samples of places `first` to `last` go from group to group in a layer, [D, D]."""
        before_DB, after_DB = self.held_YDB[moe_layer : moe_layer + 2, :, first:last]
        groups, samples = after_DB.shape
        origin = np.empty(self.held_YDB[0].size, np.int64)
        origin[before_DB] = np.arange(groups)[:, None]
        moved_DD = np.zeros((groups, groups), np.int64)
        np.add.at(moved_DD, (origin[after_DB].ravel(), np.repeat(np.arange(groups), samples)), 1)
        return moved_DD

    @staticmethod
    def still(counts_DBYE: Counts, replications: tuple[Replication, ...] = ()) -> Placed:
        """Return the places of a step where every sample stays where the batch has it."""
        groups, samples, layers, _ = counts_DBYE.shape
        places_DB = np.arange(groups * samples).reshape(groups, samples)
        return Placed(np.broadcast_to(places_DB, (layers + 1, groups, samples)), replications)


def _seen(counts_DBYE: Counts, held_YDB: Counts) -> Counts:
    groups, samples, layers, experts = counts_DBYE.shape
    by_sample = counts_DBYE.reshape(groups * samples, layers, experts)
    return np.stack([by_sample[held_DB, y] for y, held_DB in enumerate(held_YDB)], axis=2)
