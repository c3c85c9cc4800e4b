"""Transports over process groups: Gloo for CPU tensors, NCCL for CUDA; every lane has groups of its own.

Tensors of GPUs that are staged in the host's memory go over Gloo, too.
"""

from __future__ import annotations

import gc
import os
import re
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.device import device_of, gpu_of
from penstock.mesh import Axes, Group, partners
from penstock.runtime.transport import LocalTransport, Transport, Transports, scattered_in_order
from penstock.topology import INTER_GROUPS, Layout, ParallelConfig, lane_groups
from penstock.topology.faults import END_EXCHANGES

LOOP_NAME: Final = "gloo_tcp_loop"
"""The name that Gloo gives these threads."""


def polling_threads() -> set[int]:
    """Return the threads in which Gloo waits for its sockets, by their numbers in the system; Linux only."""
    folder, threads = Path("/proc/self/task"), set[int]()
    for thread in folder.iterdir() if folder.exists() else ():
        with suppress(OSError):  # the thread has ended: it can no longer be read
            if (thread / "comm").read_text(encoding="utf-8").strip() == LOOP_NAME:
                threads.add(int(thread.name))
    return threads


def wait_their_turn(threads: Collection[int]) -> None:
    """Let threads preempt no other when they wake; a free core they still take at once.

    Gloo starts its threads itself. One that finds its connection locked asks again and again until it is
    free. The lock belongs to the thread that sends. Where there are no more cores than threads, a thread that
    wakes takes the sender's core and asks for the rest of its time slice: 1 to 3 ms, in which the sender
    could have released the lock at once.
    """
    for thread in threads:
        # A closed group has ended its thread; where a sandbox forbids the call, only time is lost.
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Collectives that PyTorch calls by other names from 2.13 on."""


_LEFT: list[dict[Axes, dist.ProcessGroup]] = []
"""Groups of transports that nobody holds any more: torch keeps them, over Gloo with three threads each."""

_ALIVE: WeakSet[GroupTransport] = WeakSet()
"""Transports that somebody holds, or that wait for the collection of garbage."""


class GroupTransport(ABC):
    """The process groups of a transport, and the bytes that this rank has sent through them."""

    def __init__(self, groups: dict[Axes, dist.ProcessGroup]) -> None:
        self._groups = groups
        finalize(self, _LEFT.append, groups).atexit = False
        _ALIVE.add(self)
        self._members = {kind: dist.get_process_group_ranks(group) for kind, group in groups.items()}
        self.traffic: Counter[int] = Counter()

    def size(self, group: Axes) -> int:
        return self._group(group).size()

    def place(self, group: Axes) -> int:
        return self._group(group).rank()

    def has(self, group: Axes) -> bool:
        return group in self._groups

    def all_reduce(self, tensor: Tensor, group: Axes) -> None:
        self._reduced(tensor, group, dist.ReduceOp.SUM)

    def maximum(self, tensor: Tensor, group: Axes) -> None:
        self._reduced(tensor, group, dist.ReduceOp.MAX)

    def _reduced(self, tensor: Tensor, group: Axes, op: dist.ReduceOp.RedOpType) -> None:
        size = self._group(group).size()
        if size == 1 or not tensor.numel():  # a part too small for one element is empty on all ranks
            return
        self._count_ring(group, 2 * (size - 1) * tensor.nbytes // size)
        self._reduce(tensor, self._groups[group], op)

    def all_to_all(
        self,
        rows: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        group: Axes = Group.EXPERT,
    ) -> Tensor:
        groups = self._group(group)
        self._count(rows, input_splits, group)
        received = rows.new_empty(sum(output_splits), *rows.shape[1:])
        self._fill(received, list(output_splits), rows.contiguous(), list(input_splits), groups)
        return received

    def all_gather(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        members = self._group(group).size()
        if members == 1:
            return rows
        self._count(rows, [len(rows)] * members, group)
        return self._gather(rows.contiguous(), list(sizes), self._groups[group])

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        return scattered_in_order(rows, sizes, group, self)

    @abstractmethod
    def abort(self) -> None:
        """Wake the ranks that wait for this one; the groups cannot be used afterwards."""

    def close(self) -> None:
        """Destroy its groups, and with them their connections and the threads that wait for these."""
        _destroy(self._groups)

    def _group(self, kind: Axes) -> dist.ProcessGroup:
        if not self._groups:
            raise RuntimeError(
                "the connections to the other ranks were closed, by close() of a stack or at the end of its "
                "session: build what is to run now on machinery of its own"
            )
        return self._groups[kind]

    def _reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        """Combine over the group, in place."""
        dist.all_reduce(tensor, op, group)

    def _gather(self, rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        """Return the rows of all ranks, by one collective, for which fewer rows than the most are filled up.

        For tensors of several sizes `dist.all_gather` broadcasts once per rank. To fill up copies the rows
        once more here, and the result once.
        """
        most = max(sizes)
        if len(rows) < most:
            rows = torch.cat([rows, rows.new_empty(most - len(rows), *rows.shape[1:])])
        gathered = rows.new_empty(len(sizes) * most, *rows.shape[1:])
        ALL_GATHER(gathered, rows, group)
        if min(sizes) == most:
            return gathered
        return torch.cat([part[:size] for part, size in zip(gathered.split(most), sizes, strict=True)])

    def _fill(
        self,
        received: Tensor,
        output_splits: list[int],
        rows: Tensor,
        input_splits: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        """Send the shares of `rows`, by rank, and put what arrives into `received`."""
        dist.all_to_all_single(received, rows, output_splits, input_splits, group)

    def _count_ring(self, group: Axes, size_bytes: int) -> None:
        """Count what a ring sends, all of it to the rank behind this one."""
        (_, behind), *_ = partners(self._groups[group].rank(), self._groups[group].size())
        self.traffic[self._members[group][behind]] += size_bytes

    def _count(self, rows: Tensor, input_splits: Sequence[int], group: Axes) -> None:
        row_bytes = rows[:1].nbytes
        for member, (peer, count) in enumerate(zip(self._members[group], input_splits, strict=True)):
            if member != self._groups[group].rank():
                self.traffic[peer] += count * row_bytes


def _destroy(groups: dict[Axes, dist.ProcessGroup]) -> None:
    while groups:
        with suppress(ValueError):  # it was destroyed with the default group
            dist.destroy_process_group(groups.popitem()[1])


class GlooTransport(GroupTransport):
    """CPU tensors over Gloo.

    An all-to-all is made of point-to-point operations with every receive posted before the first send: Gloo's
    own all-to-all often falls into half duplex, which doubles its time on a slow link. Sends go round by
    round, in round i to the rank i places further on: every rank then has one partner at a time, and streams
    do not compete on a receiver's link. Send buffers are bounded, so that the notice of a receive does not
    wait behind data. The threads that wait for sockets do not take a sender's core (`wait_their_turn`).
    """

    def __init__(
        self, make_groups: Callable[[], dict[Axes, dist.ProcessGroup]], send_buffer_bytes: int = 0
    ) -> None:
        sockets, threads = Sockets.now(), polling_threads()
        super().__init__(make_groups())
        wait_their_turn(polling_threads() - threads)
        self._sockets = Sockets.now().since(sockets).of_gloo()
        self._sockets.limit_send_buffers(send_buffer_bytes)

    def _fill(
        self,
        received: Tensor,
        output_splits: list[int],
        rows: Tensor,
        input_splits: list[int],
        group: dist.ProcessGroup,
    ) -> None:
        exchange(received.split(output_splits), rows.split(input_splits), group)

    def _gather(self, rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        gathered = rows.new_empty(sum(sizes), *rows.shape[1:])
        exchange(gathered.split(list(sizes)), [rows] * group.size(), group)
        return gathered

    def abort(self) -> None:
        """Cut this transport's connections: Gloo has no other way to end a wait before its timeout.

        The threads waiting here wake at once, and so do the peers', who learn of the failure in milliseconds
        instead of one timeout later. But Gloo does not tell who waits for a message that is partly sent or
        partly received when the connection ends: that wait is left to its timeout (`runtime/executor.py`).
        The groups cannot be used afterwards.
        """
        self._sockets.cut()
        self._sockets = Sockets(frozenset())


def exchange(inbox: Sequence[Tensor], outbox: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send share t of `outbox` to rank t, receive share s of `inbox` from rank s. Empty ones stay home."""
    rank = group.rank()
    rounds = partners(rank, group.size())
    receives = [
        dist.irecv(inbox[s], group=group, group_src=s) if inbox[s].numel() else None for s, _ in rounds
    ]
    inbox[rank].copy_(outbox[rank])
    for (_, target), receive in zip(rounds, receives, strict=True):
        send = dist.isend(outbox[target], group=group, group_dst=target) if outbox[target].numel() else None
        for transfer in (send, receive):
            if transfer is not None:
                transfer.wait()


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
            ending[0]._device.abort(groups)


