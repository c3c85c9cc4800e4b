"""The machinery on which a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.mesh import Axes, Group, Mesh
from penstock.partial_state import refuse_pickle
from penstock.runtime.lanes import Lanes, build_lanes
from penstock.runtime.transport import Transports, Unconnected
from penstock.runtime.transport.interface import scattered_in_order
from penstock.topology import Control, Layout
from penstock.topology.device_mesh import RankMeshes


@dataclass(frozen=True, kw_only=True)
class Machinery:
    """Everything that a stack runs on. control: all ranks, for checks outside the step."""

    lanes: Lanes
    transports: Transports
    layout: Layout
    control: Control
    device: torch.device
    autocast_dtype: torch.dtype | None = None

    def close(self) -> None:
        """End the machinery's threads and connections, which no stack may use any more."""
        try:
            self.lanes.close()
        finally:
            self.transports.close()

    @cached_property
    def meshes(self) -> RankMeshes:
        """The layout as device meshes; all ranks ask for them together, the first time."""
        return RankMeshes.of(self.layout, self.device.type, self.control)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return refuse_pickle("a model or part of one that Penstock runs")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which tasks compute: this precision, whatever the caller has switched on."""
        device, dtype = self.device.type, self.autocast_dtype
        if dtype is None and not torch.is_autocast_enabled(device):
            return nullcontext()  # entering and leaving a real context takes 4 us, a third of a small segment
        # What is cast without autograd has no history, and must not be found by tasks that need gradients.
        return torch.autocast(
            device, dtype=dtype, enabled=dtype is not None, cache_enabled=torch.is_grad_enabled()
        )

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context for half a step.

        The caller's autocast is off, so backward tasks compute as forward ones did. Where tasks compute under
        autocast, their casts of parameters last for the half: autocast forgets them when its outermost
        context is left, and with one context per task every microbatch would cast every parameter, and keep
        the cast for backward.
        """
        device = self.device.type
        if self.autocast_dtype is None and not torch.is_autocast_enabled(device):
            return nullcontext()
        return torch.autocast(device, enabled=False)


# ---- a transport that sends nothing: the same computation without a network, to measure it alone ----------


class SilentTransport(Unconnected):
    """Gives every rank rows of the right number, made from its own. Values are wrong, sizes and work are
    right.

    Only for routing with a fixed capacity: exchanged counts would be wrong, too.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank

    def all_to_all(
        self,
        rows: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        group: Axes = Group.EXPERT,
    ) -> Tensor:
        del input_splits, group
        return _of_length(rows, sum(output_splits))

    def all_gather(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        del group
        return _of_length(rows, sum(sizes))

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        return scattered_in_order(rows, sizes, group, self)

    def size(self, group: Axes) -> int:
        return self._mesh.size(group)

    def place(self, group: Axes) -> int:
        return self._mesh.place(self._rank, group)


def _of_length(rows: Tensor, length: int) -> Tensor:
    """Return a copy, cut or repeated to that length, since a receive buffer would be made and filled, too."""
    if not len(rows):
        return rows.new_zeros(length, *rows.shape[1:])
    copies = -(-length // len(rows))
    return rows.repeat(max(1, copies), *[1] * (rows.dim() - 1))[:length]


def silent(machinery: Machinery) -> Machinery:
    """Return the same machinery with a transport that sends nothing, and lanes of its own."""
    transport = SilentTransport(machinery.layout.mesh, machinery.layout.rank)
    lanes = build_lanes(machinery.device, transport.abort, alone=True)
    return replace(machinery, transports=Transports(transport, transport, sends=False), lanes=lanes)
