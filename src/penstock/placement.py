"""Where experts are: their homes, owners and replicas. No torch.

The ranks of an expert group have equally many slots, one expert in each. A *position* is a slot of the whole
group, counted rank by rank: rows on their way to experts lie in the order of positions, and counts, routes
and orders go by it. Gates, statistics, checkpoints and the optimiser know an expert by its number.

The default is even and contiguous: with 4 experts on 2 ranks, rank 0 has experts 0 and 1.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from penstock.apportion import Counts

SPLIT = 4096
"""Parts into which an expert's rows that start on one rank are cut, where several positions share them."""

EMPTY = -1
"""The value of a replica slot that holds no expert."""


class PlacementError(ValueError):
    """A placement that contradicts itself, or that differs between ranks."""


class Home(NamedTuple):
    """A rank, counted within the expert group, and the slot in which it holds an expert."""

    rank: int
    slot: int


class Part(NamedTuple):
    """A position to which rows of an expert go, and how many of the SPLIT parts of those rows it receives."""

    position: int
    parts: int


class SplitPairs(NamedTuple):
    """Splits of rows among positions, for the K pairs of an expert's rows on a rank and a position; all [K].

    Attributes:
        rank: Where the rows start.
        expert: Whose rows they are.
        position: Where they go.
        before: How many of the SPLIT parts of these rows go to positions below this one.
        upto: How many go to positions up to this one.
    """

    rank: Counts
    expert: Counts
    position: Counts
    before: Counts
    upto: Counts

    def of(self, rank: int) -> slice:
        """Return where the pairs of a rank are."""
        return slice(*np.searchsorted(self.rank, (rank, rank + 1)).tolist())

    @property
    def parts(self) -> Counts:
        """Parts, of SPLIT, that go to each position."""
        return self.upto - self.before


Splits = tuple[tuple[tuple[Part, ...], ...], ...]
"""By rank and expert, the positions to which rows go."""


