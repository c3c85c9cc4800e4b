"""Whole tensors from what the ranks have of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from penstock.sharding import Sharding

Parts = Mapping[str, Sharding]


def joined(ranks: Iterable[tuple[Mapping[str, Tensor], Parts]]) -> dict[str, Tensor]:
    """Put parts together, by name. Asserts that ranks with the same part have the same bits of it.

    ranks: of every rank its tensors, and which of them are parts of larger ones.
    """
    held: dict[str, dict[int, Tensor]] = defaultdict(dict)
    known: dict[str, Sharding] = {}
    for tensors, parts in ranks:
        for name, tensor in tensors.items():
            place = parts[name].index if name in parts else 0
            known |= {name: parts[name]} if name in parts else {}
            same = torch.equal(held[name].setdefault(place, tensor), tensor)
            assert same, f"{name} differs between ranks"
    return {name: _whole(name, places, known.get(name)) for name, places in held.items()}


def _whole(name: str, places: dict[int, Tensor], sharding: Sharding | None) -> Tensor:
    count = 1 if sharding is None else sharding.count
    assert sorted(places) == list(range(count)), f"of {count} parts of {name} there are {sorted(places)}"
    return places[0] if sharding is None else sharding.join([places[i] for i in range(count)])
