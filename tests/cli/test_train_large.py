"""A text that is larger than the memory a run may have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S
from tests.support.runs import clean_environ, write_config

pytestmark = pytest.mark.slow

LIMIT_BYTES, TEXT_BYTES = 1 << 30, 5 << 30
PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit}))
from penstock.cli import main
from penstock.data import text
text.SAMPLED_BLOCKS = 64
code = main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit data, nor tell the peak")
def test_a_text_larger_than_memory_trains(tmp_path: Path) -> None:
    """With 1 GiB for everything that a process writes to, 5 GiB of text can only be read piece by piece."""
    config, text = write_config(tmp_path), tmp_path / "large.txt"
    lines = (tmp_path / "text.txt").read_bytes()
    with text.open("wb") as file:  # sparse: text here and there, zeros between
        file.truncate(TEXT_BYTES)
        for place in range(0, TEXT_BYTES, TEXT_BYTES // 64):
            file.seek(place)
            file.write(lines)
    settings = [f"data.path={text}", "parallel.processes=1", "train.steps=4"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(limit=LIMIT_BYTES), "train", config, "--json", *settings],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=clean_environ(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 4 and 0 < found["corpus_unigram_entropy"] < 5.6
    assert (
        f"{text.stat().st_size:,} bytes; identified and frequencies of bytes counted by 67,108,864"
        in done.stdout
    )
    peak_bytes = 1024 * int(done.stderr.split()[-1])
    assert peak_bytes < LIMIT_BYTES < TEXT_BYTES
