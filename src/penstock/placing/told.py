"""Hostings of layers as numbers for other ranks and as plain data for files, without splits that follow from
the guests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.placement import ExpertPlacement, Hosting, Part, local_splits

Numbers = npt.NDArray[np.int32]
Share = tuple[tuple[Hosting, bool], ...]
"""For some MoE layers, the planned hosting, and whether it is used in the next step."""

SAME: Final = -1
"""Marker in place of the number of splits: the plan is as before."""
UNLIMITED: Final = 0
NUMBER_BYTES: Final = 4
FIRST_NUMBERS: Final = 3
"""Numbers before a hosting's guests: whether it is hosted, the number of splits, the limit."""
OF_SPLIT: Final = 4
"""Numbers per part of a split: rank, expert, position, parts."""


def numbers_of(share: Share, known: Sequence[Hosting]) -> Numbers:
    """Return a share as numbers. known: the plans of these layers before, which need not be told again."""
    found: list[int] = []
    for (new, hosted), old in zip(share, known, strict=True):
        if new is old:
            found += (hosted, SAME)
            continue
        splits = [(rank, expert, *part) for rank, expert, parts in new.own_splits for part in parts]
        limit = new.limit or UNLIMITED
        found += (hosted, len(splits), limit, *chain(*new.guests), *chain(*splits))
    return np.array(found, np.int32)


def share_of(numbers: Numbers, known: Sequence[Hosting]) -> Share:
    """Return the share that numbers stand for, read by a rank that knows the same plans."""
    read = iter(numbers.tolist())
    return tuple(_read(read, old) for old in known)


def _read(read: Iterator[int], old: Hosting) -> tuple[Hosting, bool]:
    hosted, count = bool(next(read)), next(read)
    if count == SAME:
        return old, hosted
    limit = next(read) or None
    guests = [list(islice(read, old.replica_slots)) for _ in range(old.placement.ranks)]
    splits: dict[tuple[int, int], list[Part]] = {}
    for _ in range(count):
        rank, expert, *part = islice(read, OF_SPLIT)
        splits.setdefault((rank, expert), []).append(Part(*part))
    return _hosting(old.placement, guests, splits, limit), hosted


def told_bytes(hosting: Hosting) -> int:
    """Return the bytes of all that a rank tells of a hosting."""
    parts = sum(len(parts) for _, _, parts in hosting.own_splits)
    numbers = FIRST_NUMBERS + hosting.placement.ranks * hosting.replica_slots + OF_SPLIT * parts
    return NUMBER_BYTES * numbers


def plain_of(hosting: Hosting) -> dict[str, Any]:
    """Return a hosting as plain data for JSON."""
    return {"guests": hosting.guests, "splits": list(hosting.own_splits), "limit": hosting.limit}


def hosting_of(plain: Mapping[str, Any], placement: ExpertPlacement) -> Hosting:
    """Return a hosting from plain data. Raises KeyError, TypeError, ValueError or IndexError if invalid."""
    guests, limit = [list(map(int, held)) for held in plain["guests"]], plain["limit"]
    splits = {
        (rank, expert): [Part(int(position), int(share)) for position, share in parts]
        for rank, expert, parts in plain["splits"]
    }
    return _hosting(placement, guests, splits, None if limit is None else int(limit))


def _hosting(
    placement: ExpertPlacement,
    guests: Sequence[Sequence[int]],
    own: Mapping[tuple[int, int], Sequence[Part]],
    limit: int | None,
) -> Hosting:
    splits = [*local_splits(placement, guests)]
    for rank in dict.fromkeys(rank for rank, _ in own):
        splits[rank] = tuple(tuple(own.get((rank, e), parts)) for e, parts in enumerate(splits[rank]))
    return Hosting(placement, len(guests[0]), tuple(map(tuple, guests)), tuple(splits), limit)
