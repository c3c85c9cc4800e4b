"""Transfers between ranks: what a transport does, those over Gloo, and rows along the legs of a dispatch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.apportion import Counts
from penstock.device import device_of
from penstock.features.dispatch import Leg
from penstock.graph import Lane
from penstock.mesh import Axes, Group, partners
from penstock.routing.routes import Degrees, RouteMaker, Routes
from penstock.runtime.sockets import Sockets, native_threads, wait_their_turn
from penstock.topology.faults import ACTIVITY


class Transport(Protocol):
    """The collectives that tasks use. All block their lane, on a GPU the lane's stream."""

    def all_to_all(
        self,
        rows: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        group: Axes = Group.EXPERT,
    ) -> Tensor:
        """Send rows to the ranks of a group: [sum(input_splits), ...] to [sum(output_splits), ...]."""
        ...

    def all_gather(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        """Send every rank's rows to its whole group, [sizes[place], ...] to [sum(sizes), ...], by place."""
        ...

    def all_reduce(self, tensor: Tensor, group: Axes) -> None:
        """Sum over the group, in place."""
        ...

    def maximum(self, tensor: Tensor, group: Axes) -> None:
        """Take the largest value of the group, for every element, in place."""
        ...

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        """Return the sum of all ranks' rows for this one.

        Args:
            rows: [sum(sizes), ...], the rows for every place.
            sizes: The number of rows for every place.
        """
        ...

    def size(self, group: Axes) -> int:
        """Return the number of ranks in the group."""
        ...

    def place(self, group: Axes) -> int:
        """Return this rank's place in its group."""
        ...

    def has(self, group: Axes) -> bool:
        """Return whether the transport can be used with such groups."""
        ...

    @property
    def traffic(self) -> Counter[int]:
        """Bytes of payload that this rank has sent, by receiving rank."""
        ...

    def abort(self) -> None:
        """Wake the ranks that wait for this one, here and on its direct peers; those abort in turn."""
        ...

    def close(self) -> None:
        """Release its connections, once no rank uses them any more."""
        ...


@dataclass
class Transports:
    """One transport per communication lane.

    Attributes:
        intra: The transport inside nodes, only where a dispatch has legs there.
        make: Makes another transport, for groups that a plan needs and no transport has; None: there are all
            groups.
        more: The transports that were made for such groups.
        sends: Whether ranks get what others send.
    """

    inter: Transport
    intra: Transport | None = None
    make: Callable[[tuple[Axes, ...]], Transport] | None = None
    more: dict[tuple[Lane, Axes], Transport] = field(default_factory=dict)
    sends: bool = True

    def of(self, lane: Lane, axes: Axes = ()) -> Transport:
        """Return the transport of a lane; with axes, the one that has those groups."""
        if (lane, axes) in self.more:
            return self.more[lane, axes]
        if lane is Lane.INTER:
            return self.inter
        assert self.intra is not None, "a layout with nodes has a transport inside them"
        return self.intra

    def open(self, pairs: Iterable[tuple[Lane, Axes]]) -> None:
        """Make groups for the pairs that have none yet. All ranks call it with the same pairs.

        Costs nothing if all groups exist, else one connection per pair of ranks and group.
        """
        held = {Lane.INTER: self.inter, Lane.INTRA: self.intra}
        for lane, axes in sorted(set(pairs)):
            transport = held.get(lane)
            exists = (lane, axes) in self.more or (transport is not None and transport.has(axes))
            if not exists and self.make is not None:
                self.more[lane, axes] = self.make((axes,))

    @property
    def traffic(self) -> Counter[int]:
        """Bytes of payload that this rank has sent, by receiving rank."""
        total: Counter[int] = Counter()
        for transport in self._all:
            total += transport.traffic
        return total

    def abort(self) -> None:
        """Wake the threads that wait in any of the transports."""
        for transport in self._all:
            transport.abort()

    def close(self) -> None:
        """Release the connections of all transports."""
        for transport in self._all:
            transport.close()

    @property
    def _all(self) -> list[Transport]:
        first = [self.inter] if self.intra is None else [self.inter, self.intra]
        return [*first, *self.more.values()]


# ---- transports over process groups: every lane has groups of its own --------------------------------------


ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""A collective that PyTorch calls by another name from 2.13 on."""

LEFT: list[dict[Axes, dist.ProcessGroup]] = []
"""Groups of transports that nobody holds any more: torch keeps them, over Gloo with three threads each."""

ALIVE: WeakSet[GroupTransport] = WeakSet()
"""Transports that somebody holds, or that wait for the collection of garbage."""


class GroupTransport(ABC):
    """The process groups of a transport, and the bytes that this rank has sent through them."""

    def __init__(self, groups: dict[Axes, dist.ProcessGroup]) -> None:
        self._groups = groups
        finalize(self, LEFT.append, groups).atexit = False
        ALIVE.add(self)
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
        destroy(self._groups)

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
        row_bytes, own = rows.itemsize * rows.shape[1:].numel(), self._groups[group].rank()
        for member, (peer, count) in enumerate(zip(self._members[group], input_splits, strict=True)):
            if member != own:
                self.traffic[peer] += count * row_bytes


def destroy(groups: dict[Axes, dist.ProcessGroup]) -> None:
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
        sockets, threads = Sockets.now(), native_threads()
        super().__init__(make_groups())
        wait_their_turn(native_threads() - threads)
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
        exchange(received.split_with_sizes(output_splits), rows.split_with_sizes(input_splits), group)

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
    # Of the group itself: `dist.irecv` and `dist.isend` check for some microseconds what is certain here.
    receives = [group.recv([inbox[s]], s, 0) if inbox[s].numel() else None for s, _ in rounds]
    inbox[rank].copy_(outbox[rank])
    for (_, target), receive in zip(rounds, receives, strict=True):
        send = group.send([outbox[target]], target, 0) if outbox[target].numel() else None
        for transfer in (send, receive):
            if transfer is not None:
                transfer.wait()


# ---- sums of what ranks have, added one after the other: the same bits however ranks are connected --------


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, in their order, computed in float32 at least."""
    if len(parts) == 1:
        return parts[0]
    precise = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(precise) + parts[1]
    for part in parts[2:]:
        total.add_(part)
    return total.to(parts[0].dtype)


def scattered_in_order(rows: Tensor, sizes: Sequence[int], group: Axes, transport: Transport) -> Tensor:
    """Return this rank's part of a reduce-scatter, all of whose parts are sent here and added by place."""
    if len(sizes) == 1:
        return rows
    own_size = sizes[transport.place(group)]
    received = transport.all_to_all(rows, sizes, [own_size] * len(sizes), group)
    return summed(received.split(own_size)) if own_size else received


# ---- transfers of rows along the legs of a dispatch, and the exchange of counts that sizes them -----------


S = TypeVar("S")
T = TypeVar("T")


class Later(Generic[T]):
    """A value that is made when it is first read, once, by the lane that reads it first.

    Attributes:
        holds: The tensors that `make` reads, or values with tensors inside. Their memory must outlive the
            stream that reads the value (`streams.tensors_in`).
    """

    def __init__(self, make: Callable[[], T], holds: tuple[Any, ...] = ()) -> None:
        self._make, self.holds = make, holds
        self._made: list[T] = []
        self._making = Lock()

    @property
    def value(self) -> T:
        """The value. A thread that reads it while another one makes it waits."""
        with self._making:
            if not self._made:
                self._made.append(self._make())
        return self._made[0]

    @staticmethod
    def of(found: Later[T] | T) -> T:
        """Return `found`, or its value if that is made later."""
        return found.value if isinstance(found, Later) else found

    @staticmethod
    def after(found: Later[S] | S, make: Callable[[S], T]) -> Later[T] | T:
        """Return what is made of a value: at once, in the task that has it, unless that is made later."""
        return Later(lambda: make(found.value)) if isinstance(found, Later) else make(found)


class HostCounts:
    """Exchanged counts in transit to the host. Reading them waits for the copy, not for the device.

    A dropless step on a GPU makes the host wait here, since NCCL needs split sizes as numbers.
    """

    def __init__(self, counts: Tensor) -> None:
        self._counts, self._there = device_of(counts).to_host(counts)

    @property
    def numbers(self) -> Counts:
        if self._there is not None:
            with ACTIVITY.exchanging("device"):
                self._there.synchronize()
            ACTIVITY.check()
            self._there = None
        numbers: Counts = self._counts.numpy()
        return numbers


def to_host(counts: Tensor) -> Later[Counts] | Counts:
    """Return exchanged counts as numbers; from a GPU later, when they are needed."""
    host = HostCounts(counts)
    return Later(lambda: host.numbers) if device_of(counts).is_gpu else host.numbers


def exchange_counts(
    counts_CN: Tensor | Counts,
    maker: RouteMaker,
    transport: Transport,
    degrees: Degrees | None = None,
    group: Axes = Group.EXPERT,
) -> Later[Routes] | Routes:
    """Tell other ranks what they will get.

    Args:
        counts_CN: Rows by slice; N = counts per rank * ranks, rank by rank. An array is the same on all
            ranks, which then are not told.
        degrees: The numbers of chunks in which rows will travel; None: every slice is one.
        group: The ranks to be told.

    Returns:
        The routes, from a GPU later, when the counts have come.
    """
    if not isinstance(counts_CN, Tensor):
        return maker.fixed(counts_CN, degrees)
    once = [1] * transport.size(group)
    if maker.needs_table:  # every rank learns all counts
        everyone = to_host(transport.all_gather(counts_CN.unsqueeze(0), once, group))
        return Later.after(everyone, partial(maker.from_everyone, degrees=degrees))
    # [slice, rank, count] -> [rank, slice, count]: one equal piece per rank.
    sent_PCN = counts_CN.view(len(counts_CN), maker.place.ep_size, -1).transpose(0, 1).contiguous()
    received_PCN = transport.all_to_all(sent_PCN, once, once, group)
    if not device_of(counts_CN).is_gpu:
        return maker.from_pair(sent_PCN.numpy(), received_PCN.numpy(), degrees)
    both = to_host(torch.stack([sent_PCN, received_PCN]))  # by one copy
    return Later.after(both, lambda numbers: maker.from_pair(numbers[0], numbers[1], degrees))


def send_out(rows: Tensor, leg: Leg, transport: Transport) -> Tensor:
    """Send rows along one leg towards the experts."""
    if not leg.sorted_already:
        blocks = rows.split(list(leg.sizes))
        rows = torch.cat([blocks[block] for block in leg.order])
    return transport.all_to_all(rows, leg.input_splits, leg.output_splits, leg.axes)


def send_home(rows: Tensor, leg: Leg, transport: Transport) -> Tensor:
    """Send rows along a leg the other way: its transpose, and its inverse where every block was sent once."""
    rows = transport.all_to_all(rows, leg.output_splits, leg.input_splits, leg.axes)
    if leg.sorted_already:
        return rows
    by_block: list[list[Tensor]] = [[] for _ in leg.sizes]
    for block, part in zip(leg.order, rows.split([leg.sizes[block] for block in leg.order]), strict=True):
        by_block[block].append(part)
    return torch.cat([summed(parts) for parts in by_block if parts])


# ---- tokens of samples that several ranks share: B samples, L tokens per sample, M hidden size -------------


def gathered(mine_BLM: Tensor, lengths: Sequence[int], transport: Transport, axes: Axes) -> Tensor:
    """Return the tokens of all ranks.

    Args:
        mine_BLM: This rank's part of every sample.
        lengths: The tokens of a sample on every rank.
    """
    samples, hidden = mine_BLM.shape[0], mine_BLM.shape[2]
    rows = mine_BLM.reshape(samples * mine_BLM.shape[1], hidden)
    sizes = [samples * length for length in lengths]
    parts = zip(transport.all_gather(rows, sizes, axes).split(sizes), lengths, strict=True)
    return torch.cat([part.view(samples, length, hidden) for part, length in parts], dim=1)


def scattered(all_BLM: Tensor, lengths: Sequence[int], rank: int, transport: Transport, axes: Axes) -> Tensor:
    """Return the sum over ranks of the tokens of this one.

    Args:
        lengths: The tokens of a sample on every rank.
        rank: This rank's place.
    """
    samples, _, hidden = all_BLM.shape
    rows = torch.cat([part.reshape(-1, hidden) for part in all_BLM.split(list(lengths), dim=1)])
    own_rows = transport.reduce_scatter(rows, [samples * length for length in lengths], axes)
    return own_rows.view(samples, lengths[rank], hidden)
