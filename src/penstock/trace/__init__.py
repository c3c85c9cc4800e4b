"""Records of a run, simulated or measured, in one form. Pure Python: no torch."""

from penstock.trace.analysis import (
    Occupation,
    TaskDifference,
    compare,
    occupation,
    overhead_s,
    write_comparison,
)
from penstock.trace.chrome import write_chrome_trace
from penstock.trace.records import TaskRecord

__all__ = [
    "Occupation",
    "TaskDifference",
    "TaskRecord",
    "compare",
    "occupation",
    "overhead_s",
    "write_chrome_trace",
    "write_comparison",
]
