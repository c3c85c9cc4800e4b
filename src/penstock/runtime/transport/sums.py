"""Sums of what ranks have, added one after the other: the same bits however ranks are connected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from penstock.mesh import Axes


class Sending(Protocol):
    """What a sum needs of a transport."""

    def all_to_all(
        self, rows: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: Axes
    ) -> Tensor:
        """Send rows to the ranks of a group."""
        ...

    def place(self, group: Axes) -> int:
        """Return this rank's place in its group."""
        ...


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, in their order, computed in float32 at least."""
    if len(parts) == 1:
        return parts[0]
    precise = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(precise) + parts[1]
    for part in parts[2:]:
        total.add_(part)
    return total.to(parts[0].dtype)


def scattered_in_order(rows: Tensor, sizes: Sequence[int], group: Axes, transport: Sending) -> Tensor:
    """Return this rank's part of a reduce-scatter, all of whose parts are sent here and added by place."""
    if len(sizes) == 1:
        return rows
    mine = sizes[transport.place(group)]
    found = transport.all_to_all(rows, sizes, [mine] * len(sizes), group)
    return summed(found.split(mine)) if mine else found
