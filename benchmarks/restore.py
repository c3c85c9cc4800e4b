"""Results from their JSON, so that another process can render what one has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from penstock.lab.bench.result import BenchResult, CaseResult, Limit, Spread


def restore(plain: Mapping[str, Any]) -> BenchResult:
    """Restore what `BenchResult.to_dict` has made plain.

    Raises:
        KeyError: If a field is missing.
    """
    return BenchResult(
        virtual=plain["virtual_devices"],  # in JSON `virtual` may say no more than whether they were
        ranks=plain["ranks"],
        nodes=plain["nodes"],
        inter_rate_bit_per_s=plain["inter_rate_bit_per_s"],
        intra_rate_bit_per_s=plain["intra_rate_bit_per_s"],
        layout=plain["layout"],
        limit=_limit(plain),
        cases=tuple(_case(case) for case in plain["cases"]),
        notes=tuple(plain["notes"]),
    )


def _limit(plain: Mapping[str, Any]) -> Limit:
    return Limit(**{field.name: plain[field.name] for field in fields(Limit)})


def _case(plain: Mapping[str, Any]) -> CaseResult:
    """Return a case; in JSON `speedup` is the median alone, since that is what people look for."""
    values = {field.name: plain[field.name] for field in fields(CaseResult)}
    interval = plain["simulated_interval_s"]
    values["simulated_interval_s"] = interval and (interval[0], interval[1])
    values["limit"] = _limit(plain["limit"])
    low, high = plain["speedup_interval"]
    values["speedup"] = Spread(median=plain["speedup"], low=low, high=high)
    values["iteration_s"] = Spread(**plain["iteration_s"])
    values["iterations_s"] = tuple(plain["iterations_s"])
    return CaseResult(**values)
