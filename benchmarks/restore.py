"""Results from their JSON, so that another process can render what one has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from penstock.bench.result import BenchResult, CaseResult, Spread


def restore(plain: Mapping[str, Any]) -> BenchResult:
    """The inverse of `BenchResult.to_dict`. Raises `KeyError` if a field is missing."""
    known = {field.name: plain[field.name] for field in fields(BenchResult) if field.name != "notes"}
    known["notes"] = tuple(plain.get("notes", ()))  # older results have none
    known["virtual"] = plain["virtual_devices"]  # in JSON `virtual` may say no more than whether they were
    known["cases"] = tuple(_case(case) for case in plain["cases"])
    return BenchResult(**known)


def _case(plain: Mapping[str, Any]) -> CaseResult:
    """In JSON `speedup` is the median alone, since that is what people look for."""
    found = {field.name: plain[field.name] for field in fields(CaseResult)}
    low, high = plain["speedup_interval"]
    found["speedup"] = Spread(median=plain["speedup"], low=low, high=high)
    found["iteration_s"] = Spread(**plain["iteration_s"])
    found["iterations_s"] = tuple(plain["iterations_s"])
    return CaseResult(**found)
