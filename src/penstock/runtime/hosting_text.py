"""What layers will host, as plain data for ranks and files: as little as tells it from no split."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.placement import ExpertPlacement, Hosting, Part, local_splits
from penstock.runtime.moving import Share


def text_of(share: Share, known: Sequence[Hosting]) -> bytes:
    """known: what these layers had planned before, which need not be told again."""
    pairs = zip(share, known, strict=True)
    return json.dumps(
        [[None if new is old else plain_of(new), hosted] for (new, hosted), old in pairs],
        default=int,  # planners may count with NumPy
    ).encode()


def share_of(text: bytes, known: Sequence[Hosting]) -> Share:
    """The same, read by a rank that knows the same."""
    pairs = zip(json.loads(text), known, strict=True)
    return tuple(
        (old if told is None else hosting_of(told, old.placement), hosted) for (told, hosted), old in pairs
    )


def plain_of(hosting: Hosting) -> dict[str, Any]:
    """JSON. Splits as far as they are not those of guests for their own ranks' rows."""
    usual = local_splits(hosting.placement, hosting.guests)
    splits = [
        (rank, expert, parts)
        for rank, both in enumerate(zip(hosting.splits, usual, strict=True))
        for expert, (parts, local) in enumerate(zip(*both, strict=True))
        if parts != local
    ]
    return {"guests": hosting.guests, "splits": splits, "limit": hosting.limit}


def hosting_of(plain: Mapping[str, Any], placement: ExpertPlacement) -> Hosting:
    """The hosting again. Raises KeyError, TypeError, ValueError or IndexError for what is none."""
    guests, limit = tuple(tuple(map(int, held)) for held in plain["guests"]), plain["limit"]
    splits = [list(of_rank) for of_rank in local_splits(placement, guests)]
    for rank, expert, parts in plain["splits"]:
        splits[rank][expert] = tuple(Part(int(position), int(share)) for position, share in parts)
    limit = None if limit is None else int(limit)
    return Hosting(placement, len(guests[0]), guests, tuple(map(tuple, splits)), limit)
