"""A cluster whose links were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from penstock.cost.cluster import AlphaBeta, ClusterConfig
from penstock.cost.span import Span
from penstock.ops.transfers import outward

LegModels = Mapping[tuple[str, str], AlphaBeta]
"""By dispatch and leg (forward, outward; combine takes the same legs home)."""


@dataclass(frozen=True, kw_only=True)
class FittedCluster(ClusterConfig):
    """Links as they were measured; the argument conventions are those of ClusterConfig.

    dispatch: the flat all-to-all. reduce: the all-reduce of all ranks. legs: of hierarchical dispatches.
    """

    dispatch: AlphaBeta
    reduce: AlphaBeta
    legs: LegModels = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Measured numbers need no check."""

    @staticmethod
    def build(
        devices: ClusterConfig, *, dispatch: AlphaBeta, reduce: AlphaBeta, legs: LegModels
    ) -> FittedCluster:
        """Measured links between devices that compute as `devices` says."""
        assumed = {each.name: getattr(devices, each.name) for each in fields(ClusterConfig)}
        return FittedCluster(**assumed, dispatch=dispatch, reduce=reduce, legs=legs)

    def all_to_all(self, group: Span | int) -> AlphaBeta:
        del group  # measured in the very group that will be used
        return self.dispatch

    def all_reduce(self, group: Span | int) -> AlphaBeta:
        del group
        return self.reduce

    def leg(self, dispatch: str, op: str, span: Span) -> AlphaBeta:
        if dispatch == "flat":
            return self.dispatch
        found = self.legs.get((dispatch, outward(op)))
        return super().leg(dispatch, op, span) if found is None else found
