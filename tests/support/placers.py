"""Placers that move more samples than pays: a step must be right wherever they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.apportion import Counts
from penstock.placement import Replication
from penstock.routing.samples import SampleTable
from penstock.runtime.features.sample_placement import NetMoE


@dataclass(frozen=True)
class RandomHomes:
    """Any homes at which every device keeps as many samples of each chunk, another choice for every table."""

    seed: int = 0

    def prepare(self) -> None:
        """Nothing to load."""

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        del following, moved_rows
        drawn = np.random.default_rng([self.seed, int(table.rows_IKPN.sum()), *table.rows_IKPN[:1].ravel()])
        homes = table.device_I.copy()
        plane_D = np.array(table.exchange_group.plane_B)[table.exchange_group.member_DK[:, 0]]
        for chunk in range(table.chunks):
            for plane in np.unique(plane_D):
                here = np.flatnonzero((table.chunk_I == chunk) & (plane_D[table.device_I] == plane))
                homes[here] = drawn.permutation(homes[here])
        return homes


@dataclass(frozen=True)
class Rotated:
    """Every sample goes as many places further on as there are samples in a chunk of a device, and one."""

    def prepare(self) -> None:
        """Nothing to load."""

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        del following, moved_rows
        homes = table.device_I.copy()
        for chunk in range(table.chunks):
            here = np.flatnonzero(table.chunk_I == chunk)
            homes[here] = np.roll(homes[here], 1 + len(here) // max(1, table.exchange_group.devices))
        return homes


class Eager(NetMoE):
    """NetMoE's assignment as if samples moved for nothing: small ones are seldom worth their residual."""

    def homes(self, table: SampleTable, following: Replication | None, moved_rows: int) -> Counts:
        del moved_rows
        return super().homes(table, following, 0)