END_EXCHANGES.append(NcclTransport.abort_all)


def build_transports(layout: Layout, device: torch.device, parallel: ParallelConfig) -> Transports:
    """Build a transport for every communication lane of this rank. Every rank must call it at the same point.

    Where an expert group spans nodes there is also one inside nodes, and one along the rails between them.
    """
    if _ALIVE:  # or nothing can be garbage of which groups are left
        gc.collect()  # a scheduled model and its engine refer to each other
    while _LEFT:
        _destroy(_LEFT.pop())
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


# ---- the sockets under a transport: Gloo opens them itself and offers no handle, so they are found here


FOLDER = Path("/proc/self")
Target = tuple[int, str]
"""A descriptor, and what it points at."""


@dataclass(frozen=True)
class Sockets:
    """Open connections of this process: what each descriptor pointed at when it was found (Linux)."""

    targets: frozenset[Target]

    @staticmethod
    def now() -> Sockets:
        """Return all sockets that are open."""
        return Sockets(frozenset(each for each in _descriptors() if each[1].startswith("socket:")))

    def since(self, before: Sockets) -> Sockets:
        """Return the sockets that were opened after `before` was taken, by any thread."""
        return Sockets(self.targets - before.targets)

    def of_gloo(self) -> Sockets:
        """Return those in which Gloo waits; all of them where the system does not say (gVisor).

        A thread of Gloo waits for its connections in a set of events (epoll). Of the sets of a process these
        are the ones that a program which it starts would inherit: Python, libuv and the like forbid that.
        """
        watched = set[int]()
        for number, target in _descriptors():
            if "eventpoll" not in target:
                continue
            with suppress(OSError):  # it was closed meanwhile
                text = (FOLDER / "fdinfo" / str(number)).read_text(encoding="utf-8")
                flags = re.search(r"^flags:\s*([0-7]+)", text, re.MULTILINE)
                if flags is not None and not int(flags[1], 8) & os.O_CLOEXEC:
                    watched.update(map(int, re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)))
        return Sockets(frozenset(each for each in self.targets if each[0] in watched)) if watched else self

    def limit_send_buffers(self, size_bytes: int) -> None:
        """Let no more than about `size_bytes` wait in each connection; 0 leaves it to the system.

        The system lets megabytes wait. Gloo announces every receive to the sender on the same connection:
        behind megabytes of data the announcement comes milliseconds late, and the link idles for as long.
        """
        if size_bytes > 0:
            self._each(lambda s: s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes))

    def cut(self) -> None:
        """End both directions of every connection: threads that wait for it wake, here and at the peer."""
        self._each(lambda connection: connection.shutdown(socket.SHUT_RDWR))

    def _each(self, act: Callable[[socket.socket], None]) -> None:
        for descriptor, target in self.targets:
            # A connection that was closed, here or by a peer, needs nothing more.
            with suppress(OSError):
                copy = os.dup(descriptor)
                if str((FOLDER / "fd" / str(copy)).readlink()) != target:  # it stands for something else now
                    os.close(copy)
                    continue
                with socket.socket(fileno=copy) as connection:
                    connection.getpeername()  # a listener has no peer; cutting one would abort the process
                    act(connection)


def _descriptors() -> Iterator[Target]:
    folder = FOLDER / "fd"
    for entry in folder.iterdir() if folder.exists() else ():
        with suppress(FileNotFoundError):  # the descriptor that lists the folder is gone by now
            yield int(entry.name), str(entry.readlink())
