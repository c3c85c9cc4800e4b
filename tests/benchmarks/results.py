"""A made-up machine and results with round numbers, as plain dicts."""

from __future__ import annotations

from typing import Any

from benchmarks.machine import Machine
from penstock.lab.bench.result import BenchResult, CaseResult, Limit, Spread

MACHINE = Machine(
    cores=2,
    cpu="Some Processor 9000",
    memory_bytes=8 << 30,
    kernel="Linux 6.1.90",
    python="3.11.7",
    torch="2.13.0+cpu",
    date="2026-01-31",
    commit="0123456789",
)

COMPUTE_S = 0.5
WIRE_BYTES = 25_000_000


def case(
    schedule: str, iteration_s: float, *, base_s: float = 1.0, limit_s: float = 0.5, **more: Any
) -> CaseResult:
    """The interval is 10 % to either side; one in ten is predicted too much."""
    values: dict[str, Any] = {
        "schedule": schedule,
        "transport": "penstock",
        "label": schedule,
        "microbatches": 2,
        "chunks": 1,
        "iterations_s": (iteration_s, 0.9 * iteration_s, 1.1 * iteration_s),
        "iteration_s": Spread(median=iteration_s, low=0.9 * iteration_s, high=1.1 * iteration_s),
        "speedup": Spread(median=base_s / iteration_s, low=0.95, high=1.05),
        "limit": Limit(compute_s=limit_s, wire_bytes=0, wire_s=None),
        "busy_s": {"compute": 0.4, "inter": 0.3},
        "exposed_communication_s": 0.125,
        "overhead_s": 0.01,
        "peak_memory_bytes": 128 << 20,
        "simulated_s": iteration_s / 1.1,
    }
    return CaseResult(**(values | more))


def shipped(schedule: str, iteration_s: float) -> CaseResult:
    return case(schedule, iteration_s, transport="gloo", label=f"{schedule} (gloo)")


def peer(name: str, iteration_s: float) -> CaseResult:
    """A peer has no tasks, so there is much that it cannot tell."""
    unknown: dict[str, Any] = dict.fromkeys(("exposed_communication_s", "overhead_s", "simulated_s"))
    return case(name, iteration_s, busy_s={}, **unknown)


THREE = (case("sequential", 1.0), case("flowmoe", 0.625), case("penstock", 0.5625))

NINE = (
    *THREE,
    case("moe_pipeline", 0.8),
    peer("deepspeed", 1.125),
    peer("megatron", 1.0625),
    shipped("sequential", 1.5),
    shipped("flowmoe", 0.9),
    case("another_schedule", 0.7),
)


def result(
    rate_bit_per_s: float | None = 4e8, cases: tuple[CaseResult, ...] = THREE, virtual: str | None = None
) -> dict[str, Any]:
    """Two nodes of one device."""
    return BenchResult(
        virtual=virtual,
        ranks=2,
        nodes=2,
        inter_rate_bit_per_s=rate_bit_per_s,
        limit=Limit(
            compute_s=COMPUTE_S,
            wire_bytes=WIRE_BYTES,
            wire_s=None if rate_bit_per_s is None else WIRE_BYTES * 8 / rate_bit_per_s,
        ),
        cases=cases,
    ).to_dict()
