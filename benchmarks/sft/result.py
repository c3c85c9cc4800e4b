"""What the runs found, and its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from benchmarks.sft.prepared import Size
from penstock.words import markdown_table

BASE: Final = "transformers"
CORES: Final = 2
"""Of the machine, for the least time that computation takes."""


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """One run.

    Attributes:
        times_s: Seconds of the steps behind the warm-up.
        losses, norms: Losses and norms of gradients of all steps.
        uplink_bytes: Bytes over the busiest uplink per step.
    """

    times_s: Sequence[float]
    losses: Sequence[float]
    norms: Sequence[float]
    uplink_bytes: float

    @property
    def step_s(self) -> float:
        """The median."""
        return median(self.times_s)


@dataclass(frozen=True, kw_only=True)
class SftResult:
    """Runs of every contender, by round.

    Attributes:
        alone: A run of one process on one core, with all samples.
    """

    size: Size
    parameters: int
    ranks: int
    nodes: int
    rate_bit_per_s: float | None
    alone: OneRun
    runs: Mapping[str, Sequence[OneRun]]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"sft": asdict(self)}

    def distance(self, name: str) -> float:
        """Return the largest relative difference of a loss, or a gradient norm, from that of one process."""
        return max(
            abs(own / wanted - 1)
            for run in self.runs[name]
            for series, alone in ((run.losses, self.alone.losses), (run.norms, self.alone.norms))
            for own, wanted in zip(series, alone, strict=True)
        )

    def render(self) -> str:
        """Return a table; speed-ups are of one round's runs."""
        size, rate = self.size, self.rate_bit_per_s
        rows = [("run by", "s per step", "speed-up", "uplink MB", "link s", "from one process")]
        base = self.runs.get(BASE, next(iter(self.runs.values())))
        for name, runs in self.runs.items():
            sent = median(run.uplink_bytes for run in runs)
            rows.append(
                (
                    name,
                    _band([run.step_s for run in runs]),
                    _band([theirs.step_s / own.step_s for theirs, own in zip(base, runs, strict=True)]),
                    f"{sent / 1e6:.0f}",
                    "-" if rate is None else f"{8 * sent / rate:.2f}",
                    f"{self.distance(name):.0e}",
                )
            )
        compute_s = self.alone.step_s
        head = [
            f"{self.parameters / 1e6:.1f} million parameters in {size.layers} layers, {size.top_k} of "
            f"{size.experts} experts, {size.samples} samples of up to {size.length} tokens per rank, float32",
            f"{self.ranks} ranks on {self.nodes} node{'s' if self.nodes > 1 else ''}, {len(base)} rounds of "
            f"{len(base[0].times_s)} steps; median [least, most] of the runs' medians",
            f"One process computes a step on one core in {compute_s:.2f} s; {CORES} cores need at least "
            f"{compute_s / CORES:.2f} s",
            "link s: the uplink's bytes over its rate; from one process: the largest relative difference of "
            "losses and norms of gradients",
        ]
        return "\n".join([*head, "", *markdown_table(rows)])


def _band(values: list[float]) -> str:
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"
