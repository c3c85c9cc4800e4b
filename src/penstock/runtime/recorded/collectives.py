"""What the operators of torch.distributed read, write and send, as arguments of a dispatched operator say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from penstock.runtime.recorded.log import Call


@dataclass(frozen=True)
class Collective:
    """One call of this rank. sent, received: bytes by place in the group, where they may differ by rank.

    message: of a message, the places of its sender and its receiver.
    """

    group: ProcessGroup
    op: str
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    sent: Sequence[int]
    received: Sequence[int]
    message: tuple[int, int] | None = None

    @property
    def call(self) -> Call:
        """The call as it stands in a log; a message as a call of a communicator of its two ranks alone."""
        name, ranks = self.group.group_name, tuple(dist.get_process_group_ranks(self.group))
        if self.message is None:
            return Call(name, ranks, self.op, tuple(self.sent), tuple(self.received))
        places = self.message
        pair = ranks[places[0]], ranks[places[1]]
        sent, received = (tuple(of[place] for place in places) for of in (self.sent, self.received))
        return Call(f"{name}, rank {pair[0]} to {pair[1]}", pair, self.op, sent, received, name)


def collective_of(name: str, args: Sequence[Any]) -> Collective:
    """Return what a c10d operator does. Raises KeyError for one that is not known here."""
    op, message = "all_gather", None
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()
    match name:
        case "allreduce_":
            tensors, group = args[0], _group(args[1])
            op, writes = f"all_reduce {tensors[0].dtype}", tensors
            sent = received = [sum(tensor.nbytes for tensor in tensors)] * group.size()
        case "broadcast_":
            tensors, group, root = args[0], _group(args[1]), args[2]
            size_bytes, is_root = sum(tensor.nbytes for tensor in tensors), group.rank() == root
            op = f"broadcast from {root}"
            reads, writes = (tensors, ()) if is_root else ((), tensors)
            sent = [size_bytes if is_root else 0] * group.size()
            received = [size_bytes if place == root else 0 for place in range(group.size())]
        case "allgather_":
            (writes,), reads, group = args[0], args[1], _group(args[2])
            sent, received = [reads[0].nbytes] * group.size(), [tensor.nbytes for tensor in writes]
        case "_allgather_base_":
            writes, reads, group = (args[0],), (args[1],), _group(args[2])
            sent, received = [args[1].nbytes] * group.size(), _even(args[0], group)
        case "_reduce_scatter_base_":
            writes, reads, group = (args[0],), (args[1],), _group(args[2])
            op = f"reduce_scatter {args[0].dtype}"
            sent, received = _even(args[1], group), [args[0].nbytes] * group.size()
        case "alltoall_base_":
            op, writes, reads, group = "all_to_all", (args[0],), (args[1],), _group(args[2])
            sent, received = _bytes(args[1], args[4], group), _bytes(args[0], args[3], group)
        case "send" | "recv_":
            tensors, group, peer = args[0], _group(args[1]), args[2]
            size_bytes, nothing = sum(tensor.nbytes for tensor in tensors), [0] * group.size()
            op, moved = "message", [size_bytes if place == peer else 0 for place in range(group.size())]
            if name == "send":
                reads, sent, received, message = tensors, moved, nothing, (group.rank(), peer)
            else:
                writes, sent, received, message = tensors, nothing, moved, (peer, group.rank())
        case _:
            raise KeyError(name)
    return Collective(group, op, reads, writes, sent, received, message)


def _group(script_object: Any) -> ProcessGroup:
    group: ProcessGroup = ProcessGroup.unbox(script_object)
    return group


def _even(tensor: Tensor, group: ProcessGroup) -> list[int]:
    return [tensor.nbytes // group.size()] * group.size()


def _bytes(tensor: Tensor, splits: Sequence[int], group: ProcessGroup) -> list[int]:
    """Return the bytes of the shares of a tensor that is cut along its first dimension; no splits: evenly."""
    if not splits:
        return _even(tensor, group)
    row_bytes = tensor[:1].nbytes
    return [split * row_bytes for split in splits]


def runs_unevenly(name: str, args: Sequence[Any]) -> bool:
    """Return whether this is a gather of parts of several sizes, which Gloo does not know."""
    return name == "allgather_" and len({tensor.numel() for tensor in args[0][0]}) > 1


def gather_unevenly(args: Sequence[Any]) -> Any:
    """Gather parts of several sizes as NCCL does, by one broadcast from every rank."""
    (inbox,), (mine,), group = args[0], args[1], args[2]
    inbox[_group(group).rank()].copy_(mine)
    for place, part in enumerate(inbox):
        if part.numel():
            _, work = torch.ops.c10d.broadcast_.default([part], group, place, 0, True)
            dist.Work.unbox(work).wait()
    return args[0], work
