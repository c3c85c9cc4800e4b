"""Transfers of rows along the legs of a dispatch, and the exchange of counts that sizes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from penstock.apportion import Counts
from penstock.device import device_of
from penstock.features.dispatch import Leg
from penstock.mesh import Axes, Group
from penstock.routing.routes import Degrees, RouteMaker, Routes
from penstock.runtime.transport import Transport
from penstock.runtime.transport.interface import summed
from penstock.topology.faults import ACTIVITY

S = TypeVar("S")
T = TypeVar("T")


class Later(Generic[T]):
    """A value that is made when it is first read, once, by the lane that reads it first.

    holds: the tensors that `make` reads, or values with tensors inside. Their memory must outlive the stream
    that reads the value (`lanes.tensors_in`).
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
    """Tell other ranks what they will get. counts_CN: by slice, N = counts per rank * ranks, rank by rank;
    an array is the same on all ranks, which then are not told.

    degrees: the numbers of chunks in which rows will travel; none = every slice is one. group: the ranks to
    be told.
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
    found: list[list[Tensor]] = [[] for _ in leg.sizes]
    for block, part in zip(leg.order, rows.split([leg.sizes[block] for block in leg.order]), strict=True):
        found[block].append(part)
    return torch.cat([summed(parts) for parts in found if parts])
