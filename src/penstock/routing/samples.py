"""Targets of rows and samples when samples move: from the counts of all samples and their new homes.

No torch.
A *member* is a rank of the group that exchanges counts. A *device* is a member, or the members that share
the tokens of their samples: each has a part of every sample. A device keeps its number of samples of every
chunk. Samples of a device are numbered as they lie, those of the group device by device.

Shapes: I samples of the group, B members, D devices, K parts of a sample, P ranks of the expert group, N
positions of a rank, C chunks (slices), E experts of the next MoE layer.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from penstock.apportion import Counts
from penstock.mesh import Group, Mesh, node_of
from penstock.placement import PlacementError
from penstock.routing.routes import Degrees, RouteMaker, Routes
from penstock.routing.sizes import split_sizes


@dataclass(frozen=True)
class Plane:
    """Devices of an exchange group that exchange rows with each other.

    Attributes:
        devices: Their numbers in the exchange group.
        device_P: The device that every rank of the expert group belongs to, out of these.
        node_D: The node of each device.
    """

    devices: tuple[int, ...]
    device_P: tuple[int, ...]
    node_D: tuple[int, ...]


@dataclass(frozen=True)
class ExchangeGroup:
    """The members of a group, and what they share.

    Attributes:
        device_B, part_B: The device that every member belongs to, and the part of its samples' tokens that it
            has.
        rank_B: The place of every member in its expert group.
        plane_B: The plane of every member; members of one plane exchange rows with each other.
        node_D: The node of every device.
    """

    device_B: tuple[int, ...]
    part_B: tuple[int, ...]
    rank_B: tuple[int, ...]
    plane_B: tuple[int, ...]
    node_D: tuple[int, ...]

    @staticmethod
    def alone(nodes: Sequence[int]) -> ExchangeGroup:
        """Return an exchange group in which every member is a device.

        Args:
            nodes: The node of every member.
        """
        everyone, nothing = tuple(range(len(nodes))), (0,) * len(nodes)
        return ExchangeGroup(everyone, nothing, everyone, nothing, tuple(nodes))

    @property
    def devices(self) -> int:
        return len(self.node_D)

    @property
    def parts(self) -> int:
        return 1 + max(self.part_B)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The devices between which samples move, for each set of such devices."""
        plane_D = np.array(self.plane_B)[self.member_DK[:, 0]]
        planes = []
        for plane in np.unique(plane_D):
            members = zip(self.rank_B, self.device_B, self.plane_B, strict=True)
            device_of = {rank: device for rank, device, its_plane in members if its_plane == plane}
            number = {int(device): n for n, device in enumerate(np.flatnonzero(plane_D == plane))}
            places = tuple(number[device_of[rank]] for rank in sorted(device_of))
            nodes = tuple(self.node_D[device] for device in number)
            planes.append(Plane(devices=tuple(number), device_P=places, node_D=nodes))
        return tuple(planes)

    @cached_property
    def member_DK(self) -> Counts:  # noqa: N802  # the suffix is its shape
        """The member that has a given part of a device's samples."""
        member_DK = np.zeros((self.devices, self.parts), np.int64)
        member_DK[self.device_B, self.part_B] = np.arange(len(self.device_B))
        return member_DK


@lru_cache(maxsize=64)
def exchange_group_of(mesh: Mesh, rank: int, node_size: int) -> ExchangeGroup:
    """Return the ranks that exchange counts with a rank, as devices.

    Args:
        rank: A rank of the world.
        node_size: The ranks of a node; 0 = there is one node.
    """
    members = mesh.members(rank, mesh.all_experts)
    groups = [mesh.group(member, Group.TENSOR) for member in members]
    first = {group: members[groups.index(group)] for group in groups}
    number, seen = {group: device for device, group in enumerate(first)}, Counter[int]()
    parts = []
    for group in groups:
        parts.append(seen[group])
        seen[group] += 1
    nodes = [node_of(member, node_size or mesh.world_size) for member in first.values()]
    return ExchangeGroup(
        device_B=tuple(number[group] for group in groups),
        part_B=tuple(parts),
        rank_B=tuple(mesh.place(member, Group.EXPERT) for member in members),
        plane_B=tuple(mesh.place(member, Group.SHARDS) for member in members),
        node_D=tuple(sorted(set(nodes)).index(node) for node in nodes),
    )


