"""Experts that ranks hold as replicas for a step: brought there first, their gradients brought home.

An owner keeps its experts and all that is theirs: parameters, optimiser, checkpoints. A step has replicas of
its own, so that two forward passes may stand before their backward passes, whatever replicas there are in
each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor, nn

from penstock.mesh import Axes
from penstock.moe.experts import Experts, SlotsWithReplicas
from penstock.placement import EMPTY, Replication
from penstock.routing.replicas import ExactSplit
from penstock.routing.sizes import part_sizes
from penstock.runtime.transport import Transport

Flats = Mapping[torch.dtype, Sequence[Tensor]]
"""What belongs to one expert, as flat tensors, by type."""


@dataclass(frozen=True)
class Trip:
    """The slots whose contents a rank exchanges with the ranks of its expert group.

    Attributes:
        leaving: For every rank, this rank's own slots whose experts are replicas there, by replica slot
            there.
        coming: For every rank, the replica slots here that have experts of that rank.
    """

    leaving: tuple[tuple[int, ...], ...]
    coming: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(replication: Replication, rank: int) -> Trip:
        """Return the trip of one rank of the expert group."""
        placement, held = replication.placement, replication.placement.held(rank)

        def owner(expert: int) -> int | None:
            return None if expert == EMPTY else placement.owners[expert]

        here = replication.replicas[rank]
        return Trip(
            tuple(tuple(held.index(e) for e in there if owner(e) == rank) for there in replication.replicas),
            tuple(
                tuple(slot for slot, e in enumerate(here) if owner(e) == other)
                for other in range(placement.ranks)
            ),
        )


@dataclass(frozen=True)
class Piece:
    """A piece of every replica.

    Attributes:
        parts: Relative sizes of all pieces.
        transport, axes: Where ranks meet.
    """

    index: int
    parts: tuple[int, ...]
    transport: Transport
    axes: Axes

    def window(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the piece of what lies back to back in `flats`."""
        sizes = part_sizes(sum(map(len, flats)), self.parts)
        start, found, begin = sum(sizes[: self.index]), list[Tensor](), 0
        stop = start + sizes[self.index]
        for flat in flats:
            first, last = max(start - begin, 0), min(stop - begin, len(flat))
            if first < last:
                found.append(flat[first:last])
            begin += len(flat)
        return found


Kinds = tuple[object, ...]


@dataclass(frozen=True)
class Room:
    """Experts of one layer whose parameters are brought.

    Attributes:
        own: The layer's experts that they are like.
    """

    own: Experts
    kinds: Kinds
    replicas: Experts

    @staticmethod
    def like(own: Experts, slots: int) -> Room:
        """Make a new room with `slots` slots. Later steps use it, too, and lanes fill it on threads of their
        own, so its tensors are ordinary ones even where the step that needs it is in inference mode."""
        with torch.inference_mode(mode=False):
            return Room(own, kinds_of(own), own.replicas(slots))

    def fits(self, own: Experts, slots: int) -> bool:
        """Return whether the room has `slots` slots and still matches the layer's experts, which may have
        been exchanged or converted."""
        same = self.own is own and self.kinds == kinds_of(own)
        return same and self.replicas.num_local_experts == slots


def kinds_of(experts: Experts) -> Kinds:
    """Return what replicas must match: names, types, devices, shapes and trainability of parameters, and
    whether modules are in training mode."""
    named = ((n, p.dtype, p.device, p.shape, p.requires_grad) for n, p in experts.named_parameters())
    return *named, *(module.training for module in experts.modules())


@dataclass(frozen=True)
class LayerReplicas:
    """Replicas of one rank in one layer of one step.

    Attributes:
        room: The layer's experts, and room for other ranks'.
        split: Whose rows the replicas compute, where that is settled by the step's own counts.
    """

    trip: Trip
    room: Room
    expert_slots: SlotsWithReplicas
    split: ExactSplit | None = None

    @torch.no_grad()
    def bring(self, piece: Piece) -> None:
        """Send the piece of own experts to their replicas, and receive that of every replica."""
        own, replicas = self._parameters
        _exchange(piece, (own, self.trip.leaving), (replicas, self.trip.coming), Tensor.copy_)

    @torch.no_grad()
    def take_home(self, piece: Piece) -> None:
        """Send the piece of every replica's gradient to its owner; add arriving pieces to own experts'
        gradients.

        They are added in the order of ranks, so the sums do not depend on the order of arrival.
        """
        own, replicas = self._gradients
        _exchange(piece, (replicas, self.trip.coming), (own, self.trip.leaving), Tensor.add_)

    @cached_property
    def _parameters(self) -> tuple[Sequence[Flats], Sequence[Flats]]:
        """The parameters of own experts and of replicas, looked up for the first piece."""
        return _by_slot(self.room.own, lambda p: p), _by_slot(self.room.replicas, lambda p: p)

    @cached_property
    def _gradients(self) -> tuple[Sequence[Flats], Sequence[Flats]]:
        """The gradients of own experts and of replicas, after the last task that adds to them."""
        return _by_slot(self.room.own, _kept), _by_slot(self.room.replicas, _left)

    def forget(self) -> None:
        """Drop the gradients, which their owners have now."""
        for parameter in self.room.replicas.parameters():
            parameter.grad = None


Slots = tuple[Sequence[Flats], Sequence[Sequence[int]]]
"""The tensors by slot, and for every rank the slots that are exchanged with it."""


def _exchange(piece: Piece, sent: Slots, found: Slots, put: Callable[[Tensor, Tensor], object]) -> None:
    """Exchange flat pieces by an all-to-all for each type. put: what is done with what arrives."""
    (mine, leaving), (ours, coming) = sent, found
    for kind in mine[0]:
        out, into = (
            [[part for slot in slots for part in piece.window(flats[slot][kind])] for slots in by_rank]
            for flats, by_rank in ((mine, leaving), (ours, coming))
        )
        nothing = mine[0][kind][0].new_empty(0)
        moved = piece.transport.all_to_all(
            torch.cat([nothing, *chain(*out)]),
            [sum(map(len, parts)) for parts in out],
            [sum(map(len, parts)) for parts in into],
            piece.axes,
        )
        places = list(chain(*into))
        for place, part in zip(places, moved.split([len(place) for place in places]), strict=True):
            put(place, part)


def _by_slot(experts: Experts, of: Callable[[nn.Parameter], Tensor]) -> list[dict[torch.dtype, list[Tensor]]]:
    """Return what belongs to every slot's parameters, flat, in the order of their names."""
    found: list[dict[torch.dtype, list[Tensor]]] = [{} for _ in range(experts.num_local_experts)]
    for name, parameter in experts.named_parameters():
        for _, slot, part in experts.split(name, of(parameter)):
            found[slot].setdefault(part.dtype, []).append(part.view(-1))
    return found


def _left(parameter: nn.Parameter) -> Tensor:
    """Return a replica's gradient: zero if no row met the replica."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _kept(parameter: nn.Parameter) -> Tensor:
    """Return an own expert's gradient, to be added to; for a frozen one, a buffer that is thrown away."""
    if not parameter.requires_grad:
        return torch.zeros_like(parameter)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
