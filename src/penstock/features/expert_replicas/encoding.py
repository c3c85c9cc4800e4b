"""Replications of layers as numbers for other ranks and as plain data for files, without splits that follow
from the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.placement import ExpertPlacement, Part, Replication, local_splits

Numbers = npt.NDArray[np.int32]
Share = tuple[tuple[Replication, bool], ...]
"""For some MoE layers, the planned replication, and whether it is used in the next step."""

SAME: Final = -1
"""Marker in place of the number of splits: the plan is as before."""
UNLIMITED: Final = 0
NUMBER_BYTES: Final = 4
FIRST_NUMBERS: Final = 3
"""Numbers before a replication's replicas: whether it is in use, the number of splits, the limit."""
OF_SPLIT: Final = 4
"""Numbers per part of a split: rank, expert, position, parts."""


def numbers_of(share: Share, known: Sequence[Replication]) -> Numbers:
    """Return a share as numbers.

    Args:
        known: The plans of these layers before, which need not be sent again.
    """
    numbers: list[int] = []
    for (new, in_use), old in zip(share, known, strict=True):
        if new is old:
            numbers += (in_use, SAME)
            continue
        splits = [(rank, expert, *part) for rank, expert, parts in new.own_splits for part in parts]
        limit = new.limit or UNLIMITED
        numbers += (in_use, len(splits), limit, *chain(*new.replicas), *chain(*splits))
    return np.array(numbers, np.int32)


def share_of(numbers: Numbers, known: Sequence[Replication]) -> Share:
    """Return the share that numbers stand for, read by a rank that knows the same plans."""
    read, share = iter(numbers.tolist()), []
    for old in known:
        in_use, count = bool(next(read)), next(read)
        if count == SAME:
            share.append((old, in_use))
            continue
        limit = next(read) or None
        replicas = [list(islice(read, old.replica_slots)) for _ in range(old.placement.ranks)]
        splits: dict[tuple[int, int], list[Part]] = {}
        for _ in range(count):
            rank, expert, *part = islice(read, OF_SPLIT)
            splits.setdefault((rank, expert), []).append(Part(*part))
        share.append((_replication(old.placement, replicas, splits, limit), in_use))
    return tuple(share)


def told_bytes(replication: Replication) -> int:
    """Return the bytes of all that a rank tells of a replication."""
    parts = sum(len(parts) for _, _, parts in replication.own_splits)
    numbers = FIRST_NUMBERS + replication.placement.ranks * replication.replica_slots + OF_SPLIT * parts
    return NUMBER_BYTES * numbers


def plain_of(replication: Replication) -> dict[str, Any]:
    """Return a replication as plain data for JSON."""
    return {
        "replicas": replication.replicas,
        "splits": list(replication.own_splits),
        "limit": replication.limit,
    }


def replication_of(plain: Mapping[str, Any], placement: ExpertPlacement) -> Replication:
    """Return a replication from plain data.

    Raises:
        KeyError, TypeError, ValueError, IndexError: If the data is invalid.
    """
    replicas, limit = [list(map(int, held)) for held in plain["replicas"]], plain["limit"]
    splits = {
        (rank, expert): [Part(int(position), int(share)) for position, share in parts]
        for rank, expert, parts in plain["splits"]
    }
    return _replication(placement, replicas, splits, None if limit is None else int(limit))


def _replication(
    placement: ExpertPlacement,
    replicas: Sequence[Sequence[int]],
    own: Mapping[tuple[int, int], Sequence[Part]],
    limit: int | None,
) -> Replication:
    splits = [*local_splits(placement, replicas)]
    for rank in dict.fromkeys(rank for rank, _ in own):
        splits[rank] = tuple(tuple(own.get((rank, e), parts)) for e, parts in enumerate(splits[rank]))
    return Replication(placement, len(replicas[0]), tuple(map(tuple, replicas)), tuple(splits), limit)
