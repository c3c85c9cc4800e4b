"""Results from their JSON, so that another process can render what one has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from penstock.lab.bench.result import BenchResult, CaseResult, Limit, Spread


def restore(plain: Mapping[str, Any]) -> BenchResult:
    """Restore what `BenchResult.to_dict` has made plain.

    Older results have no notes, no rate inside nodes, no layout, and one limit for all of their cases.

    Raises:
        KeyError: If a field is missing.
    """
    limit = _limit(plain)
    return BenchResult(
        virtual=plain["virtual_devices"],  # in JSON `virtual` may say no more than whether they were
        ranks=plain["ranks"],
        nodes=plain["nodes"],
        inter_rate_bit_per_s=plain["inter_rate_bit_per_s"],
        intra_rate_bit_per_s=plain.get("intra_rate_bit_per_s"),
        layout=plain.get("layout", ""),
        limit=limit,
        cases=tuple(_case(case, limit) for case in plain["cases"]),
        notes=tuple(plain.get("notes", ())),
    )


def _limit(plain: Mapping[str, Any]) -> Limit:
    values = {field.name: plain[field.name] for field in fields(Limit) if field.name in plain}
    return Limit(**values)


def _ends(interval: Sequence[float] | None) -> tuple[float, float] | None:
    """Return the ends of an interval; older results have none."""
    return None if interval is None else (interval[0], interval[1])


def _case(plain: Mapping[str, Any], limit: Limit) -> CaseResult:
    """Return a case; in JSON `speedup` is the median alone, since that is what people look for."""
    apart = ("limit", "simulated_interval_s")
    values = {field.name: plain[field.name] for field in fields(CaseResult) if field.name not in apart}
    values["simulated_interval_s"] = _ends(plain.get("simulated_interval_s"))
    values["limit"] = _limit(plain["limit"]) if "limit" in plain else limit
    low, high = plain["speedup_interval"]
    values["speedup"] = Spread(median=plain["speedup"], low=low, high=high)
    values["iteration_s"] = Spread(**plain["iteration_s"])
    values["iterations_s"] = tuple(plain["iterations_s"])
    return CaseResult(**values)
