"""Routes of a layer whose rows are split among the hosts of their experts when all ranks' counts are known.

Shapes: S ranks that share a layer's experts, C slices, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.moe.routes import Counts, Degrees, RouteMaker, Routes
from penstock.placing.exact import ExactSplit


@dataclass(frozen=True)
class SplitRoutes:
    """Makes routes from counts by expert. maker: makes them from counts by position."""

    maker: RouteMaker
    split: ExactSplit

    def from_everyone(self, counts_SCE: Counts, degrees: Degrees | None = None) -> Routes:
        """Return the routes for the rows that every rank has for every expert, by slice."""
        table = self.split.table(counts_SCE)
        return replace(self.maker.from_table(table, degrees), home=self.split.home)
