"""Freed memory stays with the process: using it again makes no page faults."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource, sys, torch
from penstock.runtime.host_memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None

def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(16 << 20) for _ in range(4)]  # 64 MiB each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

use()
print(json.dumps([kept, use()]))
"""


def faults(mode: str) -> list[int]:
    """What keep_freed_memory returned, and page faults of using 256 MiB for the second time."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_memory_used_again_makes_no_faults() -> None:
    kept, again = faults("keep")
    _, by_default = faults("default")
    assert kept and 3 * again < by_default
