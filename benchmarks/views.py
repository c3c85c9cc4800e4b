"""What figures show of a result: plain dicts, as `BenchResult.to_dict()` gives them, to named values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final

Result = Mapping[str, Any]
"""`BenchResult.to_dict()`, perhaps by way of JSON."""

TIMES: Final = "\N{MULTIPLICATION SIGN}"

COLOURS: Final = {
    "sequential": "#7F8790",
    "moe_pipeline": "#E69F00",
    "flowmoe": "#0072B2",
    "penstock": "#009E73",
    "deepspeed": "#CC79A7",
    "megatron": "#D55E00",
}
"""Okabe and Ito's palette, which people with any kind of colour vision can tell apart; grey is the base."""

MORE_COLOURS: Final = ("#56B4E9", "#8C510A", "#5E3C99", "#1B1F23")
"""For names that are not above, in the order in which they appear."""


@dataclass(frozen=True, kw_only=True)
class CaseView:
    """One bar. Times are seconds; simulated_s is None if nothing was predicted.

    Attributes:
        label: What the run calls it, or the schedule.
        remark: What else to say before the efficiency.
        exposed_s, overhead_share: None for a peer, which has no tasks and cannot tell; pieces is empty then.
        identity: What makes this case the same line in several runs.
        shipped: Whether it ran over Gloo's own all-to-all.
    """

    label: str
    remark: str
    identity: tuple[str, str, str]
    schedule: str
    shipped: bool
    iteration_s: float
    low_s: float
    high_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    efficiency: float
    simulated_s: float | None
    exposed_s: float | None
    overhead_share: float | None
    peak_bytes: int
    pieces: str

    @property
    def limit_s(self) -> float:
        """What nothing with the same work is faster than."""
        return self.efficiency * self.iteration_s

    @property
    def title(self) -> str:
        """The whole name in one line."""
        return f"{self.label}, Gloo as shipped" if self.remark else self.label


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One comparison. inter_rate_bit_per_s and wire_s are None if the rate is not known."""

    label: str
    ranks: int
    nodes: int
    inter_rate_bit_per_s: float | None
    virtual: bool
    compute_s: float
    wire_s: float | None
    limit_s: float
    cases: tuple[CaseView, ...]

    @property
    def title(self) -> str:
        return f"{self.label} (virtual devices)" if self.virtual else self.label

    @property
    def shape(self) -> str:
        """Nodes times devices."""
        return shape_text(self.ranks, self.nodes)

    @property
    def limit_name(self) -> str:
        """What the limit consists of."""
        wire = self.wire_s is not None and self.wire_s >= self.compute_s
        return f"physical limit {milliseconds(self.limit_s)} ({'the link' if wire else 'computation'})"


def view(result: Result) -> RunView:
    """Return named values.

    Raises:
        KeyError: If one of the keys that every result has is missing.
    """
    return RunView(
        label=result.get("label") or _layout(result),
        ranks=result["ranks"],
        nodes=result["nodes"],
        inter_rate_bit_per_s=result["inter_rate_bit_per_s"],
        virtual=result["virtual"],
        compute_s=result["compute_s"],
        wire_s=result["wire_s"],
        limit_s=result["limit_s"],
        cases=tuple(_case(case) for case in result["cases"]),
    )


def _case(case: Mapping[str, Any]) -> CaseView:
    shipped = case["transport"] == "gloo"
    name = case["schedule"]
    label = case["label"].removesuffix(" (gloo)" if shipped else "")
    return CaseView(
        label=label,
        remark="as shipped · " if shipped and label == name else "",
        identity=(name, label, "as shipped" if shipped else ""),
        schedule=name,
        shipped=shipped,
        iteration_s=case["iteration_s_median"],
        low_s=case["iteration_s_interval"][0],
        high_s=case["iteration_s_interval"][1],
        speedup=case["speedup"],
        speedup_low=case["speedup_interval"][0],
        speedup_high=case["speedup_interval"][1],
        efficiency=case["overlap_efficiency"],
        simulated_s=case["simulated_s"],
        exposed_s=case["exposed_communication_s"],
        overhead_share=case["overhead_share"],
        peak_bytes=case["peak_memory_bytes"],
        pieces=_pieces(case),
    )


def _pieces(case: Mapping[str, Any]) -> str:
    microbatches, chunks = case["microbatches"], case["chunks"]
    return "" if microbatches is None or chunks is None else f"R={microbatches} C={chunks}"


def _layout(result: Result) -> str:
    place, rate = shape_text(result["ranks"], result["nodes"]), result["inter_rate_bit_per_s"]
    return place if rate is None else f"{place}, {rate_text(rate)} between nodes"


def by_rate(runs: Sequence[RunView]) -> list[RunView]:
    """Return runs of the kind of cluster with the most rates, by rising rate; [] if none has two."""
    kinds: dict[tuple[int, int, bool], list[RunView]] = {}
    for run in runs:
        if run.inter_rate_bit_per_s is not None:
            kinds.setdefault((run.ranks, run.nodes, run.virtual), []).append(run)
    best = max(kinds.values(), key=lambda found: len(_rates(found)), default=[])
    if len(_rates(best)) < 2:
        return []
    return sorted(best, key=lambda run: run.inter_rate_bit_per_s or 0.0)


def _rates(runs: Iterable[RunView]) -> set[float | None]:
    return {run.inter_rate_bit_per_s for run in runs}


def lines(runs: Sequence[RunView]) -> dict[tuple[str, str, str], dict[float, tuple[RunView, CaseView]]]:
    """Return, by identity of a case, its run and case by rate in bit/s, if there are two rates or more.

    Where two runs have the same rate, the first counts: it holds fewer cases, so less time passed in it.
    """
    by_case: dict[tuple[str, str, str], dict[float, tuple[RunView, CaseView]]] = {}
    for run in runs:
        for case in run.cases:
            line = by_case.setdefault(case.identity, {})
            line.setdefault(run.inter_rate_bit_per_s or 0.0, (run, case))
    return {identity: line for identity, line in by_case.items() if len(line) > 1}


def colours(runs: Iterable[RunView]) -> dict[str, str]:
    """Return `#RRGGBB` of every schedule in these runs; a known schedule has the same colour everywhere."""
    names = list(dict.fromkeys(case.schedule for run in runs for case in run.cases))
    unknown = [name for name in names if name not in COLOURS]
    more = dict(zip(unknown, islice(cycle(MORE_COLOURS), len(unknown)), strict=True))
    return {name: COLOURS.get(name) or more[name] for name in names}


def tint(colour: str, share: float) -> str:
    """Return the colour mixed with white.

    Args:
        share: The share of the colour, 0 to 1.
    """
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02X}" for part in parts)


def ink(colour: str) -> str:
    """Return black or white, whichever is easier to read on the colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#FFFFFF" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "#1B1F23"


def milliseconds(time_s: float) -> str:
    """Return a text such as `8.41 ms`, `842 ms`, `2,055 ms`, `12.3 s`."""
    if time_s >= 10:
        return f"{time_s:.1f} s"
    return f"{1e3 * time_s:,.0f} ms" if time_s >= 0.1 else f"{1e3 * time_s:.3g} ms"


def rate_text(rate_bit_per_s: float) -> str:
    """Return a text such as `400 Mbit/s`, `2 Gbit/s`."""
    if rate_bit_per_s >= 1e9:
        return f"{rate_bit_per_s / 1e9:g} Gbit/s"
    return f"{rate_bit_per_s / 1e6:g} Mbit/s"


def shape_text(ranks: int, nodes: int) -> str:
    """Return nodes times devices, in words."""
    devices = ranks // nodes
    return f"{nodes} node{'s' * (nodes > 1)} {TIMES} {devices} device{'s' * (devices > 1)}"
