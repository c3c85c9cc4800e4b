"""What the ranks of a stack host as guests from step to step, and the room for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.moe import MoELayer
from penstock.moe.experts.base import Experts
from penstock.moe.seats import Spread, seats_of
from penstock.placement import Hosting
from penstock.runtime.checks.guests import check_no_hooks
from penstock.runtime.guests import LayerGuests, Trip
from penstock.runtime.moving import ExpertMoving, Plans, loads_of_group
from penstock.topology import Layout

Layers = Sequence[MoELayer | None]
Hostings = tuple[Hosting | None, ...]
"""By layer; None for a dense one."""
MOST_FREE = 1
"""Rooms kept for the next step; several steps under way at once make their own."""
Kinds = tuple[tuple[str, torch.dtype, torch.device, torch.Size, bool], ...]


@dataclass(frozen=True)
class Hosted:
    """One layer's hosting, and what follows from it on this rank."""

    hosting: Hosting
    trip: Trip
    spread: Spread


@dataclass(frozen=True)
class Room:
    """Experts of one layer whose parameters are brought. own: those that they are like, as they were."""

    own: Experts
    kinds: Kinds
    guests: Experts

    @staticmethod
    def like(own: Experts, slots: int) -> Room:
        """A new one, with as many slots."""
        return Room(own, kinds_of(own), own.guests(slots))

    def fits(self, own: Experts) -> bool:
        """Whether it is still like the layer's experts, which may have been exchanged or converted."""
        return self.own is own and self.kinds == kinds_of(own)


@dataclass(frozen=True)
class Lodging:
    """The guests of one step, by layer; None in a dense one."""

    layers: Layers
    guests: tuple[LayerGuests | None, ...]
    rooms: tuple[Room | None, ...]

    def of(self, layer: int) -> LayerGuests:
        """The guests of an MoE layer."""
        found = self.guests[layer]
        assert found is not None, f"layer {layer} has no guests"
        return found

    @contextmanager
    def seated(self) -> Iterator[None]:
        """While the forward pass runs, layers route to guests and compute them."""
        try:
            for layer, guests in zip(self.layers, self.guests, strict=True):
                if layer is not None and guests is not None:
                    layer.host(guests.seats)
            yield
        finally:
            for layer in self.layers:
                if layer is not None:
                    layer.host(None)


class Host:
    """Lends every step the guests that its ranks host at that time, and plans what they host next.

    moving: how that is planned; None: the hosting stays until `use` is called.
    """

    def __init__(self, layout: Layout, device: torch.device, moving: ExpertMoving | None = None) -> None:
        self._layout, self._device, self.moving = layout, device, moving
        self._hosted: tuple[Hosted | None, ...] = ()
        self._free: list[tuple[Room | None, ...]] = []
        self._plans = Plans.none(())

    @property
    def hostings(self) -> Hostings:
        """What is hosted from the next forward pass on; () where the plan has no guest slots."""
        return tuple(None if hosted is None else hosted.hosting for hosted in self._hosted)

    def copy(self) -> Host:
        """The same hostings, for a copy of the layers."""
        found = Host(self._layout, self._device, self.moving)
        found._hosted, found._plans = self._hosted, self._plans
        return found

    def open(self, layers: Layers, guest_slots: int) -> None:
        """Make `guest_slots` slots per layer, empty unless as many are in use already."""
        if guest_slots == next((h.guest_slots for h in self.hostings if h is not None), 0):
            return
        self._free.clear()
        if guest_slots:
            empty = (None if at is None else Hosting.none(at.placement, guest_slots) for at in layers)
            self.use(tuple(empty))
        else:
            self._hosted = ()

    def use(self, hostings: Hostings) -> None:
        """Host these from the next forward pass on."""
        self._hosted = tuple(None if hosting is None else self._known(hosting) for hosting in hostings)
        self._plans = Plans.none([hosting for hosting in hostings if hosting is not None])

    def plan(self, loads_PYE: Tensor) -> Plans:
        """What to host after a step with these loads of all ranks; costs a copy from a GPU."""
        if self.moving is None:
            return self._plans
        layout = self._layout
        loads_YPE = loads_of_group(loads_PYE.cpu().numpy(), layout.mesh, layout.rank)
        return self._plans.after(loads_YPE, self.moving)

    def follow(self, plans: Plans) -> None:
        """Host from the next forward pass on what was planned, which all ranks have found alike."""
        if plans is self._plans:
            return
        found = iter(plans.hostings)
        self.use(tuple(None if hosted is None else next(found) for hosted in self._hosted))
        self._plans = plans

    def lend(self, layers: Layers) -> Lodging:
        """Guests for one step. Raises ValueError for an expert with a gradient hook."""
        if not self._hosted:
            return Lodging((), (), ())
        free = self._free.pop() if self._free else (None,) * len(layers)
        rooms: list[Room | None] = []
        guests: list[LayerGuests | None] = []
        for layer, hosted, room in zip(layers, self._hosted, free, strict=True):
            if layer is None or hosted is None:
                rooms.append(None)
                guests.append(None)
                continue
            own, hosting = layer.experts, hosted.hosting
            check_no_hooks(own)
            if room is None or not room.fits(own):
                room = Room.like(own, hosting.guest_slots)  # noqa: PLW2901
            seats = seats_of(own, room.guests, layer.order, hosting, hosted.spread)
            rooms.append(room)
            guests.append(LayerGuests(hosted.trip, own, room.guests, seats))
        return Lodging(layers, tuple(guests), tuple(rooms))

    def take_back(self, lodging: Lodging) -> None:
        """The step is over, so another may have its rooms."""
        if not lodging.rooms or len(self._free) >= MOST_FREE:
            return
        for guests in lodging.guests:
            if guests is not None:
                guests.forget()
        self._free.append(lodging.rooms)

    def _known(self, hosting: Hosting) -> Hosted:
        rank = self._layout.ep_rank
        return Hosted(hosting, Trip.of(hosting, rank), Spread(hosting.splits[rank], self._device))


def kinds_of(experts: Experts) -> Kinds:
    """What guests must be like: names, types, devices and shapes of parameters, and which are trained."""
    return tuple((n, p.dtype, p.device, p.shape, p.requires_grad) for n, p in experts.named_parameters())