@dataclass(frozen=True)
class SampleTable:
    """The rows that every sample of a group sends to each position, before any sample moves.

    Attributes:
        rows_IKPN: The rows by part, rank of the expert group and position.
        expected_IE: The rows by expert of the next MoE layer; no columns where nothing is expected.
        device_I, chunk_I: The device and the chunk of every sample.
    """

    exchange_group: ExchangeGroup
    rows_IKPN: Counts
    expected_IE: Counts
    device_I: Counts
    chunk_I: Counts
    chunks: int

    @staticmethod
    def of(
        gathered: Counts,
        samples_B: Sequence[int],
        exchange_group: ExchangeGroup,
        *,
        ranks: int,
        positions: int,
        chunks: int,
    ) -> SampleTable:
        """Make a table from the members' counts, [samples of all members, positions + E].

        Args:
            gathered: The counts of the members, one after the other.
            samples_B: The number of samples of every member.
            ranks: The ranks of the expert group, P.
            positions: The positions of the whole expert group, P * N.
            chunks: The slices, C.
        """
        samples_D = [samples_B[here[0]] for here in exchange_group.member_DK]
        by_member = np.split(gathered.astype(np.int64), np.cumsum(samples_B)[:-1])
        by_device = [np.stack([by_member[b] for b in here], axis=1) for here in exchange_group.member_DK]
        counts = np.concatenate(by_device)
        rows = counts[:, :, :positions]
        return SampleTable(
            exchange_group=exchange_group,
            rows_IKPN=np.stack(np.split(rows, ranks, axis=2), axis=2),
            expected_IE=counts[:, :, positions:].sum(axis=1),
            device_I=np.repeat(np.arange(len(samples_D)), samples_D),
            chunk_I=np.concatenate(
                [np.repeat(np.arange(chunks), split_sizes(each, chunks)) for each in samples_D]
            ),
            chunks=chunks,
        )

    def by_expert(self, expert_of_position: Sequence[int], num_experts: int) -> Counts:
        """Return the rows of every sample by expert of this layer, [I, E].

        Args:
            expert_of_position: The expert at every position; -1 = there is none.
        """
        rows_IN = self.rows_IKPN.sum(axis=1).reshape(len(self.device_I), len(expert_of_position))
        rows_EI = np.zeros((num_experts + 1, len(rows_IN)), np.int64)  # the last is for -1, and has no rows
        np.add.at(rows_EI, np.array(expert_of_position), rows_IN.T)
        return rows_EI[:-1].T

    def sent(self, device_I: Counts) -> Counts:
        """Return rows from every member to every position if samples are on these devices, [B, P, C, N]."""
        exchange_group, shape = self.exchange_group, self.rows_IKPN.shape
        cells = np.zeros((exchange_group.devices * self.chunks, *shape[1:]), np.int64)
        np.add.at(cells, device_I * self.chunks + self.chunk_I, self.rows_IKPN)
        by_device = cells.reshape(exchange_group.devices, self.chunks, *shape[1:])
        sent: Counts = by_device[list(exchange_group.device_B), :, list(exchange_group.part_B)]
        return sent.transpose(0, 2, 1, 3)

    def place_I(self, device_I: Counts) -> Counts:  # noqa: N802  # the suffix is its shape
        """Number the samples on these devices: by chunk, inside a chunk in their old order."""
        order = np.lexsort((self.chunk_I, device_I))
        first = np.searchsorted(device_I[order], np.arange(self.exchange_group.devices))
        place = np.empty_like(device_I)
        place[order] = np.arange(len(order)) - first[device_I[order]]
        return place


@dataclass(frozen=True)
class Crossing:
    """Numbers of the samples that leave one member and come to it, in the order in which they are sent.

    Attributes:
        leaving, arriving: The samples that change ranks, on the old and the new home.
        kept_from, kept_to: The samples that stay, on the old and the new home.
        sent, received: The number of samples to and from every rank of the expert group.
    """

    leaving: Counts
    arriving: Counts
    kept_from: Counts
    kept_to: Counts
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> Crossing:
        """The crossing of gradients: to where the samples came from."""
        return Crossing(self.arriving, self.leaving, self.kept_to, self.kept_from, self.received, self.sent)


@dataclass(frozen=True)
class RowOrder:
    """Order of one slice's rows at their experts, for combine: the row in every place, and the inverse."""

    forward: Counts
    back: Counts


