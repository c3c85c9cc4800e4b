"""What a benchmark of dispatches found. Times are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from penstock.bench.result import Spread
from penstock.cost import AlphaBeta

LegModels = Mapping[str, Mapping[str, AlphaBeta]]
"""Fitted legs, out and home, by dispatch and op. Argument: bytes of the rows of a rank in one chunk."""


@dataclass(frozen=True, kw_only=True)
class TripResult:
    """One row. wire_bytes: payload that must cross the busiest uplink in its busier direction, out and home.

    limit_s: see `Uplinks`; None if the rate is not known or nothing crosses a link. predicted_s: by the fit.
    """

    size_bytes: int
    chunks: int
    wire_bytes: int
    limit_s: float | None
    times_s: Mapping[str, Spread]
    predicted_s: Mapping[str, float]

    @property
    def fastest(self) -> str:
        """The dispatch with the least median."""
        return min(self.times_s, key=lambda name: self.times_s[name].median)

    @property
    def auto(self) -> str:
        """The dispatch with the least prediction."""
        return min(self.predicted_s, key=lambda name: self.predicted_s[name])

    @property
    def auto_ratio(self) -> float:
        """Median time of the choice over that of the fastest: 1 if it is the fastest."""
        return self.times_s[self.auto].median / self.times_s[self.fastest].median

    def efficiency(self, dispatch: str) -> float | None:
        """limit / median time; None without a limit."""
        return None if self.limit_s is None else self.limit_s / self.times_s[dispatch].median

    def to_dict(self) -> dict[str, Any]:
        found = {"fastest": self.fastest, "auto": self.auto, "auto_ratio": self.auto_ratio}
        return asdict(self) | found | {"efficiency": {name: self.efficiency(name) for name in self.times_s}}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> TripResult:
        """The inverse of `to_dict`; what follows from the rest is found again."""
        given = {each.name: plain[each.name] for each in fields(TripResult)}
        times_s = {name: Spread(**spread) for name, spread in plain["times_s"].items()}
        return TripResult(**given | {"times_s": times_s})


@dataclass(frozen=True, kw_only=True)
class DispatchesResult:
    """All dispatches at all sizes on one cluster."""

    ranks: int
    nodes: int
    inter_rate_bit_per_s: float | None
    models: LegModels
    rows: tuple[TripResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the key `dispatches` tells it from other results."""
        plain = asdict(self)
        del plain["rows"]
        return plain | {"dispatches": [row.to_dict() for row in self.rows]}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> DispatchesResult:
        """The inverse of `to_dict`. Raises `KeyError` if a key is missing."""
        given = {key: plain[key] for key in ("ranks", "nodes", "inter_rate_bit_per_s")}
        rows = tuple(TripResult.from_dict(row) for row in plain["dispatches"])
        models = {
            name: {op: AlphaBeta(**model) for op, model in legs.items()}
            for name, legs in plain["models"].items()
        }
        return DispatchesResult(**given, models=models, rows=rows)
