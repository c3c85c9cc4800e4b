"""`penstock bench`: schedules side by side, on the same shapes and seeds, in one alternating run."""

from penstock.bench.config import BenchConfig
from penstock.bench.result import BenchResult

__all__ = ["BenchConfig", "BenchResult"]
