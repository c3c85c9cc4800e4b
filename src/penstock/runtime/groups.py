"""Transports over NCCL, through memory of the host, or of one process; and those of every lane of a rank."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.device import device_of, gpu_of
from penstock.mesh import Axes, Group, Mesh
from penstock.runtime.transport import (
    ALIVE,
    LEFT,
    GlooTransport,
    GroupTransport,
    Transport,
    Transports,
    destroy,
    exchange,
    scattered_in_order,
)
from penstock.topology import INTER_GROUPS, Layout, ParallelConfig, lane_groups
from penstock.topology.faults import END_EXCHANGES
from penstock.topology.groups import abort

REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""A collective that PyTorch calls by another name from 2.13 on."""


class StagedTransport(GlooTransport):
    """Tensors of GPUs over Gloo, through pinned memory of the host: several ranks can share a GPU.

    A transfer copies what it sends to the host in the lane's stream, waits there for the end of this copy,
    exchanges, and puts a copy of what came into the same stream. So results are waited for by events, as
    those of any task. The thread that issues tasks waits meanwhile: under a transfer runs what was issued
    before it.

    Pinned memory is PyTorch's: it is given out again when the copies that were issued with it have ended.
    """

    def __init__(
        self,
        make_groups: Callable[[], dict[Axes, dist.ProcessGroup]],
        device: torch.device,
        send_buffer_bytes: int = 0,
    ) -> None:
        super().__init__(make_groups, send_buffer_bytes)
        self._device = gpu_of(device)

    def _reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        staged = self._sent(tensor)
        super()._reduce(staged, group, op)
        tensor.copy_(staged, non_blocking=True)

    def _gather(self, rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        gathered = rows.new_empty(sum(sizes), *rows.shape[1:])
        came = self._device.pinned(gathered.shape, gathered.dtype)
        exchange(came.split(list(sizes)), [self._sent(rows)] * group.size(), group)
        return gathered.copy_(came, non_blocking=True)

    def _fill(
        self,
        received: Tensor,
        output_splits: list[int],
        rows: Tensor,
        input_splits: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        came = self._device.pinned(received.shape, received.dtype)
        super()._fill(came, output_splits, self._sent(rows), input_splits, group)
        received.copy_(came, non_blocking=True)

    def _sent(self, tensor: Tensor) -> Tensor:
        """Return a tensor's numbers in memory of the host, once they are there."""
        host, there = self._device.to_host(tensor)
        if there is not None:
            there.synchronize()
        return host


class NcclTransport(GroupTransport):
    """CUDA tensors over NCCL, on the stream that is current in the lane.

    Args:
        in_order: Whether sums of a reduce-scatter are added in the order of ranks, whatever NCCL would do.
    """

    _live: ClassVar[WeakSet[NcclTransport]] = WeakSet()
    """All of this process."""

    def __init__(
        self, groups: dict[Axes, dist.ProcessGroup], device: torch.device, *, in_order: bool = False
    ) -> None:
        super().__init__(groups)
        self._device, self._in_order, self._aborted = gpu_of(device), in_order, False
        self._live.add(self)

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        """Return the sum of all ranks' rows for this one.

        NCCL knows parts of one size; others are sent and added here.
        """
        own_size = sizes[self.place(group)]
        if self._in_order or len(set(sizes)) > 1 or len(sizes) == 1 or not rows.numel():
            return super().reduce_scatter(rows, sizes, group)
        reduced = rows.new_empty(own_size, *rows.shape[1:])
        self._count_ring(group, (len(sizes) - 1) * reduced.nbytes)
        REDUCE_SCATTER(reduced, rows.contiguous(), group=self._group(group))
        return reduced

    def abort(self) -> None:
        """End the exchanges of this transport and of all others of the process, whose kernels may be waiting.

        Together, as NCCL would wait in one abort for a kernel that only another abort ends. On peers nothing
        ends: they watch, see `penstock.topology.faults`.
        """
        self.abort_all()

    @classmethod
    def abort_all(cls) -> None:
        """End all exchanges that have begun on GPUs."""
        ending = [transport for transport in cls._live if not transport._aborted]
        groups = [group for transport in ending for group in transport._groups.values()]
        for transport in ending:
            transport._aborted = True
        if groups:
            abort(ending[0]._device, groups)


END_EXCHANGES.append(NcclTransport.abort_all)


def build_transports(layout: Layout, device: torch.device, parallel: ParallelConfig) -> Transports:
    """Build a transport for every communication lane of this rank. Every rank must call it at the same point.

    Where an expert group spans nodes there is also one inside nodes, and one along the rails between them.
    """
    if ALIVE:  # or nothing can be garbage of which groups are left
        gc.collect()  # a scheduled model and its engine refer to each other
    while LEFT:
        destroy(LEFT.pop())
    make = partial(build_transport, layout, device, parallel)
    if layout.ep_nodes == 1:
        return Transports(make(INTER_GROUPS), make=make)
    return Transports(make((*INTER_GROUPS, Group.RAIL)), make((Group.NODE,)), make)


def build_transport(
    layout: Layout, device: torch.device, parallel: ParallelConfig, kinds: tuple[Axes, ...]
) -> Transport:
    """Build a transport with process groups of these kinds."""
    if layout.world_size == 1:
        return LocalTransport()
    make_groups = partial(lane_groups, layout, parallel.timeout_s, kinds, start_s=parallel.start_s)
    if parallel.transport == "staged":
        return StagedTransport(make_groups, device, parallel.send_buffer_bytes)
    if device_of(device).is_gpu:
        return NcclTransport(make_groups(device), device, in_order=parallel.reduce_scatter == "in_order")
    return GlooTransport(make_groups, parallel.send_buffer_bytes)


# ---- transports without a network --------------------------------------------------------------------------


class Unconnected:
    """The common part of transports without a network: sums stay, nothing is sent, no rank waits."""

    def has(self, group: Axes) -> bool:
        del group
        return True

    def close(self) -> None:
        """Do nothing: there are no connections to release."""

    def all_reduce(self, tensor: Tensor, group: Axes) -> None:
        del tensor, group

    def maximum(self, tensor: Tensor, group: Axes) -> None:
        del tensor, group

    @property
    def traffic(self) -> Counter[int]:
        return Counter()

    def abort(self) -> None:
        pass


class LocalTransport(Unconnected):
    """A transport of one process: nothing moves."""

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        del sizes, group
        return rows

    def all_to_all(
        self,
        rows: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        group: Axes = Group.EXPERT,
    ) -> Tensor:
        del group
        assert list(input_splits) == list(output_splits), "a rank alone gets what it sends"
        return rows

    def all_gather(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        del sizes, group
        return rows

    def size(self, group: Axes) -> int:
        del group
        return 1

    def place(self, group: Axes) -> int:
        del group
        return 0


# ---- a transport that sends nothing: the same computation without a network, to measure it alone ----------


class SilentTransport(Unconnected):
    """Gives every rank rows of the right number, made from its own.

    Values are wrong, sizes and work are right. Only for routing with a fixed capacity: exchanged counts would
    be wrong, too.
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
