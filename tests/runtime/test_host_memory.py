"""Freed memory stays with the process: using it again makes no page faults."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource, torch
from penstock.runtime.machinery import keep_freed_memory

def use():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(16 << 20) for _ in range(4)]  # 64 MiB each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

use()
by_default = use()
kept = keep_freed_memory()
use()
print(json.dumps([by_default, kept, use()]))
"""


@pytest.mark.slow
def test_memory_used_again_makes_no_faults() -> None:
    """Page faults of using 256 MiB for the second time, before and after."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    by_default, kept, again = json.loads(done.stdout)
    assert kept and 3 * again < by_default