@dataclass(frozen=True)
class SampleHomes:
    """New homes of a group's samples, and what follows from them for one member.

    Attributes:
        device_I: The device of every sample.
        routes: The routes of combine.
        rows: The order of every slice's rows; None where they are in the right one.
        crossing: The samples that leave the member and come to it; None where no sample of the group moves.
    """

    device_I: Counts
    routes: Routes
    rows: tuple[RowOrder | None, ...]
    crossing: Crossing | None

    @cached_property
    def digest(self) -> int:
        """A hash of the homes, for members to compare; below 2**63."""
        digest = hashlib.blake2b(self.device_I.astype(np.int64).tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def settle(
    table: SampleTable, device_I: Counts, member: int, maker: RouteMaker, degrees: Degrees
) -> SampleHomes:
    """Return what new homes mean for a member.

    Args:
        table: The rows of the samples, before any of them moves.
        device_I: The new device of every sample.
        maker: Makes the member's routes.
        degrees: The numbers of chunks in which rows travel.

    Raises:
        PlacementError: If a device's number of samples would change.
    """
    exchange_group = table.exchange_group
    if device_I.shape != table.device_I.shape:
        raise PlacementError(f"{len(device_I)} homes for {len(table.device_I)} samples")
    if ((device_I < 0) | (device_I >= exchange_group.devices)).any():
        raise PlacementError(f"samples are given homes outside devices 0 to {exchange_group.devices - 1}")
    cells = exchange_group.devices * table.chunks
    before, after = (
        np.bincount(devices * table.chunks + table.chunk_I, minlength=cells)
        for devices in (table.device_I, device_I)
    )
    if (wrong := np.flatnonzero(before != after)).size:
        device, chunk = np.unravel_index(wrong[0], (exchange_group.devices, table.chunks))
        raise PlacementError(
            f"device {device} is given {after[wrong[0]]} samples of chunk {chunk} and had "
            f"{before[wrong[0]]}: every device keeps as many as it had"
        )
    plane_D = np.array(exchange_group.plane_B)[exchange_group.member_DK[:, 0]]
    if (plane_D[device_I] != plane_D[table.device_I]).any():
        raise PlacementError("a sample is moved to a rank that shares no expert group with its own")
    place_I = table.place_I(device_I)
    orders = tuple(_row_order(table, device_I, place_I, member, c) for c in range(table.chunks))
    routes = maker.from_table(table.sent(device_I), degrees)
    return SampleHomes(device_I, routes, orders, _crossing(table, device_I, place_I, member))


def _crossing(table: SampleTable, device_I: Counts, place_I: Counts, member: int) -> Crossing | None:
    if (device_I == table.device_I).all():
        return None
    exchange_group = table.exchange_group
    device, part = exchange_group.device_B[member], exchange_group.part_B[member]
    here, there = table.device_I == device, device_I == device
    number_I = table.place_I(table.device_I)
    rank_D = np.array(exchange_group.rank_B)[exchange_group.member_DK[:, part]]
    leaving, arriving = np.flatnonzero(here & ~there), np.flatnonzero(there & ~here)
    leaving = leaving[np.argsort(rank_D[device_I[leaving]], kind="stable")]
    arriving = arriving[np.argsort(rank_D[table.device_I[arriving]], kind="stable")]
    ranks = table.rows_IKPN.shape[2]
    kept = here & there
    return Crossing(
        leaving=number_I[leaving],
        arriving=place_I[arriving],
        kept_from=number_I[kept],
        kept_to=place_I[kept],
        sent=_by_rank(rank_D[device_I[leaving]], ranks),
        received=_by_rank(rank_D[table.device_I[arriving]], ranks),
    )


def _by_rank(ranks: Counts, count: int) -> tuple[int, ...]:
    return tuple(np.bincount(ranks, minlength=count).tolist())


def _row_order(
    table: SampleTable, device_I: Counts, place_I: Counts, member: int, chunk: int
) -> RowOrder | None:
    """Return the order of rows by their samples' homes, a sample's in order; None if unchanged."""
    exchange_group = table.exchange_group
    plane_DK = np.array(exchange_group.plane_B)[exchange_group.member_DK]
    rank_DK = np.array(exchange_group.rank_B)[exchange_group.member_DK]
    i, k = np.nonzero(
        (plane_DK[table.device_I] == exchange_group.plane_B[member]) & (table.chunk_I == chunk)[:, None]
    )
    sizes = table.rows_IKPN[i, k, exchange_group.rank_B[member]]  # [pairs, N]
    position = np.broadcast_to(np.arange(sizes.shape[1]), sizes.shape)
    source, home, number = (
        np.broadcast_to(values[:, None], sizes.shape)
        for values in (rank_DK[table.device_I[i], k], rank_DK[device_I[i], k], place_I[i])
    )
    before = np.lexsort((np.broadcast_to(i[:, None], sizes.shape).ravel(), position.ravel(), source.ravel()))
    after = np.lexsort((number.ravel(), position.ravel(), home.ravel()))
    if (before == after).all():
        return None
    sizes = sizes.ravel()
    start = np.empty_like(sizes)
    start[before] = np.cumsum(sizes[before]) - sizes[before]
    moved = sizes[after]
    shift = start[after] - (np.cumsum(moved) - moved)
    forward: Counts = np.repeat(shift, moved) + np.arange(moved.sum())
    back = np.empty_like(forward)
    back[forward] = np.arange(len(forward))
    return RowOrder(forward, back)
