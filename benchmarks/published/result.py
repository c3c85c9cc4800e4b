"""What all studies found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.published.parm_study import ParmResult
from benchmarks.published.study import GridResult


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