@dataclass(frozen=True)
class ExpertPlacement:
    """The expert in every slot of a layer's ranks. Equal on all ranks, which compare its digest.

    Attributes:
        ranks: The number of ranks in the expert group.
        by_position: The expert at every position.

    Raises:
        PlacementError: If an expert has no home, or several.
    """

    ranks: int
    by_position: tuple[int, ...]

    def __post_init__(self) -> None:
        homes = Counter(self.by_position)
        for expert in range(self.num_experts):
            if homes[expert] > 1:
                raise PlacementError(
                    f"expert {expert} has {homes[expert]} homes, and a layer does not sum gradients of "
                    "replicas inside an expert group yet: give every expert one home"
                )
            if not homes[expert]:
                raise PlacementError(f"expert {expert} has no home: rows sent to it would be lost")

    @staticmethod
    @cache
    def even(num_experts: int, ranks: int) -> ExpertPlacement:
        """Place consecutive experts on every rank.

        Raises:
            PlacementError: If the shares would be unequal.
        """
        if num_experts % ranks:
            raise PlacementError(
                f"num_experts = {num_experts} cannot be shared evenly by ep_size = {ranks} ranks; "
                f"nearest valid: {max(1, round(num_experts / ranks)) * ranks}"
            )
        slots = num_experts // ranks
        return ExpertPlacement.of([range(r * slots, (r + 1) * slots) for r in range(ranks)])

    @staticmethod
    def of(held: Sequence[Sequence[int]]) -> ExpertPlacement:
        """Return the placement in which rank r holds expert `held[r][s]` in slot s.

        Raises:
            PlacementError: If ranks have different numbers of slots, or an expert no home, or several.
        """
        for rank, experts in enumerate(held):
            if len(experts) != len(held[0]):
                raise PlacementError(
                    f"rank {rank} has {len(experts)} slots and rank 0 has {len(held[0])}: ranks need equally "
                    "many, since counts of rows travel in pieces of one size"
                )
        return ExpertPlacement(len(held), tuple(chain.from_iterable(held)))

    @property
    def num_experts(self) -> int:
        return len(self.by_position)

    @property
    def slots(self) -> int:
        """The number of slots of every rank."""
        return self.num_experts // self.ranks

    @cached_property
    def is_even(self) -> bool:
        """Whether positions are expert numbers, so that nothing has to be translated."""
        return self.by_position == tuple(range(self.num_experts))

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position of every expert."""
        return tuple(sorted(range(self.num_experts), key=self.by_position.__getitem__))

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """By expert, the rank that holds it, keeps its optimiser state and saves it."""
        return tuple(position // self.slots for position in self.positions)

    def held(self, rank: int) -> tuple[int, ...]:
        """Return the experts of a rank, by slot."""
        return self.by_position[rank * self.slots : (rank + 1) * self.slots]

    def in_words(self, rank: int) -> str:
        """Return the experts of a rank, in the order of its slots, in words: `experts 0 to 3 of 8`."""
        runs: list[list[int]] = []
        for expert in self.held(rank):
            if runs and expert == runs[-1][-1] + 1:
                runs[-1].append(expert)
            else:
                runs.append([expert])
        named = (f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        return f"experts {', '.join(named)} of {self.num_experts}"

    @cached_property
    def digest(self) -> str:
        """A hash of the whole placement, for ranks to compare."""
        homes = tuple((Home(*divmod(position, self.slots)),) for position in self.positions)
        return _digest((self.ranks, self.slots, homes, self.owners))  # as saved runs have it


@dataclass(frozen=True)
class Replication:
    """Which experts ranks hold as replicas for a while, and who computes whose rows. Equal on all ranks.

    Owners stay where `placement` says. Every rank has `replica_slots` slots beside its own `placement.slots`;
    a position is `rank * (placement.slots + replica_slots) + slot`, replicas after own experts.

    Attributes:
        replicas: The expert, or EMPTY, by rank and replica slot.
        splits: By rank and expert the positions to which rows go that start on the rank, with parts that sum
            to SPLIT.
        limit: The most that a rank computes where homes allow it, in SPLITths of the mean: rows of experts
            with several homes are split by the loads of the step that runs. A layer that must know beforehand
            still goes by `splits`, which planners then leave as `local` makes them. None: rows go by
            `splits`.

    Raises:
        PlacementError: If the replication contradicts itself; it names rank, slot and expert.
    """

    placement: ExpertPlacement
    replica_slots: int
    replicas: tuple[tuple[int, ...], ...]
    splits: Splits
    limit: int | None = None

    def __post_init__(self) -> None:
        placement = self.placement
        if len(self.replicas) != placement.ranks:
            raise PlacementError(
                f"replicas of {len(self.replicas)} ranks, and {placement.ranks} ranks have experts"
            )
        for rank, replicas in enumerate(self.replicas):
            if len(replicas) != self.replica_slots:
                raise PlacementError(
                    f"rank {rank} has {len(replicas)} replica slots, all ranks have {self.replica_slots}"
                )
            held = set(placement.held(rank))
            for slot, expert in enumerate(replicas):
                if expert == EMPTY:
                    continue
                if not 0 <= expert < placement.num_experts:
                    raise PlacementError(
                        f"replica slot {slot} of rank {rank} has expert {expert}, and there are experts 0 to "
                        f"{placement.num_experts - 1} ({EMPTY} for none)"
                    )
                if expert in held:
                    raise PlacementError(
                        f"replica slot {slot} of rank {rank} has expert {expert}, which the rank holds "
                        "already: a rank holds an expert once"
                    )
                held.add(expert)
        self._check_splits()
        if self.limit is not None and self.limit < SPLIT:
            raise PlacementError(
                f"limit = {self.limit}: ranks compute the mean at least, which is {SPLIT}; None for no limit"
            )

    def _check_splits(self) -> None:
        placement = self.placement
        if len(self.splits) != placement.ranks:
            raise PlacementError(f"splits of {len(self.splits)} ranks, and {placement.ranks} ranks have rows")
        for rank, splits in enumerate(self.splits):
            if len(splits) != placement.num_experts:
                raise PlacementError(
                    f"rank {rank} splits rows of {len(splits)} experts, and there are {placement.num_experts}"
                )
        for rank, expert, parts in self.own_splits:
            what = f"rows of expert {expert} that start on rank {rank}"
            for position, share in parts:
                if not (0 <= position < self.positions and self.by_position[position] == expert):
                    raise PlacementError(f"{what} go to position {position}, which does not hold the expert")
                if share < 1:
                    raise PlacementError(
                        f"{what} go to position {position} with {share} parts: leave it out instead"
                    )
            if len({position for position, _ in parts}) < len(parts):
                raise PlacementError(f"{what} name a position twice")
            if (total := sum(share for _, share in parts)) != SPLIT:
                raise PlacementError(f"{what} are split into {total} parts in all, which must be {SPLIT}")

    @staticmethod
    @cache
    def none(placement: ExpertPlacement, replica_slots: int) -> Replication:
        """Return a replication without replicas: every row goes where `placement` alone sends it."""
        return Replication.local(placement, ((EMPTY,) * replica_slots,) * placement.ranks)

    @staticmethod
    def local(
        placement: ExpertPlacement, replicas: Sequence[Sequence[int]], limit: int | None = None
    ) -> Replication:
        """Return a replication whose replicas compute rows of their own ranks only."""
        splits = local_splits(placement, replicas)
        return Replication(
            placement, len(replicas[0]), tuple(tuple(held) for held in replicas), splits, limit
        )

    @property
    def slots(self) -> int:
        """Slots of a rank: those of its own experts and those of replicas."""
        return self.placement.slots + self.replica_slots

    @property
    def positions(self) -> int:
        """Slots of the whole expert group."""
        return self.placement.ranks * self.slots

    @cached_property
    def by_position(self) -> tuple[int, ...]:
        """The expert at every position, EMPTY where there is none."""
        return tuple(
            expert
            for rank, replicas in enumerate(self.replicas)
            for expert in (*self.placement.held(rank), *replicas)
        )

    @property
    def is_empty(self) -> bool:
        """Whether no rank has a replica."""
        return all(expert == EMPTY for replicas in self.replicas for expert in replicas)

    @cached_property
    def pairs(self) -> SplitPairs:
        """The splits as arrays: by rank, then expert, then position."""
        by_splits: dict[int, Counts] = {}  # most ranks of many have the very same
        by_rank = []
        for rank, splits in enumerate(self.splits):
            if id(splits) not in by_splits:
                of_rank = []
                for expert, parts in enumerate(splits):
                    upto = 0
                    for part in sorted(parts):
                        of_rank.append((0, expert, part.position, upto, upto + part.parts))
                        upto += part.parts
                by_splits[id(splits)] = np.array(of_rank, np.int64).reshape(-1, 5)
            pairs = by_splits[id(splits)].copy()
            pairs[:, 0] = rank
            by_rank.append(pairs)
        return SplitPairs(*np.concatenate(by_rank).T.copy())

    @cached_property
    def own_splits(self) -> tuple[tuple[int, int, tuple[Part, ...]], ...]:
        """The splits that differ from those of `local_splits`, each with its rank and expert."""
        pairs = zip(self.splits, local_splits(self.placement, self.replicas), strict=True)
        return tuple(
            (rank, expert, parts)
            for rank, (splits, usual) in enumerate(pairs)
            if splits != usual  # all experts at once: most ranks differ in none
            for expert, parts in enumerate(splits)
            if parts != usual[expert]
        )

    @cached_property
    def digest(self) -> str:
        """A hash of the whole replication, for ranks to compare."""
        return _digest(
            (self.placement.digest, self.replica_slots, self.replicas, self.own_splits, self.limit)
        )


def local_splits(placement: ExpertPlacement, replicas: Sequence[Sequence[int]]) -> Splits:
    """Return the splits of replicas that compute rows of their own ranks only; other rows pass them by."""
    slots = placement.slots + len(replicas[0])
    splits = list(_splits_without(placement, len(replicas[0])))
    for rank, held in enumerate(replicas):
        for slot, expert in enumerate(held):
            if 0 <= expert < placement.num_experts:
                here = (Part(rank * slots + placement.slots + slot, SPLIT),)
                splits[rank] = (*splits[rank][:expert], here, *splits[rank][expert + 1 :])
    return tuple(splits)


@cache
def _splits_without(placement: ExpertPlacement, replica_slots: int) -> Splits:
    """Return the splits of rows that follow `placement` alone. Cached: most splits are these."""
    slots = placement.slots + replica_slots
    alike = tuple(
        (Part(position // placement.slots * slots + position % placement.slots, SPLIT),)
        for position in placement.positions
    )
    return (alike,) * placement.ranks


def _digest(facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
