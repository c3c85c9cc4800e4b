"""How samples get their homes while a stack runs: who is asked, and what of the layout they must know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from penstock.decision.moving import Prediction
from penstock.mesh import Axes, Group, node_of
from penstock.moe.routes import Counts
from penstock.moe.sample_moves import Company, Plane, SampleTable
from penstock.placement import Hosting
from penstock.placing import Nearness, assign, sample_problem
from penstock.topology import Layout


class Placer(Protocol):
    """Decides which device every sample lives on from the next combine on. The same on all members."""

    def homes(self, table: SampleTable, following: Hosting | None, moved_rows: int) -> Counts:
        """The device of every sample, [I]; every device keeps as many of each chunk as it had.

        following: where experts of the next MoE layer are; None after the last. moved_rows: what follows a
        sample beside its experts' outputs, in rows of these.
        """
        ...


@dataclass(frozen=True)
class NetMoE:
    """Fewest rows across nodes, then devices, in this combine and the next dispatch. solver: by name."""

    solver: str = "network_simplex"

    def homes(self, table: SampleTable, following: Hosting | None, moved_rows: int) -> Counts:
        homes, expects = table.device_I.copy(), following is not None and table.expected_IE.shape[1] > 0
        for plane in table.company.planes:
            near = _nearness(following, plane) if following is not None and expects else None
            local_D = np.full(table.company.devices, -1)
            local_D[list(plane.devices)] = np.arange(len(plane.devices))
            for chunk in range(table.chunks):
                here = np.flatnonzero((table.chunk_I == chunk) & (local_D[table.device_I] >= 0))
                if here.size:
                    problem = sample_problem(
                        counts=table.rows_IKPN[here].sum(axis=1).reshape(len(here), -1),
                        homes=local_D[homes[here]],
                        moved_rows=np.full(len(here), moved_rows),
                        node_of_device=np.array(plane.node_D),
                        predictions=None if near is None else table.expected_IE[here],
                        following=near,
                    )
                    homes[here] = np.array(plane.devices)[assign(problem, self.solver)]
        return homes


@lru_cache(maxsize=64)
def _nearness(hosting: Hosting, plane: Plane) -> Nearness:
    """Kept, since it changes with the hosting only. A device's ranks have equal parts of its rows."""
    device_P, node_D = np.array(plane.device_P), np.array(plane.node_D)
    inside, near = (Nearness.of(hosting, each).node for each in (device_P, node_D[device_P]))
    device, node = (
        np.stack([parts[device_P == device].mean(axis=0) for device in range(len(node_D))]).round()
        for parts in (inside, near)
    )
    return Nearness(device=device, node=node)


@dataclass(frozen=True)
class SampleMoving:
    """What a stack is told about moving samples.

    placer: decides on homes. prediction: what samples are expected to want of the next MoE layer: what its
    gate says of their tokens in this one, or nothing.
    """

    placer: Placer = NetMoE()
    prediction: Prediction = "next_gate"


@dataclass(frozen=True)
class Relocation:
    """The same on a rank. company: the ranks that exchange counts. member: which of them this is."""

    how: SampleMoving
    company: Company
    member: int

    @staticmethod
    def on(layout: Layout, how: SampleMoving) -> Relocation:
        mesh, axes = layout.mesh, counted_by(layout)
        members = mesh.members(layout.rank, axes)
        devices = list(dict.fromkeys(mesh.group(rank, Group.TENSOR) for rank in members))
        device_B = tuple(devices.index(mesh.group(rank, Group.TENSOR)) for rank in members)
        first = [members[device_B.index(device)] for device in range(len(devices))]
        nodes = [node_of(rank, layout.node_size or layout.world_size) for rank in first]
        company = Company(
            device_B=device_B,
            part_B=tuple(device_B[:b].count(device) for b, device in enumerate(device_B)),
            rank_B=tuple(mesh.place(rank, Group.EXPERT) for rank in members),
            plane_B=tuple(mesh.place(rank, Group.SHARDS) for rank in members),
            node_D=tuple(sorted(set(nodes)).index(node) for node in nodes),
        )
        return Relocation(how, company, mesh.place(layout.rank, axes))


def counted_by(layout: Layout) -> Axes:
    """The ranks that exchange what their samples send: all that hold a part of some expert."""
    return Group.EXPERT if layout.esp_size == 1 else Group.EXPERT_SHARDS
