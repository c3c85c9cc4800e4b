"""What all studies found, as values that can be written and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.published.parm_study import ParmResult
from benchmarks.published.study import GridResult, grid_from


@dataclass(frozen=True, kw_only=True)
class PublishedResult:
    """All grids of FSMoE and FlowMoE.

    Attributes:
        parm: Parm's layers on both of its testbeds.
    """

    grids: tuple[GridResult, ...]
    parm: tuple[ParmResult, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the key `grids` tells it from other results."""
        return asdict(self)

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> PublishedResult:
        """Restore what `to_dict` has made plain.

        Raises:
            KeyError: If a key is missing.
        """
        return PublishedResult(
            grids=tuple(grid_from(grid) for grid in plain["grids"]),
            parm=tuple(ParmResult.from_dict(each) for each in plain.get("parm", ())),
        )
