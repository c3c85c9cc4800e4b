"""Measurements and studies that the package does without: run them from this folder's parent.

`python -m benchmarks.suite .` runs all that BENCHMARKS.md shows. Each part is a command of its own:

- `collectives`: the transport alone, how near it comes to the wire.
- `sft`: TRL's script for fine-tuning, beside the expert parallelism of other systems.
- `overlap`: the picture of the README.
- `layer`: the MoE layer in one process, beside other implementations.
- `drift`: training while the network or a rank gets slower.
- `published`: the layers of three studies, by simulation.
- `calibration`: constants of the papers' clusters, and how far predictions are from what others measured.

Ctrl-C ends each of them; what had been measured until then is printed.

`peers` holds the other systems that `penstock bench --peers` compares with.
"""

import os
import signal
import sys
from types import FrameType

from penstock.stops import SIGNALS, speaks


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: while modules are loaded there is nothing to clear up; the first rank says so."""
    del frame
    signal.signal(number, signal.SIG_IGN)  # one Ctrl-C may arrive twice
    if speaks():
        print("penstock: stopped; nothing had been measured yet", file=sys.stderr, flush=True)
    os._exit(130)


if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)  # `python -m benchmarks.NAME`; the command takes over when it begins
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # held back until now where Penstock starts ranks
