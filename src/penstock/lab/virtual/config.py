"""Section `[virtual]`: how tokens are routed between devices whose computation is a sleep."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workloads import RoutingConfig


@dataclass(frozen=True, kw_only=True)
class VirtualConfig(RoutingConfig):
    """Virtual devices: compute tasks sleep as long as the cost model says, transfers move real bytes.

    Tokens are routed by a workload.
    """

    @property
    def label(self) -> str:
        """Label of every output of such a run, as in `virtual devices, zipf routing (exponent 1)`."""
        return f"virtual devices, {self.words}"
