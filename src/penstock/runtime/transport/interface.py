"""The interface of transports, which move tensors between ranks, and transports that send nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from penstock.graph import Lane
from penstock.mesh import Axes, Group


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
        """Send every rank's rows to its whole group, [sizes[mine], ...] to [sum(sizes), ...], by place."""
        ...

    def all_reduce(self, tensor: Tensor, group: Axes) -> None:
        """Sum over the group, in place."""
        ...

    def maximum(self, tensor: Tensor, group: Axes) -> None:
        """Take the largest value of the group, for every element, in place."""
        ...

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int], group: Axes) -> Tensor:
        """Return the sum of all ranks' rows for this one. rows: [sum(sizes), ...], those for every place."""
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
    """One transport per communication lane. intra: only where a dispatch has legs inside nodes.

    make: makes another transport, for groups that a plan needs and no transport has; None = all have all
    groups. sends: whether ranks get what others send.
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
            known = (lane, axes) in self.more or (transport is not None and transport.has(axes))
            if not known and self.make is not None:
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


# ---- sums of what ranks have, added one after the other: the same bits however ranks are connected --------


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
