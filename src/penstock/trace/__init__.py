"""Records of a run, simulated or measured, in one form. Pure Python: no torch."""

from penstock.timing import TaskRecord
from penstock.trace.analysis import (
    Occupation,
    TaskDifference,
    compare,
    occupation,
    overhead_s,
    write_comparison,
)
from penstock.trace.chrome import write_chrome_trace

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
