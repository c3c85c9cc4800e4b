"""`penstock bench`: schedules side by side, on the same shapes and seeds, in one alternating run."""

from penstock.lab.bench.config import BenchConfig
from penstock.lab.bench.result import BenchResult

__all__ = ["BenchConfig", "BenchResult"]
